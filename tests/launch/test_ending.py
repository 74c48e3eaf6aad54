"""Ends with a second failure: output without a reader, a request that comes too early, a process
that cannot be started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from framework.config.load import config_from_values
from framework.errors import EXIT_OK, EXIT_STOPPED, EXIT_TRAINING, RunStopped
from framework.hosts.devices import LocalDevices
from framework.hosts.topology import HostTopology
from framework.launch import agent, local, node
from framework.launch import ranks as ranks_module
from framework.launch.agent import run_attempt
from framework.launch.node import run_node
from framework.launch.ranks import Ranks
from framework.launch.rendezvous.peers import Peers
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import JobEnd, Restarts
from tests.dead_disk import dead_disk, why_no_dead_disk
from tests.launch.rendezvous.members import (
    ROOT,
    Members,
    ended,
    gone,
    kill_what_is_left,
    restore_signals,
    running,
)

pytestmark = [pytest.mark.slow, pytest.mark.timing]

CONFIG = """
run: {name: x}
model: {kind: lenet}
data: {kind: digits}
batch: {global_size: 60}
"""


@pytest.fixture
def alone(members: Members) -> Members:
    """Start one node with two ranks."""
    members.nnodes, members.slots = 1, 2
    return members


# ----------------------------------------------------------------------------------- without reader


def unread(process: subprocess.Popen[str]) -> int:
    """Return the exit code of an agent that has no reader of its lines from now on."""
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    return process.wait(timeout=60)


@pytest.mark.parametrize("how", ["the connection dies", "SIGTERM"])
def test_ranks_save_without_a_reader(alone: Members, how: str) -> None:
    process = alone.start(0, terms={"life_line": 0})
    alone.ready(2)
    assert process.stderr is not None
    assert process.stdin is not None
    process.stderr.close()
    process.stderr = None
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    else:
        process.stdin.close()  # as sshd does: both at once
        process.stdin = None
    assert process.wait(timeout=60) == EXIT_STOPPED
    assert alone.signals(0) == alone.signals(1) == ["SIGTERM"]


def test_a_failure_stays_one_without_a_reader(alone: Members) -> None:
    assert unread(alone.start(0, "1:exit=70", "wait")) == EXIT_TRAINING


# -------------------------------------------------------------------------------- too early to save


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_does_not_listen_yet_is_no_failure(
    alone: Members, number: signal.Signals
) -> None:
    process = alone.start(0, "0:deaf", "wait")
    alone.ready(2)
    process.send_signal(number)
    code, stated = ended(process)
    assert code == EXIT_STOPPED
    assert "Traceback" not in stated, "Python's own answer to SIGINT"
    last = stated.splitlines()[-1]
    assert last.startswith(f"launch: stopped on request ({number.name} at node 0 (")
    assert last.endswith("; the ranks' lines above name what was saved, if anything was")


def test_a_request_is_logged_before_it_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come between the log line and the stop: ranks that received the request would
    end before the log has the reason.
    """

    def ask(self: agent._NodeAttempt) -> None:
        really(self)
        if len(list(tmp_path.glob("*.json"))) == 2:
            requests.ask("SIGTERM")

    requests, really = StopRequests(), agent._NodeAttempt._ask
    monkeypatch.setattr(agent._NodeAttempt, "_ask", ask)
    ranks = Ranks(
        [str(ROOT / "tests/launch/rank.py"), str(tmp_path), "0:deaf", "wait"],
        HostTopology(1, 2, 0, "127.0.0.1", 29500),
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    code, end = asyncio.run(run_alone(ranks, requests, grace_seconds=30))
    assert code == EXIT_STOPPED
    assert end.line.startswith("stopped on request (SIGTERM at node 0 (here))")


def test_a_rank_killed_by_hand_is_no_request_to_stop(alone: Members) -> None:
    process = alone.start(0, "0:deaf", "wait")
    os.kill(alone.ready(2)[0]["pid"], signal.SIGTERM)
    code, stated = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "rank 0: killed by SIGTERM" in stated.splitlines()[-1]


def test_a_node_obeys_requests_before_it_reads_its_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "framework", "launch", "node", "x.yaml", "--from_stdin"]
    environment = {**os.environ, "DSF_TERMINATION_LOG": str(tmp_path / "log")}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=restore_signals,
    )
    try:
        until_it_catches(process.pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == EXIT_STOPPED
        assert "[stopped-early]" in process.communicate()[1]
        assert "[stopped-early]" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.communicate()


def until_it_catches(pid: int, number: signal.Signals) -> None:
    """Wait until a process handles a signal, which before would end it (and not even that as
    process 1).
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        (caught,) = (
            line.split()[1]
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line[:6] == "SigCgt"
        )
        if int(caught, 16) >> (number - 1) & 1:
            return
        time.sleep(0.05)
    pytest.fail(f"{number.name} is not heeded")


SLOW_IMPORT = """
import pathlib, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "framework.cli":
            here = pathlib.Path(__file__)
            here.with_name("importing").touch()
            until = time.monotonic() + 60
            while not here.with_name("asked").exists() and time.monotonic() < until:
                time.sleep(0.05)
sys.meta_path.insert(0, Slow())
"""
ALONE = ["unshare", "--pid", "--fork"]


@pytest.mark.skipif(
    not shutil.which("unshare")
    or bool(subprocess.run([*ALONE, "true"], capture_output=True).returncode),
    reason="only root may be process 1 of a namespace here",
)
def test_process_1_obeys_requests_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [*ALONE, sys.executable, "-m", "framework", "launch", "nowhere.yaml"]
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=restore_signals
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "importing").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (child,) = psutil.Process(process.pid).children()
    child.terminate()
    (tmp_path / "asked").touch()
    assert process.wait(timeout=60) == EXIT_STOPPED


@pytest.mark.parametrize("command", [[], ["node"]], ids=["launch", "launch node"])
def test_a_request_during_the_check_starts_nothing(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "x.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Ranks, "start", lambda self: pytest.fail("ranks were started"))

    def find_devices(_: object) -> LocalDevices:
        os.kill(os.getpid(), signal.SIGTERM)
        return LocalDevices("cpu", 0)

    for module in (local, node):
        monkeypatch.setattr(module, "find_devices", find_devices)
    words = ["x.yaml", "--num_gpus", "1"]
    begin = partial(local.launch, words)
    if command:
        begin = partial(node.main, [*words, "--nnodes", "1"])
    # Without a handler the request would end these tests.
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("nobody heeds it"))
    try:
        with pytest.raises(
            RunStopped, match=r"stopped on request \(SIGTERM\) before any rank was started"
        ):
            begin()
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------- processes of the ranks


def attempt(
    script: Path, *arguments: str, environment: dict[str, str] | None = None
) -> tuple[int, JobEnd]:
    """Make one node's attempt with one rank, in this process."""
    ranks = Ranks(
        [str(script), *arguments],
        HostTopology(1, 1, 0, "127.0.0.1", 29500),
        {**os.environ, **(environment or {})},
    )
    return asyncio.run(run_alone(ranks, StopRequests(), grace_seconds=1))


async def run_alone(
    ranks: Ranks, requests: StopRequests, *, grace_seconds: float
) -> tuple[int, JobEnd]:
    return await run_attempt(ranks, Peers(0, {0: "here"}), requests, grace_seconds=grace_seconds)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two ranks with cores of their own need two cores"
)
def test_a_rank_and_its_workers_stay_on_their_cores(tmp_path: Path) -> None:
    """The agent itself keeps all cores."""
    usable = os.sched_getaffinity(0)
    shares = [frozenset(sorted(usable)[:1]), frozenset(sorted(usable)[1:])]
    ranks = Ranks(
        [str(ROOT / "tests/launch/rank.py"), str(tmp_path), "exit=0"],
        HostTopology(1, 2, 0, "127.0.0.1", 29500),
        {**os.environ, "PYTHONPATH": str(ROOT)},
        processors=shares,
    )
    code, _ = asyncio.run(run_alone(ranks, StopRequests(), grace_seconds=1))
    assert code == EXIT_OK
    for rank, share in enumerate(shares):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["processors"] == seen["processors of worker"] == sorted(share)
    assert os.sched_getaffinity(0) == usable


