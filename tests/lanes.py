"""Lanes for the whole suite, on two processors: a third of its time is spent waiting, for hosts
that fall silent or launchers that grant a grace period.

A lane is a process that is forked once the tests are collected: all that they import is imported
once. One lane takes the files of tests that train and keep both processors busy, one file after the
other. One lane takes the fast files. One lane takes the files that wait, and leaves the processors
to the others. A lane that has finished its own files takes one of another lane: of the files that
train the last one, since the first lane begins with the first.

A test that outlives its time limit by a minute sits where pytest-timeout cannot reach it: in native
code, in the kernel, or in a wait that its own clean-up made. Its lane is killed, and the stacks of
the lane's threads and its processes are the text of the failure. The other lanes go on.

Only a run of the whole suite is split, with or without a choice by marker; `pytest tests/plan`, and
`pytest tests`, run in one process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

import psutil
import pytest

from tests.places import ROOT

# Files of slow tests that wait more than they work, or work on one processor.
WAITING: Final = (
    "tests/campaign/test_launch_faults.py",
    "tests/campaign/test_torchrun_kills.py",
    "tests/commands/test_stage_balance.py",
    "tests/config/",
    "tests/data/test_worker_process.py",
    "tests/deepspeed_lint/rules/test_any_value.py",
    "tests/deepspeed_lint/test_fixes.py",
    "tests/deepspeed_lint/test_schema.py",
    "tests/deepspeed_lint/text/",
    "tests/deploy/",
    "tests/doctor/",
    "tests/engine/test_collective_timeout.py",
    "tests/engine/test_data_errors.py",
    "tests/engine/test_deep_compilation.py",
    "tests/engine/test_failed_batches.py",
    "tests/engine/test_hang_watch.py",
    "tests/engine/test_nvme_bench.py",
    "tests/engine/test_pipeline_failures.py",
    "tests/engine/test_process_group_errors.py",
    "tests/engine/test_rank_log.py",
    "tests/engine/test_stragglers.py",
    "tests/hosts/",
    "tests/kubelet/",
    "tests/launch/",
    "tests/plan/rules/test_rules.py",
    "tests/plan/test_one_truth.py",
    "tests/report/test_in_a_browser.py",
    "tests/system/",
    "tests/test_concepts.py",
    "tests/test_notebook.py",
    "tests/test_public_names.py",
    "tests/test_quickstart.py",
    "tests/test_stopping.py",
    "tests/test_train_script.py",
    "tests/text/",
    "tests/train/monitors/",
)
_NUM_LANES: Final = 3
_SECONDS_BEYOND_LIMIT: Final = 60.0  # in which a test that was interrupted cleans up
_WRITE_STACKS: Final = signal.SIGRTMAX  # a lane that gets it writes the stacks of its threads
_PR_SET_PDEATHSIG: Final = 1

_number: int | None = None  # of this process's lane


def choose(config: pytest.Config) -> None:
    """Run the tests in lanes, if this call of pytest is for the whole suite."""
    options = config.option
    is_whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    needs_one_process = (
        options.usepdb or options.collectonly or options.capture == "no" or options.keyword
    )
    if is_whole_suite and not needs_one_process and hasattr(os, "fork"):
        needs_ranks = not leaves_slow_out(config)
        config.pluginmanager.register(_Lanes(with_ranks=needs_ranks), "lanes")


def leaves_slow_out(config: pytest.Config) -> bool:
    """Return whether the choice by marker is `not slow`, alone or narrowed further."""
    words = config.option.markexpr.split()
    return words[:2] == ["not", "slow"] and "or" not in words


def number() -> int | None:
    """Return the number of this process's lane, 0 for the one that trains; None without lanes."""
    return _number


def next_file(left: Collection[str], *, lane: int) -> str:
    """Return the file that a lane takes next: its own first, then one that does not train, then the
    last one.
    """
    if lane == 0:
        is_own = _trains
    elif lane == 1:
        is_own = _is_fast
    else:
        is_own = _waits
    for file in left:
        if is_own(file):
            return file
    for file in left:
        if not _trains(file):
            return file
    return list(left)[-1]


def made_once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory) -> Path:
    """Return a folder that `make` fills, for tests of several files that only read it: one lane
    makes it, and another that needs it meanwhile waits.
    """
    base = factory.getbasetemp()
    if _number is not None:
        base = base.parent.parent  # of all lanes: a lane has a folder, and in it one for each file
    folder, is_made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a lane that failed
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder


def sort(items: list[pytest.Item]) -> None:
    """Sort fast tests first: what they find is known in minutes."""
    items.sort(key=_is_slow)


