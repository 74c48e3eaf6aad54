"""Meaning of a signal by the time at which it comes; and the end of a process that listens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from framework.system.stopping import StopRequest
from tests.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timing]

TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def verdicts(*received: tuple[float, int], training: bool = True) -> list[str]:
    clock = Clock()
    request = StopRequest(clock)
    if training:
        request.training_begins()
    found = []
    for seconds, number in received:
        clock.now = 100.0 + seconds
        found.append(request.receive(number))
    return found


@pytest.mark.parametrize("number", [TERM, INT, USR1, HUP])
def test_the_first_signal_is_noted_and_named(number: signal.Signals) -> None:
    request = StopRequest()
    assert request.signal == ""
    request.training_begins()
    assert request.receive(number) == "noted"
    assert request.signal == number.name
    assert request.receive(TERM) != "noted"
    assert request.signal == number.name, "the first one is told"


def test_before_training_there_is_nothing_to_save() -> None:
    assert verdicts((0, TERM), training=False) == ["nothing to save"]


@pytest.mark.parametrize(
    ("seconds", "means"), [(0.0, "known"), (1.9, "known"), (2.1, "now"), (600.0, "now")]
)
@pytest.mark.parametrize("second", [TERM, INT])
def test_one_request_sent_twice_is_one_and_a_later_one_means_now(
    second: int, seconds: float, means: str
) -> None:
    assert verdicts((0, INT), (seconds, second)) == ["noted", means]


def test_notices_never_mean_now_and_do_not_count_as_the_first_time() -> None:
    assert verdicts((0, USR1), (300, USR1), (400, HUP)) == ["noted", "known", "known"]
    assert verdicts((0, USR1), (300, TERM), (301, TERM), (303, TERM)) == [
        "noted",
        "known",
        "known",
        "now",
    ]


def test_what_is_to_be_done_at_the_first_signal_is_done_once_and_also_when_it_came_before() -> None:
    done: list[int] = []
    request = StopRequest()
    request.training_begins()
    request.when_asked(lambda: done.append(1))
    request.receive(TERM)
    request.receive(TERM)
    assert done == [1]
    request.when_asked(lambda: done.append(2))
    assert done == [1, 2]


def test_handlers_are_lent_and_given_back() -> None:
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR1, HUP)}
    signal.signal(USR1, lambda number, frame: seen.append(number))
    mine = signal.getsignal(USR1)
    try:
        request = StopRequest()
        with request.handling():
            request.training_begins()
            os.kill(os.getpid(), USR1)
            assert request.signal == "SIGUSR1"
        assert signal.getsignal(USR1) is mine
        assert {number: signal.getsignal(number) for number in (TERM, INT, HUP)} == {
            n: before[n] for n in (TERM, INT, HUP)
        }
        os.kill(os.getpid(), USR1)
        assert seen == [USR1]
    finally:
        signal.signal(USR1, before[USR1])


def test_a_request_that_means_now_is_left_to_the_former_handler() -> None:
    clock = Clock()
    request = StopRequest(clock)
    request.training_begins()
    with pytest.raises(KeyboardInterrupt), request.handling():  # noqa: PT012 - both signals belong to it
        os.kill(os.getpid(), INT)
        clock.now += 3
        os.kill(os.getpid(), INT)
    assert request.signal == "SIGINT"


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        request = StopRequest()
        with request.handling():
            os.kill(os.getpid(), HUP)
            assert request.signal == ""
    finally:
        signal.signal(HUP, before)


def test_elsewhere_than_in_the_main_thread_nothing_is_handled() -> None:
    before = signal.getsignal(TERM)
    seen: list[object] = []

    def work() -> None:
        with StopRequest().handling():
            seen.append(signal.getsignal(TERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [before]


_LISTENING = """
import ctypes, os, signal, sys, time
from framework.system.stopping import StopRequest
{before}
request = StopRequest()
request.listen()
{setting}
print("ready", flush=True)
for _ in range(9):  # a signal ends one
    ctypes.CDLL(None).sleep(60)  # as a rendezvous: no line of Python is run, and no handler
"""


def listening(setting: str = "", *, before: str = "", **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _LISTENING.format(setting=setting, before=before)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    while line and line != "ready\n":
        line = process.stdout.readline()
    return process


def test_before_the_first_step_a_process_ends_at_once_although_it_waits_in_c() -> None:
    process = listening()
    process.send_signal(TERM)
    _, stated = process.communicate(timeout=30)
    assert process.returncode == 75
    assert stated == "SIGTERM: stopped before the first step: nothing new to save [stopped]\n"


def test_twice_while_training_ends_with_the_number_of_the_signal() -> None:
    """A clock of the test: it tells the time of each signal, and prints that it was asked."""
    clock = "request._clock = lambda: print('asked', flush=True) or next(times)"
    setting = f"times = iter([0.0, 0.5, 4.5]); {clock}; request.training_begins()"
    process = listening(setting, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert process.stdout is not None
    for _ in range(2):
        process.send_signal(INT)
        assert process.stdout.readline() == "asked\n"
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(INT)
    _, stated = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stated == "rank 1: SIGINT again: ending at once [stopped-at-once]\n"


def test_once_all_is_saved_a_request_changes_nothing() -> None:
    process = listening("request.training_begins(); request.training_is_over()")
    process.send_signal(TERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    assert process.communicate(timeout=30)[1] == ""


def test_a_signal_to_a_forked_child_is_none_to_the_rank() -> None:
    process = listening(
        """request.training_begins()
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGUSR1)  # ignored there, and until it comes to that it waits
time.sleep(0.3)
assert os.waitpid(child, os.WNOHANG) == (0, 0)
os.kill(child, signal.SIGTERM)  # as multiprocessing ends its children
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
time.sleep(0.3)
assert not request.signal""",
        before="os.register_at_fork(after_in_child=lambda: time.sleep(0.3))",
    )
    process.kill()
    process.communicate(timeout=30)
    # `listening` has read on to "ready"; a failed assertion would have ended the process before it.
    assert process.returncode == -9


# The main thread keeps the interpreter's lock until it waits in C: a signal that came while it
# still ran Python would be handled, and the case would be another one. `Thread.start` waits, and so
# gives the lock away; `_thread` does not.
STUCK_IN_C = """
import _thread, ctypes, os, signal, sys, time
from framework.system.stopping import StopRequest
request = StopRequest()

def look():
    assert request.asked() == ""
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 40
    while not request.asked() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(request.asked(), repr(request.signal), flush=True)
    os._exit(0)

mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
with request.handling():
    libc.pthread_mutex_lock(mutex)
    sys.setswitchinterval(1000)
    _thread.start_new_thread(look, ())
    libc.pthread_mutex_lock(mutex)  # for good, and no signal ends it
"""


def test_a_request_is_known_while_the_main_thread_is_in_c() -> None:
    """Python runs no handler then; `fit` in a script has no thread that reads signals."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK_IN_C],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "SIGTERM ''\n", done.stderr
