"""Requests to stop: SIGTERM, SIGINT, SIGUSR1 and SIGHUP mean "save and end", not "die".

A request only sets a flag, which is read between two steps. Before the first step there is nothing
to save, and the process ends at once. A second SIGINT or SIGTERM, more than two seconds later,
means "now". All ranks agree on the step after which they stop in `engine/stop_agreement.py`.

Python runs a signal's handler between two lines of the main thread, which may wait for minutes in
C++. So `listen` reads the signals in a thread of its own, through the wakeup descriptor that the
C-level handler writes to; a process that is not ours (`framework.fit`) keeps its descriptor, and
only lends its handlers. Standard library only: train.py listens before it imports anything else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import FrameType
from typing import Any, Final, Literal, NoReturn

from framework.errors import EXIT_STOPPED
from framework.system.parent_watch import report_asked

# Signals that request a stop: which they are, when they are handled, and when another one means
# "now". Ranks and launchers have one rule.


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Some minutes before the time is up, a closed terminal: the request proper may follow.
NOTICES: Final = (signal.SIGUSR1, signal.SIGHUP)
# nohup ignores SIGHUP, and a shell script's `&` SIGINT, on purpose. If a parent ignores the other
# signals, it does so for itself, and without them no stop could be requested.
_MAY_BE_IGNORED: Final = (signal.SIGINT, signal.SIGHUP)
# `timeout` and some schedulers send one request twice; a user who means "now" takes longer than
# this.
_SAME_REQUEST_SECONDS: Final = 2.0


class Action(Enum):
    """Work between two steps that a signal or the clock asks all ranks for."""

    NONE = "none"
    EVALUATE = "evaluate"
    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """What all ranks do between two steps.

    Attributes:
        action: the work.
        reason: for people, why a run stops: the name of a signal, or ``training.max_minutes``.
    """

    action: Action
    reason: str = ""

    @staticmethod
    def of_signal(name: str) -> Decision:
        """Return the decision that follows from a signal; an empty name: none has come."""
        if name:
            return Decision(Action.STOP, name)
        return GO_ON

    @staticmethod
    def parse(text: str) -> Decision:
        """Read what another rank wrote with `str`."""
        action, _, reason = text.partition(" ")
        return Decision(Action(action), reason)

    def __str__(self) -> str:
        return f"{self.action.value} {self.reason}"


GO_ON: Final = Decision(Action.NONE)
TIME_IS_UP: Final = Decision(Action.STOP, "training.max_minutes")


class Insistence:
    """Repetition of a request to stop."""

    def __init__(self) -> None:
        self._meant_at: float | None = None

    def again(self, now: float, *, is_notice: bool) -> bool:
        """Count a request, and return whether it means "now".

        A notice never does, and the request after a notice counts as the first one.
        """
        if is_notice:
            return False
        if self._meant_at is None:
            self._meant_at = now
        return now - self._meant_at > _SAME_REQUEST_SECONDS


def handled() -> list[signal.Signals]:
    """Return the signals to handle: all but those that the parent process ignores on purpose."""
    numbers = []
    for number in SIGNALS:
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if not is_ignored or number not in _MAY_BE_IGNORED:
            numbers.append(number)
    return numbers


def put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restore the handlers of signals."""
    for number, handler in handlers.items():
        # None: not set from Python
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def ending_in_good_order() -> Iterator[None]:
    """Raise SystemExit at SIGTERM during the block.

    A command ends with 143 as without this, but half-written files are removed on the way out.
    """

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


Meaning = Literal["noted", "nothing to save", "now", "known"]