def test_a_rank_that_cannot_be_started_is_reported_in_a_line(tmp_path: Path) -> None:
    code, end = attempt(tmp_path / "none.py", environment={"TOO_LARGE": "x" * (1 << 22)})
    assert code == EXIT_TRAINING
    assert end.cause == "node 0 (here): a rank could not be started (Argument list too long)"
    assert f"{end.cause} at" in end.line


def test_a_rank_that_has_lost_its_run_folder_reports_that_as_a_kind(tmp_path: Path) -> None:
    script = tmp_path / "lost.py"
    report = "report_end('the folder is gone', is_folder_lost={})"
    program = (
        f"import sys; from framework.system.parent_watch import report_end; {report}; sys.exit(74)"
    )
    for is_lost in (False, True):
        script.write_text(program.format(is_lost))
        code, end = attempt(script, environment={"PYTHONPATH": str(ROOT)})
        assert (code, end.is_folder_lost) == (74, is_lost)
        assert end.cause.endswith("ended with 74 (storage failed): the folder is gone")


STUBBORN = """
import json, os, signal, sys, time
folder = sys.argv[-1]
def told(number, frame):
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(f"{folder}/heir.tmp", "w") as file:
        json.dump(os.getpid(), file)
    os.rename(f"{folder}/heir.tmp", f"{folder}/heir.json")
    time.sleep(60)
signal.signal(signal.SIGTERM, told)
if os.fork():
    os._exit(0)
os.setsid()
time.sleep(60)
"""


