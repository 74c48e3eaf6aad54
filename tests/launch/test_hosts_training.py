"""The quickstart on two and three hosts, started in every way, learns exactly what it learns on
this machine alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.host import Command, Mount
from tests.hosts.network import Network, why_not
from tests.launched import ROOT, series
from tests.warm_ranks import WarmRanks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(bool(why_not(ssh=True)), reason=why_not(ssh=True) or "hosts can be made"),
]

SECONDS = 300.0
CONFIG = "ds_configs/quickstart.yaml"
# Images without scikit-learn: its import takes as long as a fifth of a start.
IMAGES = (
    "{kind: synthetic_images, image_size: 28, channels: 1, num_classes: 10, "
    "num_samples: 1437, num_eval_samples: 360}"
)
SETTINGS = (
    "training.max_steps=22",
    "training.log_every=1",
    "monitors.tensorboard=false",
    "monitors.progress=off",
)
SETTINGS += (f"data={IMAGES}",)
PROGRAMS = Path(sys.prefix) / "bin"
IPV6 = Path("/proc/net/if_inet6").exists()


def address(node: int) -> str:
    """Return what a hostfile may have instead of a name; the name where this kernel has no IPv6."""
    return f"fd77::{node + 1}" if IPV6 else f"node-{node}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def network(shared: Path) -> Iterator[Network]:
    """Yield three hosts with a folder in common, which enter each other through ssh."""
    with Network(None) as network:
        for node in range(3):
            host = network.host(f"node-{node}", mounts={"/shared": Mount(bind=shared)})
            host.start_sshd()
            if IPV6:
                assert (
                    host.run(
                        [
                            "ip",
                            "-6",
                            "address",
                            "add",
                            f"{address(node)}/64",
                            "dev",
                            "eth0",
                            "nodad",
                        ]
                    ).returncode
                    == 0
                )
        yield network


@pytest.fixture(scope="module")
def alone(warm: WarmRanks, shared: Path) -> dict[int, dict[int, float]]:
    """Return the losses on this machine, by number of ranks."""
    for ranks in (2, 3):
        words = [
            "--config",
            str(ROOT / CONFIG),
            f"run.output_dir={shared}",
            f"run.name=alone-{ranks}",
            *SETTINGS,
        ]
        job = warm.start(words, num_ranks=ranks, folder=shared / f"said-{ranks}")
        assert set(job.wait(SECONDS)) == {0}, job.stated()
    return {ranks: series(shared / f"alone-{ranks}", "train/loss") for ranks in (2, 3)}


def settings(name: str) -> list[str]:
    return ["run.output_dir=/shared", f"run.name={name}", *SETTINGS]


def ended(*commands: Command) -> None:
    codes = [command.wait(SECONDS) for command in commands]
    assert set(codes) == {0}, f"{codes}\n" + "\n".join(
        command.stated()[-3000:] for command in commands
    )
    for command in commands:
        assert command.host.processes() == {}


def test_the_plain_deepspeed_command_without_ssh(
    network: Network, shared: Path, alone: dict[int, dict[int, float]]
) -> None:
    (shared / "two").write_text("node-0 slots=1\nnode-1 slots=1\n")
    place = ["--hostfile=/shared/two", "--no_ssh", "--master_addr=node-0", "--master_port=29500"]
    ended(
        *(
            host.start(
                [
                    str(PROGRAMS / "deepspeed"),
                    *place,
                    f"--node_rank={node}",
                    "train.py",
                    "--config",
                    CONFIG,
                    *settings("plain"),
                ],
                cwd=ROOT,
            )
            for node, host in enumerate(network.hosts[:2])
        )
    )
    assert series(shared / "plain", "train/loss") == alone[2]


# in pods, and under every fault of the campaign, hosts are started so as well
@pytest.mark.exhaustive
def test_launch_node_on_each_host(
    network: Network, shared: Path, alone: dict[int, dict[int, float]]
) -> None:
    place = [
        "--nnodes",
        "2",
        "--num_gpus",
        "1",
        "--master_addr",
        "node-0",
        "--master_port",
        "29600",
        "--no_token",
    ]
    command = [
        sys.executable,
        "-m",
        "framework",
        "launch",
        "node",
        CONFIG,
        *settings("node"),
        *place,
    ]
    commands = [
        host.start([*command, "--node_rank", str(node)], cwd=ROOT)
        for node, host in enumerate(network.hosts[:2])
    ]
    ended(*commands)
    assert series(shared / "node", "train/loss") == alone[2]
    for command_ in commands:
        assert "finished: 2 nodes, every rank ended with 0" in command_.stated()


def test_launch_over_ssh_on_three_hosts(
    network: Network, shared: Path, alone: dict[int, dict[int, float]]
) -> None:
    """Two hosts are given by IPv6 addresses, in brackets and without; all meet at the address of
    the first. A rank is killed, and all start again.
    """
    first = f"[{address(0)}]" if IPV6 else address(0)
    (shared / "three").write_text(f"{first} slots=1\nnode-1 slots=1\nroot@{address(2)} slots=1\n")
    command = [
        sys.executable,
        "-m",
        "framework",
        "launch",
        "-H",
        "/shared/three",
        CONFIG,
        *settings("ssh"),
    ]
    started = network.hosts[0].start(
        [*command, *dying(12, "/shared/ssh-once", restarts=1)], cwd=ROOT
    )
    ended(started)
    assert series(shared / "ssh", "train/loss") == alone[3]
    assert "launch: start 2 of at most 2, from step 8, in 0 s [restart]" in started.stated()
    assert f"{address(2)}: launch: finished: 3 nodes" in started.stated()
    assert f"launch: master_addr {address(0)} (the first host)" in started.stated()
    for host in network.hosts:
        assert host.processes() == {}


def dying(step: int, once: str, *, restarts: int, rank: int = 1) -> list[str]:
    """Return settings of a run that saves every fourth step, with a rank that is killed once."""
    callback = (
        f"{{target: tests.jobs.dying:Dies, args: {{step: {step}, once: {once}, rank: {rank}}}}}"
    )
    return [
        f"supervision.max_restarts={restarts}",
        "checkpoint.every_steps=4",
        f"callbacks=[{callback}]",
    ]


@pytest.mark.exhaustive  # waits a minute
def test_the_job_goes_on_without_a_lost_host(
    network: Network, shared: Path, alone: dict[int, dict[int, float]]
) -> None:
    (shared / "hosts").write_text("node-0 slots=1\nnode-1 slots=1\nnode-2 slots=1\n")
    words = ["-H", "/shared/hosts", "--min_nodes", "2", CONFIG, *settings("lost"), "run.seed=0"]
    started = network.hosts[0].start(
        [
            sys.executable,
            "-m",
            "framework",
            "launch",
            *words,
            *dying(12, "/shared/lost-once", restarts=2),
        ],
        cwd=ROOT,
    )
    until = time.monotonic() + SECONDS
    while not (shared / "lost-once").exists():
        assert started.poll() is None, started.stated()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.05)
    network.hosts[2].kill()
    assert started.wait(SECONDS) == 0, started.stated()[-3000:]
    assert "going on on 2 of 3 nodes [fewer-hosts]" in started.stated()
    found = series(shared / "lost", "train/loss")
    assert found == {step: pytest.approx(loss, abs=1e-5) for step, loss in alone[3].items()}
