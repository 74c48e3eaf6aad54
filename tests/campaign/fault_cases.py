"""The faults: what is done to a run, and what must come of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.checkpoint.names import MANIFEST
from framework.errors import EXIT_CONFIG, EXIT_PEER_LOST, EXIT_STOPPED, EXIT_STORAGE
from tests.campaign.fault_stage import DEAD, SAVE_EVERY, SHARED, Stage
from tests.dead_disk import is_waiting, revive

KILLED = 128 + signal.SIGKILL
LISTEN = """
import socket, time
with socket.create_server(("0.0.0.0", {port})):
    print("taken", flush=True)
    time.sleep(900)
"""
_AT_STEP = 12


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: for --only.
        what: in words, for the table.
        codes: allowed exit codes of the command on each host.
        culprit: regular expression that what was printed must match.
        in_logs: it may also stand in the ranks' logs, because no one reads what is printed any
            more.
        act: starts the run and does it; calls `Stage.fault` when it happens.
        stage: arguments of `Stage`.
        stops: whether the fault ends the run, so that all nodes must have stopped within the limit.
        limit: seconds for that, from the fault on.
        repair: done before the run is started again.
        same_metrics: whether the metrics, too, must be those of the unbroken run; a full disk loses
            lines.
    """

    name: str
    what: str
    codes: dict[str, set[int]]
    culprit: str
    act: Callable[[Stage], None]
    stage: dict[str, Any] = field(default_factory=dict)
    stops: bool = True
    limit: float = 20.0
    repair: Callable[[Stage], None] = lambda stage: None
    same_metrics: bool = True
    in_logs: bool = False


def both(code: int) -> dict[str, set[int]]:
    return {"node-0": {code}, "node-1": {code}}


def split(first: int, second: int) -> dict[str, set[int]]:
    return {"node-0": {first}, "node-1": {second}}


