"""Limits of a machine, on a machine that really has them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from framework.config.load import config_from_values
from framework.doctor.node.machine import (
    check_cores,
    check_host_memory,
    check_name,
    check_shared_memory,
    check_user,
)
from framework.doctor.node.requirements import Requirements, requirements_of
from framework.plan.cluster import Cluster
from framework.plan.compiled_ops import Op
from framework.plan.plan import make_plan
from tests.doctor.node.broken import QUICKSTART, doctor, findings, why_no_mounts
from tests.launched import ROOT, job_environment

needs_mounts = pytest.mark.skipif(bool(why_no_mounts()), reason=why_no_mounts() or "it can")
CLUSTER = Cluster(num_hosts=2, devices_per_host=2, device="cpu")
NEED = Requirements(CLUSTER, (Op("deepspeed_shm_comm", "processors"),))


@pytest.mark.slow
@needs_mounts
def test_a_containers_shared_memory_is_named() -> None:
    mounts = ["-t tmpfs -o size=64m tmpfs /dev/shm"]
    found = findings(QUICKSTART, "--num_gpus", "2", "data.num_workers=2", mounts=mounts)
    assert found["shm-small"]["severity"] == "warning"
    assert "64 MiB free of 64 MiB: that, a container's default," in found["shm-small"]["found"]
    assert "2 data workers" in found["shm-small"]["found"]
    assert "--shm-size" in found["shm-small"]["fix"]
    assert "shm-small" not in findings(QUICKSTART, "--num_gpus", "2", mounts=mounts), (
        "ranks on processors train with it"
    )


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    (problem,) = check_shared_memory(NEED, tmp_path / "shm").problems
    assert (problem.kind, problem.severity) == ("shm-missing", "error")


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "severity"), [("200", "error"), ("300", "warning")])
def test_few_open_files(limit: str, severity: str) -> None:
    found = findings("--num_gpus", "2", before=[f"ulimit -n {limit}"])
    assert found["nofile-low"]["severity"] == severity
    assert limit in found["nofile-low"]["found"]


@pytest.mark.slow
@pytest.mark.parametrize("may_lock", [False, True])
def test_memory_that_cannot_be_locked(tmp_path: Path, may_lock: bool) -> None:
    """Root may lock memory at any limit, unless it lacks the capability, as in a container."""
    if may_lock and os.geteuid() != 0:
        pytest.skip("locking beyond the limit needs root")
    drop = (
        ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
        if os.geteuid() == 0 and not may_lock
        else []
    )
    if drop and shutil.which("setpriv") is None:
        pytest.skip("there is no `setpriv` (Debian: util-linux)")
    (tmp_path / "uverbs0").touch()
    look = (
        "import sys; from pathlib import Path; from framework.doctor.node.machine import check_locked_memory; "
        "print([each.kind for each in check_locked_memory(Path(sys.argv[1])).problems])"
    )
    command = [
        *drop,
        "bash",
        "-c",
        'ulimit -l 64; exec "$@"',
        "bash",
        sys.executable,
        "-c",
        look,
        str(tmp_path),
    ]
    done = subprocess.run(
        command, env=job_environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == ("[]" if may_lock else "['memlock']"), done.stderr


@pytest.mark.slow
def test_memory_is_not_locked_where_nothing_needs_it() -> None:
    if not Path("/dev/infiniband").exists():
        assert "memlock" not in findings(before=["ulimit -l 64"])


@pytest.mark.parametrize(
    ("threads", "kinds"),
    [("", []), ("1", []), ("4096", ["too-many-threads"]), ("4096,2", ["too-many-threads"])],
)
def test_more_threads_than_cores(threads: str, kinds: list[str]) -> None:
    assert [each.kind for each in check_cores(NEED, {"OMP_NUM_THREADS": threads}).problems] == kinds


@pytest.mark.slow
@needs_mounts
def test_a_name_that_leads_back_here(tmp_path: Path) -> None:
    """Debian writes such a line; gloo then sends the other hosts to themselves, and hangs."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 pod-7\n")
    look = (
        "from tests.doctor.node.test_machine import NEED; from framework.doctor.node.machine import check_name; "
        "print(*(f'{each.kind} {each.severity}' for each in check_name(NEED, {}).problems))"
    )
    script = f'mount --bind {tmp_path}/hosts /etc/hosts; hostname pod-7; exec "$@"'
    own = ["unshare", "--mount", "--uts", "--propagation", "private", "bash", "-c", script, "bash"]
    done = subprocess.run(
        [*own, sys.executable, "-c", look],
        env=job_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "hostname-loopback warning", done.stderr


def test_gloo_wants_one_interface_of_this_host() -> None:
    (problem,) = check_name(NEED, {"GLOO_SOCKET_IFNAME": "^lo,docker"}).problems
    assert problem.kind == "interface-unknown"
    assert socket.if_nameindex()[0][1] in problem.fix
    assert not check_name(NEED, {"GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1]}).problems


def test_one_host_may_be_called_anything() -> None:
    assert not check_name(Requirements(Cluster(devices_per_host=2)), {}).problems


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(("environment", "kinds"), [({}, "user-unknown"), ({"USER": "pod"}, "")])
def test_a_user_without_a_name(environment: dict[str, str], kinds: str) -> None:
    """OpenShift gives such a user to each container."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setuid(123_456)
            os.write(
                write, " ".join(each.kind for each in check_user(environment).problems).encode()
            )
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as reported:
        assert reported.read() == kinds
    os.waitpid(child, 0)


def test_a_host_is_held_against_what_its_ranks_offload() -> None:
    values = {
        "model": {"kind": "gpt", "size": "llama-3-8b"},
        "data": {"kind": "text", "sequence_length": 4096},
        "task": {"kind": "causal_lm"},
        "precision": {"dtype": "bf16"},
        "batch": {"micro_size": 1},
        "training": {"max_steps": 10},
        "zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    taken = {}
    for ranks, device in ((4, "cuda"), (8, "cuda"), (8, "cpu")):
        cluster = Cluster(devices_per_host=ranks, device=device)
        wanted = requirements_of(make_plan(config_from_values(values), cluster))
        taken[ranks, device] = wanted.host_bytes
        if device == "cuda":  # 16 bytes of each of eight billion weights, at least
            assert wanted.host_bytes > 16 * 8e9
            small = check_host_memory(wanted, total=64 * 2**30)
            assert [problem.kind for problem in small.problems] == ["host-memory-small"]
            assert not check_host_memory(wanted, total=2 * wanted.host_bytes).problems
    assert taken[8, "cpu"] == 0
    assert taken[8, "cuda"] == pytest.approx(taken[4, "cuda"], rel=0.2)


@pytest.mark.slow
def test_the_report_of_this_machine_is_complete() -> None:
    done = doctor("--num_gpus", "1")
    assert "fit to train" in done.stdout
    for name in (
        "versions",
        "code",
        "devices",
        "cores",
        "shared memory",
        "open files",
        "run folder",
        "host name",
        "clock",
    ):
        assert f" {name} " in done.stdout
