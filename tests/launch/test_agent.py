"""How a job ends: requests reach every rank at once, a failure ends every node, and the exit codes
show what happened.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.launch.agent import first_failure, how_ended
from framework.launch.job import write_termination_log
from framework.launch.ranks import OomKills
from framework.launch.rendezvous.peers import Failure, FailureKind
from framework.launch.rendezvous.session import RUNNING_BEAT_SECONDS, SILENCE_SECONDS
from tests.launch.rendezvous.members import ROOT, Members, ended, gone

pytestmark = pytest.mark.timing


@pytest.fixture
def alone(members: Members) -> Members:
    """Start one node with two ranks."""
    members.nnodes, members.slots = 1, 2
    return members


# ----------------------------------------------------------------------------------------- one node


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "code", "line"),
    [
        (["exit=0"], 0, "launch: finished: 1 node, every rank ended with 0"),
        (
            ["exit=78"],
            78,
            r"rank [01]: ended with 78 \(configuration refused\) at ..:..:..; 1 node stopped in \d",
        ),
        (
            ["1:kill", "wait"],
            137,
            r"node 0 \(.*\) rank 1: killed by SIGKILL \(137, out of memory\?\) at ..:..:..; 1 node stopped",
        ),
        (["0:exit=1", "ignore"], 1, "rank 0: ended with 1 at"),
        (
            ["1:explain", "wait"],
            70,
            r"rank 1: ended with 70 \(.*\): net.py:7: a line of two \[training-failed\] at",
        ),
    ],
)
def test_the_code_of_the_first_failure_comes_back(
    alone: Members, actions: list[str], code: int, line: str
) -> None:
    got, stated = ended(alone.start(0, *actions))
    assert got == code
    assert re.search(line, stated.splitlines()[-1])
    ranks = alone.ready(2)
    assert gone(
        [rank[name] for rank in ranks.values() for name in ("pid", "worker")],
        folder=alone.folder,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_request_reaches_every_rank_once(alone: Members, name: str) -> None:
    process = alone.start(0)
    alone.ready(2)
    process.send_signal(signal.Signals[name])
    process.send_signal(signal.Signals[name])  # `timeout` sends it twice
    code, stated = ended(process)
    assert code == 75
    assert re.search(rf"{name} at node 0 \(.*\): asking 2 ranks to stop, with 30 s to save", stated)
    assert "stopped on request" in stated.splitlines()[-1]
    assert alone.signals(0) == alone.signals(1) == ["SIGINT" if name == "SIGINT" else "SIGTERM"]


@pytest.mark.slow
def test_a_second_request_kills(alone: Members) -> None:
    process = alone.start(0, "ignore")
    alone.ready(2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("asking 2 ranks to stop" in line for line in process.stderr)
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, stated = ended(process)
    assert code == 137
    assert "killed at the second request to stop" in stated.splitlines()[-1]


@pytest.mark.slow
def test_who_does_not_stop_in_time_is_killed(alone: Members) -> None:
    process = alone.start(0, "1:ignore", terms={"grace_seconds": 1})
    alone.ready(2)
    process.send_signal(signal.SIGTERM)
    code, stated = ended(process)
    assert code == 137
    assert "did not stop within 1 s, and was killed" in stated.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_stops_by_itself_stops_the_others(alone: Members) -> None:
    process = alone.start(0, "1:exit=75", "wait")
    code, stated = ended(process)
    assert code == 75
    assert "rank 1 stopped" in stated.splitlines()[-1]
    assert alone.signals(0) == ["SIGTERM"]


@pytest.mark.slow
def test_the_last_line_is_in_the_termination_log(alone: Members, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    code, stated = ended(
        alone.start(0, "1:exit=70", "wait", environment={"DSF_TERMINATION_LOG": str(log)})
    )
    assert code == 70
    assert f"launch: {log.read_text()}" == stated.splitlines()[-1] + "\n"


def test_the_termination_log_takes_any_file_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination"
    monkeypatch.setenv("DSF_TERMINATION_LOG", str(log))
    write_termination_log(os.fsdecode(b"\xff.yaml"))
    assert log.read_text() == "\\udcff.yaml\n"


@pytest.mark.slow
def test_what_a_rank_is_given(alone: Members) -> None:
    process = alone.start(0, "exit=0", environment={"LOCAL_WORLD_SIZE": "7"})
    assert ended(process)[0] == 0
    for number, rank in alone.ready(2).items():
        environment = rank["environment"]
        pid, ticks = environment["DSF_AGENT"].split(":")
        assert int(pid) == process.pid
        assert int(ticks) > 0
        assert environment["DSF_WORLD_SIZE"] == "2"
        assert "LOCAL_WORLD_SIZE" not in environment
        assert rank["argv"][1] == f"--local_rank={number}"


@pytest.mark.slow
def test_a_rank_is_given_what_deepspeed_gives_it(alone: Members, tmp_path: Path) -> None:
    """The agent starts ranks in the place of DeepSpeed's launch.py."""
    pytest.importorskip("deepspeed")
    assert ended(alone.start(0, "exit=0"))[0] == 0
    ours = alone.ready(2)
    theirs = tmp_path / "deepspeed"
    theirs.mkdir()
    world = base64.urlsafe_b64encode(json.dumps({"node-0": [0, 1]}).encode()).decode()
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        f"--master_port={alone.port}",
        str(ROOT / "tests/launch/rank.py"),
        str(theirs),
        "exit=0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    subprocess.run(
        command,
        env=environment,
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    expected = Members(theirs, nnodes=1, slots=2).ready(2)
    only_here = {"DSF_AGENT", "DSF_REPORT_FD", "DSF_WORLD_SIZE"}
    # of this test; and what importing DeepSpeed leaves behind
    only_there = {"DS_ACCELERATOR", "PYTEST_CURRENT_TEST"}
    for rank in (0, 1):
        assert ours[rank]["argv"][1] == expected[rank]["argv"][1]
        mine, its = ours[rank]["environment"], expected[rank]["environment"]
        left = {
            name
            for name in its.keys() - mine.keys()
            if not name.startswith(("KMP_", "TORCHINDUCTOR_", "OMP_", "TRITON_"))
        }
        assert left <= only_there
        assert {
            name for name in mine.keys() - its.keys() if not name.startswith("_MLFLOW_")
        } <= only_here
        names = set(mine) & set(its) - {"PYTEST_CURRENT_TEST"}
        assert {name: mine[name] for name in names} == {name: its[name] for name in names}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="zombies are looked for in /proc")