def test_what_the_leftovers_start_ends_as_well(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    code, _ = attempt(script, str(tmp_path))
    assert code == 0
    heir = tmp_path / "heir.json"
    if heir.exists():  # else it was ended before it could report the signal
        pid = json.loads(heir.read_text())
        try:
            assert gone([pid], folder=tmp_path)
        finally:
            kill_what_is_left(pid, folder=tmp_path)


@pytest.mark.skipif(
    bool(why_no_dead_disk()), reason=why_no_dead_disk() or "a dead file system can be made"
)
def test_a_rank_that_cannot_be_killed_is_named_and_nothing_starts_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (agent, ranks_module):
        monkeypatch.setattr(module, "KILL_SECONDS", 3.0)
    config = config_from_values(
        {"run": {"output_dir": str(tmp_path)}, "supervision": {"max_restarts": 5}}
    )
    with dead_disk(tmp_path / "dead") as dead:
        end = run_node(
            HostTopology(1, 2, 0, "127.0.0.1", 29500),
            [str(ROOT / "tests/launch/rank.py"), str(tmp_path), "0:exit=70", f"1:look={dead}"],
            devices=LocalDevices("cpu", 0),
            environment={**os.environ, "PYTHONPATH": str(ROOT)},
            requests=StopRequests(),
            grace_seconds=600.0,
            restarts=Restarts(config),
        )
        pid = json.loads((tmp_path / "1.json").read_text())["pid"]
        assert running(pid, folder=tmp_path)
    assert gone([pid], folder=tmp_path), "it ends as soon as the disk is back, or gone"
    assert end.code == EXIT_TRAINING
    assert end.has_left
    assert " rank 0: ended with 70 (training failed)" in end.line
    assert (
        f" rank 1 (process {pid}, state D in request_wait_answer): not ended 3 s after SIGKILL"
        in end.line
    )
    assert capsys.readouterr().err == f"launch: {end.line}\n"