def training(do: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """In the middle of training, without ssh."""

    def act(stage: Stage) -> None:
        stage.nodes()
        stage.until_step(_AT_STEP)
        stage.fault()
        do(stage)

    return act


def training_over_ssh(do: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """The same, started through ssh."""

    def act(stage: Stage) -> None:
        stage.over_ssh()
        stage.until_step(_AT_STEP)
        stage.fault()
        do(stage)

    return act


SUPERVISED = ("supervision.max_restarts=5", "supervision.wait_seconds=1")
_BACK_SECONDS = 1.0
_LOOKS = f"{SHARED}/look"
_HANGS = ("supervision.hang_seconds=8",)


def going_on(
    do: Callable[[Stage], None],
    back: Callable[[Stage], None] = lambda stage: None,
    *,
    words: Sequence[str] = (),
) -> Callable[[Stage], None]:
    """In the middle of training that starts again by itself; `back`: what a platform or a person
    does then.
    """

    def act(stage: Stage) -> None:
        for node in range(stage.num_nodes):
            stage.node(
                node, words=[*words, *SUPERVISED], DSF_STEP_SECONDS="0.1", DSF_STEP_LOOKS=_LOOKS
            )
        stage.until_step(_AT_STEP)
        stage.fault()
        do(stage)
        time.sleep(_BACK_SECONDS)
        back(stage)

    return act


def comes_back(node: int) -> Callable[[Stage], None]:
    """The agent is started again, on a new host where the old one is gone."""

    def do(stage: Stage) -> None:
        host = stage.hosts[f"node-{node}"]
        if not host.is_alive():
            stage.network.hosts.remove(host)
            stage.add_host(f"node-{node}")
        stage.node(node, words=SUPERVISED, DSF_STEP_SECONDS="0.1")

    return do


def cut_for_a_while(stage: Stage) -> None:
    """Longer than anybody waits for a node that is silent."""
    cut(stage)
    time.sleep(25)
    stage.network.heal(stage.hosts["node-1"])


def cut_for_a_moment(stage: Stage) -> None:
    """Sooner over than a node is given up."""
    stage.nodes()
    stage.until_step(_AT_STEP)
    cut(stage)
    time.sleep(8)
    stage.network.heal(stage.hosts["node-1"])


def damaged(damage: Callable[[Path], None]) -> Callable[[Stage], None]:
    """The newest checkpoint is damaged, and a rank is killed."""

    def do(stage: Stage) -> None:
        newest = stage.run / "checkpoints" / f"global_step{_AT_STEP // SAVE_EVERY * SAVE_EVERY}"
        stage.until((newest / MANIFEST).exists, "checkpoint")
        damage(
            max(
                (path for path in newest.iterdir() if path.name != MANIFEST),
                key=lambda path: path.stat().st_size,
            )
        )
        kill_rank(stage)

    return do


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def hang(stage: Stage) -> None:
    """Rank 1 takes no further step, and gives no answer."""
    os.kill(stage.rank(1), signal.SIGSTOP)


def desync(stage: Stage) -> None:
    """Rank 1 enters one collective more than the others, in one start."""
    assert stage.hosts["node-1"].run(["touch", "/tmp/here"]).returncode == 0
    (stage.shared / "look").symlink_to("/tmp/here")
    stage.until_said("start 2 of at most 6")
    (stage.shared / "look").unlink()


def fill_until_it_fails(stage: Stage) -> None:
    """Until the run has ended for it, and was started again."""
    fill(stage)
    stage.until_said("start 2 of at most 6")
    empty(stage)


def kill_rank(stage: Stage) -> None:
    os.kill(stage.rank(1), signal.SIGKILL)


def kill_rank_0(stage: Stage) -> None:
    os.kill(stage.rank(0), signal.SIGKILL)


def stuck_rank(stage: Stage) -> None:
    """Rank 1 looks at a file system that does not answer, and the other is killed."""
    (stage.shared / "look").symlink_to(DEAD)
    pid = stage.rank(1)
    stage.until(lambda: is_waiting(pid), "rank that cannot be killed")
    (stage.shared / "look").unlink()
    kill_rank_0(stage)
    stage.until_said("[rank-not-killed]")


def stop_at_a_rank(stage: Stage) -> None:
    """No other rank is asked, and the other one is killed before both have stopped."""
    os.kill(stage.rank(1), signal.SIGTERM)
    time.sleep(1)
    kill_rank_0(stage)


def going_on_over_ssh(
    do: Callable[[Stage], None], *, step: int = _AT_STEP, step_seconds: float = 0.1
) -> Callable[[Stage], None]:
    """In the middle of training that `launch -H` starts again."""

    def act(stage: Stage) -> None:
        stage.over_ssh(words=SUPERVISED, DSF_STEP_SECONDS=str(step_seconds), DSF_STEP_LOOKS=_LOOKS)
        stage.until_step(step)
        stage.fault()
        do(stage)

    return act


def host_comes_back(stage: Stage) -> None:
    """The host of the rank that cannot be killed is waited for, and the file system is there
    again.
    """
    stuck_rank(stage)
    stage.until_said("waiting for 1/2 nodes")
    revive(stage.dead)


def host_reboots(name: str) -> Callable[[Stage], None]:
    """It loses power, and another one of its name comes with its sshd."""

    def do(stage: Stage) -> None:
        power_off(name)(stage)
        time.sleep(5)
        stage.network.hosts.remove(stage.hosts[name])
        stage.add_host(name).start_sshd()

    return do


def connection_ends(stage: Stage) -> None:
    """The `ssh` that holds the agent of node 1 is killed."""
    os.kill(stage.pid("login", "node_rank 1"), signal.SIGKILL)


def power_off(name: str) -> Callable[[Stage], None]:
    """There is silence: no connection is closed."""

    def do(stage: Stage) -> None:
        stage.network.cut(stage.hosts[name])
        stage.hosts[name].kill()

    return do


def kill_agent(stage: Stage) -> None:
    stage.commands["node-1"].signal(signal.SIGKILL)


def cut(stage: Stage) -> None:
    stage.network.cut(stage.hosts["node-1"])


def stop(host: str) -> Callable[[Stage], None]:
    return lambda stage: stage.commands[host].signal(signal.SIGTERM)


def plain_launcher_killed(stage: Stage) -> None:
    """Stock `deepspeed --no_ssh`, whose launch.py is killed on one node."""
    program = [str(Path(sys.prefix) / "bin" / "deepspeed")]
    for node in (0, 1):
        place = [
            f"--hostfile={SHARED}/hostfile",
            "--no_ssh",
            f"--node_rank={node}",
            "--master_addr=node-0",
            "--master_port=29500",
        ]
        stage.start(
            f"node-{node}", [*place, "train.py", "--config", f"{SHARED}/run.yaml"], program=program
        )
    stage.until_step(_AT_STEP)
    stage.fault()
    os.kill(stage.pid("node-1", "deepspeed.launcher.launch"), signal.SIGKILL)


def stop_twice(stage: Stage) -> None:
    """While a step takes longer than anybody wants to wait."""
    stage.nodes(step_seconds=15)
    stage.until_step(1)
    stop("node-1")(stage)
    time.sleep(3)
    stage.fault()
    stop("node-1")(stage)


def stop_while_saving(stage: Stage) -> None:
    stage.nodes()
    stage.until_saving()
    stage.fault()
    stop("node-0")(stage)


def stop_while_meeting(stage: Stage) -> None:
    """One node is there and waits for the other."""
    stage.node(0)
    stage.until_said("waiting for")
    stage.fault()
    stop("node-0")(stage)


def stop_while_joining(stage: Stage) -> None:
    """The agents have met, and the ranks import torch or wait for each other."""
    stage.nodes()
    stage.until_said("starting 1 rank")
    time.sleep(1.5)
    stage.fault()
    stop("node-1")(stage)


def with_ranks(*ranks: int) -> Callable[[Stage], None]:
    """Each host takes the rank that is given for it."""

    def act(stage: Stage) -> None:
        stage.fault()
        for node, rank in enumerate(ranks):
            stage.node(node, rank=rank)

    return act


def one_is_missing(stage: Stage) -> None:
    stage.fault()
    stage.node(0, words=["--wait_seconds", "8"])


def other_hostfiles(*lines: str, words: Sequence[str] = ()) -> Callable[[Stage], None]:
    """Node 1 has another hostfile."""

    def act(stage: Stage) -> None:
        (stage.shared / "other").write_text("".join(f"{line}\n" for line in lines))
        stage.fault()
        for node, name in enumerate(("hostfile", "other")):
            place = ["--hostfile", f"{SHARED}/{name}", "--node_rank", str(node), *words]
            stage.start(f"node-{node}", ["launch", "node", f"{SHARED}/run.yaml", *place])

    return act


def way_closed(stage: Stage) -> None:
    """Two of three nodes reach node 0, and not each other."""
    blocked = stage.hosts["node-2"].run(
        ["ip", "route", "add", "prohibit", stage.hosts["node-1"].address]
    )
    assert blocked.returncode == 0, blocked.stdout
    stage.fault()
    for node in range(3):
        stage.node(node)


def other_config(stage: Stage) -> None:
    stage.fault()
    stage.node(0)
    stage.node(1, words=["optimizer.lr=0.5"])


def port_taken(port: int) -> Callable[[Stage], None]:
    def act(stage: Stage) -> None:
        stage.add_bystander(
            "node-0", [sys.executable, "-c", LISTEN.format(port=port)], says="taken"
        )
        stage.fault()
        for node in (0, 1):
            stage.node(node, words=["--wait_seconds", "12"])

    return act


def name_comes_late(stage: Stage) -> None:
    stage.hosts["node-1"].know("node-0", None)
    stage.nodes()
    time.sleep(8)
    stage.hosts["node-1"].know("node-0", stage.hosts["node-0"].address)


def name_is_stale(stage: Stage) -> None:
    """As after a pod was replaced: the name still means the address of the one before."""
    stage.hosts["node-1"].know("node-0", "10.77.200.1")
    stage.nodes()
    time.sleep(8)
    stage.hosts["node-1"].know("node-0", stage.hosts["node-0"].address)


def wrong_token(stage: Stage) -> None:
    stage.fault()
    stage.node(0, words=["--wait_seconds", "10"], DSF_TOKEN="one token of sixteen bytes")
    stage.node(1, words=["--wait_seconds", "10"], DSF_TOKEN="another of sixteen bytes")


def fill(stage: Stage) -> None:
    facts = os.statvfs(stage.shared)
    with (stage.shared / "fill").open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, facts.f_bavail * facts.f_frsize)


def store_fills_up(stage: Stage) -> None:
    """Saves fail and cost a warning each; the last one is the end of the run."""
    stage.nodes()
    stage.until_step(_AT_STEP)
    fill(stage)
    stage.until_step_or_end()
    stage.fault()


def store_is_full(stage: Stage) -> None:
    fill(stage)
    stage.nodes()
    stage.fault()


def store_is_read_only(stage: Stage) -> None:
    stage.nodes()
    stage.fault()


def stays_apart(stage: Stage) -> None:
    stage.nodes()
    stage.fault()


def empty(stage: Stage) -> None:
    (stage.shared / "fill").unlink()


def disturbed(do: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """From the first step on, and the run must go on to its end."""

    def act(stage: Stage) -> None:
        stage.nodes(step_seconds=0.01)
        stage.until_said("starting 1 rank")
        do(stage)

    return act


_REVERSED = ("node-1 slots=1", "node-0 slots=1")
_NODE_1 = r"node 1 \(node-1\)"
_NODE_0 = r"node 0 \(node-0\)"
# The first one to meet it ends the other.
_FULL = {name: {EXIT_STORAGE, EXIT_PEER_LOST} for name in ("node-0", "node-1")}
_SMALL: dict[str, Any] = {"shared_bytes": 48 << 20}
CASES = (
    Case(
        "rank-killed",
        "SIGKILL of a rank",
        split(EXIT_PEER_LOST, KILLED),
        _NODE_1 + r" rank 1: killed by SIGKILL",
        training(kill_rank),
    ),
    Case(
        "rank-0-killed",
        "SIGKILL of rank 0",
        split(KILLED, EXIT_PEER_LOST),
        _NODE_0 + r" rank 0: killed by SIGKILL",
        training(kill_rank_0),
    ),
    Case(
        "launcher-killed",
        "SIGKILL of launch.py under stock `deepspeed --no_ssh`, which then says 0",
        {"node-0": {EXIT_PEER_LOST}, "node-1": {0}},
        r"rank 1: the launcher \(process \d+\) is gone",
        plain_launcher_killed,
    ),
    Case(
        "agent-killed",
        "SIGKILL of an agent",
        split(EXIT_PEER_LOST, KILLED),
        _NODE_1 + ": lost",
        training(kill_agent),
    ),
    Case(
        "agent-0-killed",
        "SIGKILL of the agent of node 0",
        split(KILLED, EXIT_PEER_LOST),
        _NODE_0 + ": lost",
        training(lambda stage: stage.commands["node-0"].signal(signal.SIGKILL)),
    ),
    Case(
        "host-killed",
        "a whole host loses power",
        {"node-0": {EXIT_PEER_LOST}},
        _NODE_1 + ": lost",
        training(power_off("node-1")),
    ),
    Case(
        "host-0-killed",
        "the host of node 0 loses power",
        {"node-1": {EXIT_PEER_LOST}},
        _NODE_0 + ": lost",
        training(power_off("node-0")),
    ),
    Case(
        "link-cut",
        "the link of a host is cut (silence)",
        both(EXIT_PEER_LOST),
        _NODE_1 + ": lost: silent",
        training(cut),
    ),
    Case(
        "link-cut-for-a-moment",
        "the same for 8 s, and no node is given up",
        both(0),
        "finished: 2 nodes",
        cut_for_a_moment,
        stops=False,
    ),
    Case(
        "link-slow",
        "every frame of a host is 20 ms late",
        both(0),
        "finished: 2 nodes",
        disturbed(lambda stage: stage.network.delay(stage.hosts["node-1"], 20)),
        stops=False,
    ),
    Case(
        "link-lossy",
        "2 % of the frames are lost",
        both(0),
        "finished: 2 nodes",
        disturbed(lambda stage: stage.network.drop(stage.hosts["node-1"], 0.02)),
        stops=False,
    ),
    Case(
        "rank-duplicate",
        "both nodes have rank 0",
        both(EXIT_CONFIG),
        "node-rank-duplicate",
        with_ranks(0, 0),
    ),
    Case(
        "rank-duplicate-of-three",
        "two of three nodes have rank 1",
        {f"node-{node}": {EXIT_CONFIG} for node in range(3)},
        "node-[12], node-[12]: node_rank = 1.*node-rank-duplicate",
        with_ranks(0, 1, 1),
        stage={"num_nodes": 3},
    ),
    Case(
        "node-missing",
        "a node never comes (8 s to wait)",
        {"node-0": {EXIT_PEER_LOST}},
        "not all nodes came .* node-1 .*rendezvous-timeout",
        one_is_missing,
    ),
    Case(
        "ranks-swapped",
        "node ranks swapped: rank 0 is not at the master address",
        both(EXIT_CONFIG),
        "node-rank-swapped",
        with_ranks(1, 0),
    ),
    Case(
        "hostfiles-order",
        "hostfiles in another order, one master address",
        both(EXIT_CONFIG),
        _NODE_1 + ".*hosts.*nodes-differ",
        other_hostfiles(*_REVERSED, words=["--master_addr", "node-0"]),
    ),
    Case(
        "hostfiles-masters",
        "hostfiles in another order, so two master addresses",
        {"node-0": {EXIT_PEER_LOST}, "node-1": {EXIT_CONFIG}},
        _NODE_1 + ".*master_addr = node-1.*node-rank-swapped",
        other_hostfiles(*_REVERSED, words=["--wait_seconds", "12"]),
    ),
    Case(
        "hostfiles-slots",
        "hostfiles with other slots",
        both(EXIT_CONFIG),
        _NODE_1 + ".*slots = 2.*nodes-differ",
        other_hostfiles("node-0 slots=2", "node-1 slots=2"),
    ),
    Case(
        "config-differs",
        "another learning rate on one node",
        both(EXIT_CONFIG),
        _NODE_1 + ".*config.*nodes-differ",
        other_config,
    ),
    Case(
        "port-busy",
        "another program has the port of the ranks",
        both(EXIT_CONFIG),
        r"29500.*\[port-not-usable\]",
        port_taken(29500),
    ),
    Case(
        "control-port-busy",
        "another program has the port of the agents (12 s to wait)",
        split(EXIT_CONFIG, EXIT_PEER_LOST),
        r"29501.*\[port-not-usable\]",
        port_taken(29501),
    ),
    Case(
        "way-closed",
        "two of three nodes do not reach each other",
        {f"node-{node}": {EXIT_CONFIG} for node in range(3)},
        r"nodes? [12] .*: node [12] .*port-not-reached",
        way_closed,
        stage={"num_nodes": 3},
        limit=60.0,
    ),
    Case(
        "name-late",
        "the master's name resolves 8 s late",
        both(0),
        "finished: 2 nodes",
        name_comes_late,
        stops=False,
    ),
    Case(
        "name-stale",
        "the master's name means another address for 8 s",
        both(0),
        "finished: 2 nodes",
        name_is_stale,
        stops=False,
    ),
    Case(
        "token-wrong",
        "nodes with different tokens (10 s to wait)",
        split(EXIT_PEER_LOST, EXIT_CONFIG),
        r"not all nodes came.*turned away: \S+ \(token-refused\)",
        wrong_token,
    ),
    Case(
        "store-fills-up",
        "the checkpoint store fills up in training",
        _FULL,
        "No space left on device.*checkpoint-not-written",
        store_fills_up,
        stage=_SMALL,
        repair=empty,
        same_metrics=False,
    ),
    Case(
        "store-full",
        "the checkpoint store is full at the start",
        _FULL,
        "No space left on device",
        store_is_full,
        stage=_SMALL,
        repair=empty,
        limit=60.0,
    ),
    Case(
        "store-read-only",
        "the checkpoint store is read-only",
        _FULL,
        "Read-only file system",
        store_is_read_only,
        stage={"read_only": True},
        limit=60.0,
    ),
    Case(
        "store-not-shared",
        "a node has a folder of its own where the others have the shared one",
        both(EXIT_CONFIG),
        r"node-1.*\[run-folder-not-shared\]",
        stays_apart,
        stage={"is_apart": True},
        limit=60.0,
    ),
    Case(
        "stop-in-step",
        "SIGTERM to one agent during a step",
        both(EXIT_STOPPED),
        "SIGTERM at " + _NODE_1,
        training(stop("node-1")),
    ),
    Case(
        "stop-in-save",
        "SIGTERM to one agent during a save",
        both(EXIT_STOPPED),
        "SIGTERM at " + _NODE_0,
        stop_while_saving,
    ),
    Case(
        "stop-in-meeting",
        "SIGTERM while the other node is awaited",
        {"node-0": {EXIT_STOPPED}},
        "SIGTERM",
        stop_while_meeting,
    ),
    Case(
        "stop-in-joining",
        "SIGTERM while the ranks start",
        both(EXIT_STOPPED),
        "SIGTERM at " + _NODE_1,
        stop_while_joining,
    ),
    Case(
        "stop-twice",
        "SIGTERM twice, in a step of 15 s",
        {name: {KILLED, EXIT_PEER_LOST} for name in ("node-0", "node-1")},
        "killed at the second request",
        stop_twice,
    ),
    Case(
        "ssh-rank-killed",
        "ssh: SIGKILL of a rank",
        {"login": {KILLED}},
        _NODE_1 + " rank 1: killed by SIGKILL",
        training_over_ssh(kill_rank),
    ),
    Case(
        "ssh-starter-killed",
        "ssh: SIGKILL of `launch -H`",
        {"login": {KILLED}},
        r"SIGTERM: stopped after step \d+ of 30",
        training_over_ssh(lambda stage: stage.commands["login"].signal(signal.SIGKILL)),
        in_logs=True,
    ),
    Case(
        "ssh-host-killed",
        "ssh: a whole host loses power",
        {"login": {EXIT_PEER_LOST}},
        _NODE_1 + ": lost",
        training_over_ssh(power_off("node-1")),
    ),
    Case(
        "ssh-link-cut",
        "ssh: the link of a host is cut",
        {"login": {EXIT_PEER_LOST}},
        _NODE_1 + ": lost: silent",
        training_over_ssh(cut),
    ),
    Case(
        "ssh-stop",
        "ssh: SIGTERM to `launch -H`",
        {"login": {EXIT_STOPPED}},
        "SIGTERM",
        training_over_ssh(stop("login")),
    ),
    Case(
        "again-rank-killed",
        "SIGKILL of a rank, with `supervision.max_restarts`",
        both(0),
        r"start 2 of at most 6, from step \d+",
        going_on(kill_rank),
        stops=False,
    ),
    Case(
        "again-agent-killed",
        "the same of an agent, which is started again",
        both(0),
        r"start 2 of at most 6, from step \d+",
        going_on(kill_agent, comes_back(1)),
        stops=False,
    ),
    Case(
        "again-agent-0-killed",
        "the same of the agent of node 0",
        both(0),
        r"node 0 is lost \(.*\); calling it again",
        going_on(lambda stage: stage.commands["node-0"].signal(signal.SIGKILL), comes_back(0)),
        stops=False,
    ),
    Case(
        "again-host-killed",
        "a host loses power, and another of its name comes, with `max_restarts`",
        both(0),
        r"start 2 of at most 6, from step \d+",
        going_on(power_off("node-1"), comes_back(1)),
        stops=False,
    ),
    Case(
        "again-host-0-killed",
        "the same of the host of node 0",
        both(0),
        r"node 0 is lost \(.*\); calling it again",
        going_on(power_off("node-0"), comes_back(0)),
        stops=False,
    ),
    Case(
        "again-link-cut",
        "the link of a host is cut for 25 s, with `max_restarts`",
        both(0),
        r"node 0 is lost \(.*\); calling it again",
        going_on(cut_for_a_while),
        stops=False,
    ),
    Case(
        "again-on-a-spare",
        "a host loses power for good, with `max_restarts` and a spare",
        {"node-0": {0}, "node-2": {0}},
        r"start 2 of at most 6, from step \d+",
        going_on(power_off("node-1"), words=["--spares", "1"]),
        stage={"num_nodes": 3},
        stops=False,
    ),
    Case(
        "again-rank-stuck",
        "a rank sleeps in the kernel for a dead mount when another is killed, with `max_restarts` and a spare",
        {"node-0": {0}, "node-1": {EXIT_PEER_LOST}, "node-2": {0}},
        r"node 1 \(node-1\) rank 1 \(process \d+, state D in \w+\): not ended 60 s after SIGKILL",
        going_on(stuck_rank, lambda stage: revive(stage.dead), words=["--spares", "1"]),
        stage={"num_nodes": 3, "has_dead_disk": True},
        stops=False,
    ),
    Case(
        "ssh-again-rank-stuck",
        "ssh: the same without a spare, and the mount comes back",
        {"login": {0}},
        r"node 1 \(node-1\) rank 1 \(process \d+, state D in \w+\): not ended 60 s after SIGKILL",
        going_on_over_ssh(host_comes_back),
        stage={"has_dead_disk": True},
        stops=False,
    ),
    Case(
        "ssh-again-host-killed",
        "ssh: a host loses power and comes back, with `max_restarts`",
        {"login": {0}},
        r"start 2 of at most 6, from step \d+",
        going_on_over_ssh(host_reboots("node-1")),
        stops=False,
    ),
    Case(
        "ssh-again-host-0-killed",
        "ssh: the same of the first host",
        {"login": {0}},
        r"node 0 is lost \(.*\); calling it again",
        going_on_over_ssh(host_reboots("node-0")),
        stops=False,
    ),
    Case(
        "ssh-again-connection-lost",
        "ssh: the connection of `launch -H` to a host ends, and its ranks stop, with `max_restarts`",
        {"login": {0}},
        r"start 2 of at most 6, from step \d+",
        going_on_over_ssh(connection_ends),
        stops=False,
    ),
    Case(
        "ssh-again-stop-at-rank",
        "ssh: SIGTERM to a rank alone, with `max_restarts`, and SIGKILL of the other before both have stopped",
        {"login": {KILLED}},
        r"rank 0: killed by SIGKILL .* a stop was asked for \(SIGTERM to rank 1 at node 1 \(node-1\)\) \[stop-asked\]",
        going_on_over_ssh(stop_at_a_rank, step=1, step_seconds=3.0),
    ),
    Case(
        "again-checkpoint-flipped",
        "a bit of the newest checkpoint flips, and a rank is killed, with `max_restarts`",
        both(0),
        r"global_step10/.*\[checkpoint-damaged\]",
        going_on(damaged(flip_a_bit)),
        stops=False,
    ),
    Case(
        "again-checkpoint-truncated",
        "the same with half of its largest file",
        both(0),
        r"global_step10/.*\[checkpoint-damaged\]",
        going_on(damaged(lambda path: os.truncate(path, path.stat().st_size // 2))),
        stops=False,
    ),
    Case(
        "again-checkpoint-missing",
        "the same without that file",
        both(0),
        r"global_step10/.*\[checkpoint-damaged\]",
        going_on(damaged(Path.unlink)),
        stops=False,
    ),
    Case(
        "again-rank-hangs",
        "SIGSTOP of a rank, with `max_restarts` and `supervision.hang_seconds=8`",
        both(0),
        r"no step for .*: rank 1 .*",
        going_on(hang, words=_HANGS),
        stops=False,
    ),
    Case(
        "again-ranks-desync",
        "a rank enters a collective alone, with the same",
        both(0),
        r"no step for .* after step .*",
        going_on(desync, words=_HANGS),
        stops=False,
    ),
    Case(
        "again-store-full",
        "the store fills up, and is emptied once the run has failed, with `max_restarts`",
        both(0),
        r"start 2 of at most 6, from step \d+",
        going_on(fill_until_it_fails),
        stage=_SMALL,
        stops=False,
        same_metrics=False,
    ),
)
BY_NAME = {case.name: case for case in CASES}
