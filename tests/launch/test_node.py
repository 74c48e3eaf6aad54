"""`launch` and `launch node` as a person starts them, with real training."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from framework.doctor.node import start as start_module
from framework.errors import ConfigError, UsageError
from framework.hosts.devices import LocalDevices
from framework.hosts.topology import HostTopology
from framework.launch import node
from framework.launch.local import launch
from framework.launch.node import main
from framework.load_run import load_run
from tests.hosts.network import why_not
from tests.launch.rendezvous.members import ROOT, restore_signals
from tests.launched import TIMEOUT_SECONDS, job_environment, series
from tests.ports import free_ports

pytestmark = pytest.mark.timing
# Between hosts the same is shown by tests/launch/test_hosts_training.py and
# tests/deploy/test_hosts_kubernetes.py.
without_hosts = pytest.mark.skipif(
    not why_not(ssh=True), reason="hosts can be made: shown between those"
)

CONFIG = """
run: {name: x}
model: {kind: lenet}
data: {kind: digits}
batch: {global_size: 60}
zero: {stage: 1}
training: {max_steps: 8, log_every: 1}
monitors: {tensorboard: false}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "x.yaml").write_text(CONFIG)
    return "x.yaml"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = job_environment(PYTHONUNBUFFERED="1")
    return subprocess.Popen(
        [sys.executable, "-m", "framework", "launch", *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=restore_signals,
    )


def nodes(folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start two nodes with a rank each."""
    port = str(free_ports(2))
    place = [
        "--nnodes",
        "2",
        "--num-gpus",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
    ]
    place += ["--no-token"]
    return [start(folder, "node", *words, *place, "--node-rank", str(rank)) for rank in (0, 1)]


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    stated = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, stated, strict=True)]


@pytest.mark.slow
@without_hosts
def test_two_nodes_learn_what_two_local_ranks_learn(tmp_path: Path, config: str) -> None:
    for name, processes in (
        ("local", [start(tmp_path, config, "--num_gpus", "2", "run.name=local")]),
        ("nodes", nodes(tmp_path, config, "run.name=nodes")),
    ):
        for code, stated in ended(*processes):
            assert code == 0, stated
            assert re.fullmatch(
                rf"launch: finished: {len(processes)} nodes?, every rank ended with 0",
                stated.splitlines()[-1],
            )
        assert len(series(tmp_path / "runs" / name, "train/loss")) == 8
    runs = [series(tmp_path / "runs" / name, "train/loss") for name in ("local", "nodes")]
    assert runs[0] == runs[1]


@pytest.mark.slow
@without_hosts
def test_a_request_to_one_node_saves_on_both_and_a_killed_rank_ends_both(
    tmp_path: Path, config: str
) -> None:
    words = [config, "training.max_steps=100000", "run.name=long"]
    for ask, codes in (("SIGTERM", [75, 75]), ("SIGKILL", [76, 137])):
        processes = nodes(tmp_path, *words, "checkpoint.resume=auto")
        wait_for_training(processes, tmp_path / "runs/long/metrics.jsonl")
        if ask == "SIGTERM":
            processes[1].send_signal(signal.SIGTERM)
        else:
            os.kill(rank_of(processes[1].pid), signal.SIGKILL)
        since = time.monotonic()
        ends = ended(*processes)
        assert time.monotonic() - since < 60
        assert [code for code, _ in ends] == codes, ends
    steps = [
        int(path.name.removeprefix("global_step"))
        for path in (tmp_path / "runs/long/checkpoints").glob("global_step*")
    ]
    assert steps  # the request's; the second start went on from it
    assert "rank 1: killed by SIGKILL (137" in ends[0][1].splitlines()[-1]


def wait_for_training(processes: list[subprocess.Popen[str]], metrics: Path) -> None:
    """Wait until a step has been logged that was not there before."""
    before = metrics.stat().st_size if metrics.exists() else 0
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.stat().st_size <= before:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), ended(*processes)
        time.sleep(0.2)


def rank_of(agent: int) -> int:
    """Return the process that an agent started."""
    (child,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(child)


# ------------------------------------------------------------------------------ what starts nothing


def test_a_dry_run_prints_everything_and_starts_nothing(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    for name, value in {
        "DS_ACCELERATOR": "cpu",
        "NNODES": "3",
        "JOB_COMPLETION_INDEX": "2",
        "MASTER_ADDR": "a-0.a",
    }.items():
        monkeypatch.setenv(name, value)
    assert main([config, "run.name=ab", "--nproc-per-node", "2", "--dry-run", "--no-token"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "launch: nnodes      3 (NNODES)",
        "launch: node_rank   2 (JOB_COMPLETION_INDEX)",
        "launch: slots       2 (--nproc-per-node)",
        "launch: master_addr a-0.a (MASTER_ADDR)",
        "launch: master_port 29500 (default)",
        "launch: world size  6 = 3 nodes x 2 ranks",
    ]
    assert "printf 'node-%s slots=2\\n' 0 1 2 > $hosts && " in lines[6]
    assert (
        "--hostfile=$hosts --no_ssh --node_rank=2 --master_addr=a-0.a --master_port=29500"
        in lines[6]
    )


@pytest.mark.parametrize(
    ("words", "visible", "hosts", "include"),
    [
        (["--nnodes", "1", "--num_gpus", "2"], None, ["node-0 slots=2"], ""),
        (
            [
                "--nnodes",
                "3",
                "--num_gpus",
                "2",
                "--node_rank",
                "1",
                "--master_addr",
                "a",
                "--no_token",
            ],
            "5,3,0",
            ["node-0 slots=4", "node-1 slots=4", "node-2 slots=4"],
            "node-0:0,3@node-1:0,3@node-2:0,3",
        ),
        (
            [
                "--nnodes",
                "1000",
                "--num_gpus",
                "2",
                "--node_rank",
                "1",
                "--master_addr",
                "a",
                "--no_token",
            ],
            "1,0",
            [f"node-{node} slots=2" for node in range(1000)],
            "@".join(f"node-{node}:0,1" for node in range(1000)),
        ),
    ],
)
def test_the_plain_command_is_what_a_shell_can_run(
    words: list[str],
    visible: str | None,
    hosts: list[str],
    include: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A `deepspeed` script prints its arguments. A thousand nodes take no longer line than 3."""
    monkeypatch.chdir(tmp_path)
    chosen = None if visible is None else tuple(sorted(map(int, visible.split(",")))[:2])
    devices = LocalDevices("cpu", 0) if visible is None else LocalDevices("cuda", 2, chosen)
    monkeypatch.setattr(node, "find_devices", lambda _: devices)
    data = [
        "batch.global_size=6000",
        "data.kind=synthetic_images",
        "data.image_size=28",
        "data.channels=1",
        "data.num_classes=10",
    ]
    main([config, *data, "monitors.wandb.project=$HOME;x", *words, "--dry_run"])
    stated = capsys.readouterr().out
    assert len(stated) < 1500
    line = stated.splitlines()[-1].removeprefix("launch: plain command: ")
    show_settings = f"{sys.executable} -c 'import json,sys; print(json.dumps(sys.argv[1:]))'"
    line = line.replace(str(Path(sys.executable).with_name("deepspeed")), "deepspeed")
    script = f'deepspeed() {{ {show_settings} "$@"; cat "${{1#--hostfile=}}"; }}\n{line}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    reported, *listed = done.stdout.splitlines()
    assert listed == hosts
    assert json.loads(reported)[-1] == "monitors.wandb.project=$HOME;x"
    assert [
        word.partition("=")[2] for word in json.loads(reported) if word.startswith("--include=")
    ] == ([include] if include else [])


def test_one_node_without_gpus_starts_as_launch_does(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main([config, "--nnodes", "1", "--dry_run"]) == 0
    assert "launch: slots       2 (default on CPU)" in capsys.readouterr().out.splitlines()


def test_an_option_is_reported_under_the_name_that_was_used(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node, "find_devices", lambda _: LocalDevices("cuda", 2))
    assert main([config, "--num_nodes", "1", "--nproc-per-node", "2", "--dry_run"]) == 0
    assert capsys.readouterr().out.startswith("launch: nnodes      1 (--num_nodes)\n")
    with pytest.raises(
        ConfigError, match=r"command line: --nproc-per-node = 4: this machine has 2 cuda"
    ):
        main([config, "--num_nodes", "1", "--nproc-per-node", "4", "--dry_run"])


def test_a_node_alone_takes_a_free_port_and_leaves_a_given_one_to_its_ranks(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that holds the given port may be ending: rank 0 reports it with a code that is
    tried again, where a refusal here never is.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("framework.hosts.topology.DEFAULT_PORT", port)
        assert main([config, "--nnodes", "1", "--dry_run"]) == 0
        (stated,) = re.findall(r"master_port (\d+) \(a free one\)", capsys.readouterr().out)
        assert int(stated) != port
        assert main([config, "--nnodes", "1", "--dry_run", "--master_port", str(port)]) == 0
        assert f"master_port {port} (--master_port)" in capsys.readouterr().out
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert main([config, "--nnodes", "1", "--dry_run"]) == 0
        assert f"master_port {port} (MASTER_PORT)" in capsys.readouterr().out


def test_one_of_several_nodes_does_not_train_alone(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNODES", "2")
    with pytest.raises(
        ConfigError, match=r"NNODES = .*would train alone; start `launch node CONFIG`"
    ):
        launch([config, "--dry_run"])


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--spares", "2"], "of 2 nodes none would train"),
        (["--spares", "1", "--min_nodes", "2"], "1 node would train"),
        (["--spares", "1"], "set supervision.max_restarts"),
        (["--min_nodes", "1"], "set supervision.max_restarts"),
    ],
)
def test_nodes_that_cannot_take_a_place_are_refused(
    words: list[str], reported: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = [
        "--nnodes",
        "2",
        "--node_rank",
        "0",
        "--master_addr",
        "127.0.0.1",
        "--num_gpus",
        "1",
        "--dry_run",
    ]
    with pytest.raises(UsageError, match=reported):
        main([config, *place, *words])


def test_a_spare_takes_the_number_behind_those_that_train(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    place = [
        "--nnodes",
        "3",
        "--node_rank",
        "2",
        "--master_addr",
        "127.0.0.1",
        "--num_gpus",
        "1",
        "--dry_run",
    ]
    place += ["--token_file", "token"]
    assert main([config, *place, "--spares", "1", "supervision.max_restarts=3"]) == 0
    stated = capsys.readouterr()
    assert "launch: node 2 is a spare" in stated.err
    assert "world size  2 = 2 nodes x 1 rank" in stated.out


@pytest.mark.parametrize("dry_run", [[], ["--dry_run"]])
def test_several_nodes_without_a_secret_are_refused_without_an_option_for_it(
    dry_run: list[str], config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(node, "run_node", None)
    place = [
        config,
        "--nnodes",
        "2",
        "--node_rank",
        "1",
        "--master_addr",
        "127.0.0.1",
        "--num_gpus",
        "1",
        *dry_run,
    ]
    with pytest.raises(
        ConfigError, match=r"several nodes need a secret in common.*--no_token.*\[no-token\]"
    ):
        main(place)
    with pytest.raises(UsageError, match="--no_token, and a token is given"):
        main([*place, "--no_token", "--token_file", "token"])
    if dry_run:
        for way in (["--no_token"], ["--token_file", "token"]):
            assert main([*place, *way]) == 0
        monkeypatch.setenv("DSF_TOKEN_END", "99")  # as `hide_token` leaves it
        assert main(place) == 0


@pytest.mark.parametrize(
    ("words", "reported"), [(["--nnodes", "2"], "name a run config"), (["a=1"], "a=1 is a setting")]
)
def test_a_wrong_command_line(words: list[str], reported: str) -> None:
    with pytest.raises(UsageError, match=f"launch node: .*{reported}"):
        main(words)


def test_a_refusal_is_in_the_termination_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSF_TERMINATION_LOG", str(tmp_path / "log"))
    with pytest.raises(ConfigError):
        main([str(tmp_path / "none.yaml"), "--nnodes", "1", "--num_gpus", "1"])
    assert "[config-not-found]" in (tmp_path / "log").read_text()


def test_without_deepspeed_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"training needs the package deepspeed, which .* does not have.*\[package-missing\]",
    ):
        node.require_deepspeed()


@pytest.mark.parametrize(
    ("kind", "name"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_a_preflight_sees_the_devices_that_the_ranks_will_have(
    kind: Literal["cuda", "npu"],
    name: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Mapping[str, str]] = []

    @contextmanager
    def look(
        _: object, __: object, environment: Mapping[str, str], **___: object
    ) -> Iterator[dict[str, object]]:
        seen.append(environment)
        yield {}

    monkeypatch.setattr(start_module, "look_before_start", look)
    topology = HostTopology(2, 2, 0, "node-0", 29500)
    with node._preflight(
        load_run(str(tmp_path / config), ()), topology, LocalDevices(kind, 2, (6, 7)), {name: "0,1"}
    )():
        assert seen == [{name: "6,7"}]


@pytest.mark.slow
def test_what_is_sent_over_stdin_has_to_be_an_order() -> None:
    command = [sys.executable, "-m", "framework", "launch", "node", "x.yaml", "--from_stdin"]
    done = subprocess.run(
        command, input="hello\n", cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 64
    assert "--from_stdin is for `launch -H`" in done.stderr