class StopRequest:
    """Request to stop this process, and its signal; `began`: when this start began."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self._lock = threading.RLock()  # a handler may run in the thread that holds it
        self._phase: Literal["before", "training", "over", "failed"] = "before"
        self._insistence = Insistence()
        self._number: int | None = None
        self._when_asked: Callable[[], None] | None = None
        # the pipe to which C's handler writes each signal, if a process only lends its handlers
        self._wakeups = -1
        self._woken_by = ""

    def asked(self) -> str:
        """Return the name of the first signal; empty before.

        It is known even while the main thread is in C++, and has not run its handler.
        """
        if not (self.signal or self._woken_by) and self._wakeups >= 0:
            with suppress(OSError):
                for number in os.read(self._wakeups, 64):
                    if number in SIGNALS:
                        self._woken_by = signal.Signals(number).name
                        break
        return self.signal or self._woken_by

    @property
    def signal(self) -> str:
        """Name of the first signal, such as ``SIGTERM``; empty before."""
        if self._number is not None:
            return signal.Signals(self._number).name
        return ""

    @property
    def is_over(self) -> bool:
        """True if the run has stopped and saved, so that nothing is lost by ending at once."""
        return self._phase == "over"

    def receive(self, number: int) -> Meaning:
        """Note a signal, and return what it means; at the first one, report it to the agent and do
        the work of `when_asked`.

        Returns:
            "noted" or, before training, "nothing to save" for the first signal; "now" or "known"
            (nothing new) for a later one.
        """
        now = self._clock()
        with self._lock:
            again = self._insistence.again(now, is_notice=number in NOTICES)
            if self._number is None:
                self._number = number
                report_asked(self.signal)
                if self._when_asked is not None:
                    self._when_asked()
                return "nothing to save" if self._phase == "before" else "noted"
            return "now" if again else "known"

    def when_asked(self, work: Callable[[], None] | None) -> None:
        """Have `work` done at the first signal, in the thread that gets it, or at once after it."""
        with self._lock:
            self._when_asked = work
            if self._number is not None and work is not None:
                work()

    def training_begins(self) -> None:
        """Handle requests between two steps from now on.

        All ranks call this before any of them takes a step.
        """
        with self._lock:
            self._phase = "training"

    def training_is_over(self) -> None:
        """Note that everything is saved: a request that still comes changes nothing."""
        with self._lock:
            self._phase = "over"

    def run_has_failed(self) -> None:
        """Note that there is nothing to stop any more.

        A request that comes now is a launcher's, which ends the remaining ranks of the job.
        """
        with self._lock:
            self._phase = "failed"

    def listen(self) -> None:
        """Read requests from now to the end of this process, which is a rank and nothing else.

        Call it in the main thread.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in handled():
            signal.signal(number, lambda number, frame: None)  # `_attend` reads it
        _leave_children_alone()
        threading.Thread(
            target=self._attend, args=(reader,), name="stop-requests", daemon=True
        ).start()

    def _attend(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in SIGNALS:
                    self._act(number)

    def _act(self, number: int) -> None:
        """Receive a signal in the listening thread, and end the process if there is reason to."""
        with self._lock:  # so that training does not begin after the decision to end
            meaning = self.receive(number)
            name = signal.Signals(number).name
            if meaning == "nothing to save":
                line = f"{name}: stopped before the first step: nothing new to save [stopped]"
                _end(EXIT_STOPPED, line)
            if meaning == "now":
                code = EXIT_STOPPED if self.is_over else 128 + number
                _end(code, f"{name} again: ending at once [stopped-at-once]")
        if meaning == "noted" and not self.is_over and os.environ.get("LOCAL_RANK", "0") == "0":
            announce(
                f"{name}: stopping after a step that all ranks agree on; once more ends at once"
            )

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle requests during the block, and put back the former handlers.

        Only the main thread can do so: in other threads nothing is handled. A request that means
        "now" is left to the former handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in handled()}

        def handle(number: int, _frame: FrameType | None) -> None:
            if self.receive(number) == "now":
                put_back(before)
                signal.raise_signal(number)

        for number in before:
            signal.signal(number, handle)
        try:
            with _wakeups() as self._wakeups:
                yield
        finally:
            self._wakeups = -1
            put_back(before)


_lent: set[int] = set()  # ends of pipes to which C's handler writes


@contextmanager
def _wakeups() -> Iterator[int]:
    """Yield the end of a pipe to which C's handler writes the number of each signal.

    It is -1 if the process has a wakeup descriptor of its own, as a process with an event loop has.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    else:
        _lent.add(writer)
        _keep_from_children()
    try:
        yield -1 if before != -1 else reader
    finally:
        if writer in _lent:
            _lent.discard(writer)
            now = signal.set_wakeup_fd(-1)
            if now not in (writer, -1):  # an event loop that began meanwhile
                signal.set_wakeup_fd(now)
        os.close(reader)
        os.close(writer)


@cache
def _keep_from_children() -> None:
    """Keep signals of a child out of the pipe of this process.

    At its end a data loader sends signals to its workers, for example.
    """

    def reset_wakeup() -> None:
        if _lent:
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=reset_wakeup)


def announce(line: str) -> None:
    """Write a line to stderr past Python's buffers, which another thread may hold."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _end(code: int, line: str) -> NoReturn:
    announce(f"{_rank()}{line}")
    os._exit(code)


def _rank() -> str:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return f"rank {os.environ.get('RANK', '0')}: "
    return ""


_held = threading.local()


@cache  # hooks stay: a second pair would save the mask of the first one, and restore it
def _leave_children_alone() -> None:
    os.register_at_fork(
        before=_block_signals,
        after_in_parent=_unblock_signals,
        after_in_child=_reset_handlers,
    )


def _block_signals() -> None:
    """Block signals before a fork, until the child has handlers of its own."""
    _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, handled())


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.before)


def _reset_handlers() -> None:
    """Give a child handlers of its own: it shares the pipe, and its signals are not the rank's."""
    signal.set_wakeup_fd(-1)
    for number in handled():
        # The rank handles requests to a whole process group. SIGTERM stays: `multiprocessing` ends
        # children with it.
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        else:
            signal.signal(number, signal.SIG_IGN)
    _unblock_signals()