def is_first() -> bool:
    """Return whether this process does the work that is done once for all lanes."""
    return not _number


@cache
def _trains(file: str) -> bool:
    return not _waits(file) and "mark.slow" in (ROOT / file).read_text(encoding="utf-8")


def _waits(file: str) -> bool:
    return file.startswith(WAITING)


def _is_fast(file: str) -> bool:
    return not _waits(file) and not _trains(file)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _by_file(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(_file(item), []).append(item)
    return files


@dataclass
class _Lane:
    """A lane, seen from the process that collects."""

    number: int
    pid: int
    stacks: IO[str]  # what faulthandler writes on request
    test: str | None = None  # that it runs
    file: str | None = None  # that it was given last
    heard_at: float = field(default_factory=time.monotonic)


class _Lanes:
    """Plugin of the process that collects: it forks the lanes, hands out files and reports."""

    def __init__(self, *, with_ranks: bool) -> None:
        from tests.warm_ranks import ForLanes  # which imports this file

        self._ranks = ForLanes(_NUM_LANES) if with_ranks else None
        self._left: dict[str, None] = {}  # files that no lane has taken
        self._lanes: dict[Connection, _Lane] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests in lanes; leave it to pytest after an error of the collection."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = False  # lanes report in turns: a dot says no file
        self._left = dict.fromkeys(map(_file, session.items))
        # Made here, so that the folders of all lanes lie in one.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for lane in range(_NUM_LANES):
            self._fork(lane, session)
        try:
            if self._ranks is not None:
                self._ranks.hand_over()
            seconds = float(session.config.getini("timeout")) + _SECONDS_BEYOND_LIMIT
            while self._lanes:
                for channel in wait(list(self._lanes), timeout=5.0):
                    self._answer(channel, session)
                self._end_silent(session, seconds=seconds)
        finally:
            self._end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, number: int, session: pytest.Session) -> None:
        mine, theirs = Pipe()
        stacks = stacks_file()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for other in (mine, *self._lanes):
                other.close()
            if self._ranks is not None:
                self._ranks.take(number)
            write_stacks_on_request(stacks)
            _be_lane(number, session, theirs)
        theirs.close()
        self._lanes[mine] = _Lane(number, pid, stacks)

    def _answer(self, channel: Any, session: pytest.Session) -> None:
        lane = self._lanes[channel]
        lane.heard_at = time.monotonic()
        try:
            kind, value = channel.recv()
        except (EOFError, ConnectionResetError):
            self._lose(channel, session)
            return
        hook = session.config.hook
        if kind == "starts":
            lane.test = value
        elif kind == "ended":
            lane.test = None
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=value)
        else:
            self._hand_out(channel, session)

    def _hand_out(self, channel: Connection, session: pytest.Session) -> None:
        """Give a lane its next file; None once all are taken, or the run ends early."""
        file = None
        if self._left and not session.shouldfail and not session.shouldstop:
            file = next_file(self._left, lane=self._lanes[channel].number)
            del self._left[file]
        self._lanes[channel].file = file
        with suppress(BrokenPipeError):  # it has ended, as what it says next will tell
            channel.send(file)

    def _end_silent(self, session: pytest.Session, *, seconds: float) -> None:
        """Kill the lanes that have reported nothing for `seconds`, with their processes. What they
        did becomes a failure.
        """
        for channel, lane in list(self._lanes.items()):
            if time.monotonic() - lane.heard_at > seconds:
                doing = _stacks_and_processes(lane)
                _kill(lane)
                test = lane.test or "the end of its tests"
                self._report_loss(channel, session, test, f"was silent for {seconds:.0f} s", doing)

    def _lose(self, channel: Connection, session: pytest.Session) -> None:
        """Handle the end of a lane: a failure of the test that it ran, or of the file that it was
        to begin, if it had one.
        """
        lane = self._lanes[channel]
        os.waitpid(lane.pid, 0)
        test = lane.test or lane.file
        if test is None:
            del self._lanes[channel]
            channel.close()
        else:
            self._report_loss(channel, session, test, "ended", "")

    def _report_loss(
        self, channel: Connection, session: pytest.Session, test: str, how: str, doing: str
    ) -> None:
        lane = self._lanes.pop(channel)
        channel.close()
        reason = f"lane {lane.number} {how} while it ran {test}; the rest of its file is not run"
        text = f"{reason}\n{doing}"
        report = pytest.TestReport(test, (_path(test), None, test), {}, "failed", text, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if not self._lanes and self._left:
            session.shouldfail = reason

    def _end(self) -> None:
        """End the lanes that run on, as after Ctrl-C. A lane in which a test took the interrupt for
        its own finds its channel closed.
        """
        for channel, lane in self._lanes.items():
            os.kill(lane.pid, signal.SIGINT)
            channel.close()
        for lane in self._lanes.values():
            os.waitpid(lane.pid, 0)


def stacks_file() -> IO[str]:
    """Return a file without a name, which a lane and its parent share."""
    return os.fdopen(os.memfd_create("stacks"), "w+", encoding="utf-8")


def write_stacks_on_request(stacks: IO[str]) -> None:
    """Let a signal write the stacks of this process's threads, whatever they do."""
    faulthandler.register(_WRITE_STACKS, stacks, all_threads=True)


def _stacks_and_processes(lane: _Lane) -> str:
    """Return what the threads of a lane do, and the processes that it has started."""
    os.kill(lane.pid, _WRITE_STACKS)
    time.sleep(1.0)  # one that sleeps in the kernel never writes
    lane.stacks.seek(0)
    lines = [lane.stacks.read()]
    for process in _processes_of(lane):
        with suppress(psutil.NoSuchProcess, OSError):
            waits_in = Path(f"/proc/{process.pid}/wchan").read_text(encoding="utf-8")
            words = " ".join(process.cmdline())
            lines.append(f"{process.pid} {process.status()} in {waits_in}: {words[:300]}")
    return "\n".join(lines)


def _kill(lane: _Lane) -> None:
    """Kill a lane and what it has started, without waiting: a process that sleeps in the kernel may
    not end.
    """
    for process in _processes_of(lane):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _processes_of(lane: _Lane) -> list[psutil.Process]:
    """Return the process of a lane, if it runs, and those that it has started."""
    try:
        process = psutil.Process(lane.pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _path(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _be_lane(lane: int, session: pytest.Session, channel: Connection) -> None:
    """Run the files that the parent hands out. Never returns."""
    global _number
    _number = lane
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    config = session.config
    _capture_alone(config)
    config.pluginmanager.get_plugin("terminalreporter")._tw._file = StringIO()
    config.pluginmanager.register(_Reporter(config, channel), "lane")
    folder = config._tmp_path_factory.getbasetemp() / f"lane{lane}"  # type: ignore[attr-defined]
    folder.mkdir()
    try:
        _run_files(_by_file(session.items), channel, folder)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the run ends
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        session._setupstate.teardown_exact(None)
        channel.close()
        os._exit(0)  # tearing down ten thousand cases takes seconds


def _capture_alone(config: pytest.Config) -> None:
    """Give this process files of its own for what is captured: a fork shares those of the parent.

    Loggers that were made while tests were collected keep writing to the same file objects.
    """
    capturing = config.pluginmanager.get_plugin("capturemanager")._global_capturing
    for stream in (capturing.out, capturing.err):
        with suppress(OSError), TemporaryFile(buffering=0) as own:
            os.dup2(own.fileno(), stream.tmpfile.fileno())


def _run_files(files: dict[str, list[pytest.Item]], channel: Connection, folder: Path) -> None:
    file = _request_file(channel)
    number = 0
    while file is not None:
        following = None
        items = files[file]
        # Each folder of a test is made with a look through all that stand beside it.
        number += 1
        factory = items[0].config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = folder / str(number)
        factory._basetemp.mkdir()
        for index, item in enumerate(items):
            if index + 1 < len(items):
                next_item = items[index + 1]
            else:
                # Known before the last test ends: what it shares with the next file is kept.
                following = _request_file(channel)
                next_item = None if following is None else files[following][0]
            channel.send(("starts", item.nodeid))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        channel.send(("ended", file))
        file = following


def _request_file(channel: Connection) -> str | None:
    channel.send(("next", None))
    file: str | None = channel.recv()
    return file


class _Reporter:
    """Plugin of a lane: it sends the parent what is to be reported."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config = config
        self._channel = channel
        # --durations and --junit-xml count how long every phase took
        self._sends_all = config.option.durations is not None or bool(config.option.xmlpath)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a test's phase. A fixture that passed is shown nowhere: without these,
        the parent has a third of the work.
        """
        if report.passed and report.when != "call" and not self._sends_all:
            return
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._channel.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        """Send a warning; as text, if its own class does not travel."""
        kwargs = {
            "warning_message": warning_message,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        try:
            pickle.dumps(kwargs)
        except Exception:
            text = f"{warning_message.category.__name__}: {warning_message.message}"
            kwargs["warning_message"] = warnings.WarningMessage(
                text, UserWarning, warning_message.filename, warning_message.lineno
            )
        self._channel.send(("warning", kwargs))