def test_process_1_reaps_what_is_not_its_own() -> None:
    program = """
import os
from framework.launch.ranks import _reap_orphans
strangers = []
for _ in range(3):
    strangers.append(os.fork())
    if not strangers[-1]: os._exit(3)
for pid in strangers: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
for _ in strangers: _reap_orphans(set())  # each look is short
print(sum(os.path.exists(f"/proc/{pid}") for pid in strangers))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"


# ------------------------------------------------------------------------------------ several nodes


@pytest.mark.slow
def test_two_nodes_train_and_confirm_to_each_other(members: Members) -> None:
    members.slots = 2
    processes = [members.start(rank, "exit=0") for rank in (0, 1)]
    for process in processes:
        code, stated = ended(process)
        assert code == 0
        assert "all 2 nodes are here and agree; starting 2 ranks of 4" in stated
        assert stated.splitlines()[-1] == "launch: finished: 2 nodes, every rank ended with 0"
    ranks = members.ready(4)
    for number, rank in ranks.items():
        environment = rank["environment"]
        expected = {
            "RANK": str(number),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(number % 2),
            "LOCAL_SIZE": "2",
            "CROSS_RANK": str(number // 2),
            "CROSS_SIZE": "2",
            "MASTER_PORT": str(members.port),
            "DSF_WORLD_SIZE": "4",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert {name: environment.get(name) for name in expected} == expected


@pytest.mark.slow
def test_a_killed_rank_ends_all_nodes(members: Members) -> None:
    culprit = 1
    processes = [members.start(rank, f"{culprit}:kill", "ignore") for rank in (0, 1)]
    members.ready(2)
    begun = time.monotonic()
    ends = [ended(process) for process in processes]
    assert time.monotonic() - begun < 20
    assert [code for code, _ in ends] == [137 if rank == culprit else 76 for rank in (0, 1)]
    for _, stated in ends:
        assert re.search(
            rf"node {culprit} \(.*\) rank {culprit}: killed by SIGKILL .*; 2 nodes stopped in",
            stated.splitlines()[-1],
        )


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_anywhere_stops_all_nodes(members: Members, asked: int) -> None:
    processes = [members.start(rank) for rank in (0, 1)]
    members.ready(2)
    processes[asked].send_signal(signal.SIGTERM)
    for process in processes:
        code, stated = ended(process)
        assert code == 75
        assert re.search(
            rf"SIGTERM at node {asked} \(.*\)\): 2 nodes stopped", stated.splitlines()[-1]
        )
    assert members.signals(0) == members.signals(1) == ["SIGTERM"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_agent_is_a_lost_node(members: Members, killed: int) -> None:
    processes = [members.start(rank) for rank in (0, 1)]
    ranks = members.ready(2)
    processes[killed].kill()
    code, stated = ended(processes[1 - killed])
    assert code == 76
    assert re.search(rf"node {killed} \(.*\): lost: ", stated.splitlines()[-1])
    assert gone([rank["pid"] for rank in ranks.values()], folder=members.folder)


@pytest.mark.slow
def test_an_agent_that_is_silent_is_lost(members: Members) -> None:
    """The limit is 15 seconds; here six, three heartbeats of the agent."""
    assert SILENCE_SECONDS == 3 * RUNNING_BEAT_SECONDS == 15
    processes = [members.start(rank, "ignore", terms={"silence_seconds": 6.0}) for rank in (0, 1)]
    members.ready(2)
    begun = time.monotonic()
    processes[1].send_signal(signal.SIGSTOP)
    code, stated = ended(processes[0])
    # and two for the ranks to end: 8 on a machine that has nothing else to do
    assert time.monotonic() - begun < 20
    assert code == 76
    assert "lost: silent for 6 s" in stated.splitlines()[-1]


@pytest.mark.slow
def test_a_node_that_only_finished_is_no_success_for_the_job(members: Members) -> None:
    processes = [members.start(rank, "0:exit=0", "1:exit=70") for rank in (0, 1)]
    assert [ended(process)[0] for process in processes] == [76, 70]


# ------------------------------------------------------------------------------------- descriptions


def test_the_cause_is_not_a_rank_that_only_lost_a_peer() -> None:
    lost_a_rank = Failure(0, "node 0 (a) rank 0: ended with 76 (it lost another rank)", 76, "1")
    lost_node = Failure(1, "node 1 (b): lost: closed", 76, "2", FailureKind.NODE_LOST)
    killed = Failure(1, "node 1 (b) rank 1: killed by SIGKILL", 137, "3")
    failed = Failure(2, "node 2 (c) rank 2: ended with 70", 70, "4")
    assert first_failure([lost_a_rank, lost_node, killed, failed]) is killed
    assert first_failure([lost_a_rank, lost_node]) is lost_node
    assert first_failure([lost_a_rank]) is lost_a_rank
    assert first_failure([]) is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ended with 1"),
        (70, "ended with 70 (training failed)"),
        (76, "ended with 76 (it lost another rank)"),
        (137, "killed by SIGKILL (137, out of memory?)"),
        (134, "killed by SIGABRT (134)"),
        (
            139,
            "killed by SIGSEGV (139, in native code: /dev/shm too small (df /dev/shm), or a library)",
        ),
        (
            135,
            "killed by SIGBUS (135, in native code: /dev/shm too small (df /dev/shm), or a library)",
        ),
        (255, "ended with 255"),
    ],
)
def test_description_of_an_exit_code(code: int, words: str) -> None:
    assert how_ended(code) == words


@pytest.mark.parametrize(
    "before", ["low 0\noom 3\noom_kill 1\noom_group_kill 0\n", "under_oom 0\noom_kill 1\n"]
)
def test_a_kill_for_lack_of_memory_is_distinguished_from_others(
    before: str, tmp_path: Path
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text(before)
    kills = OomKills([tmp_path / "none", counter])
    assert not kills.have_risen()
    counter.write_text(before.replace("oom_kill 1", "oom_kill 2"))
    assert kills.have_risen()
    counter.unlink()
    assert not kills.have_risen()
    assert not OomKills([counter]).have_risen()
    line = how_ended(137, lacked_memory=True)
    assert line.startswith(
        "killed by the kernel for lack of host memory (137); reduce data.num_workers"
    )
    assert line.endswith("[out-of-host-memory]")
