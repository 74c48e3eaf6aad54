"""Signals that count as a request to stop, and those that leave no time for a checkpoint."""

from __future__ import annotations

import os
import signal

import pytest

from framework.errors import RunStopped, UsageError
from framework.launch import stop_requests as module
from framework.launch.node import grace_seconds
from framework.launch.stop_requests import StopRequests

pytestmark = pytest.mark.timing


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("asked", "insists"),
    [
        ("SIGTERM SIGTERM", True),
        ("SIGINT SIGTERM", True),
        # a scheduler's notice, and its request: the run is saving since the first
        ("SIGUSR1 SIGTERM", False),
        ("SIGHUP SIGTERM", False),
        ("SIGUSR1 SIGTERM SIGTERM", True),
        ("SIGTERM SIGUSR1", False),
        ("SIGTERM SIGHUP SIGUSR1", False),
    ],
)
def test_a_notice_never_insists(asked: str, insists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, requests = Clock(), StopRequests()
    monkeypatch.setattr(module, "time", clock)
    for name in asked.split():
        requests.ask(name)
        requests.ask(name)  # `timeout` sends it twice
        clock.now += 2.1
    assert (requests.asked, requests.insists) == (asked.split()[0], insists)


@pytest.mark.parametrize(
    ("number", "heard"),
    [
        (signal.SIGTERM, True),
        (signal.SIGUSR1, True),
        (signal.SIGINT, False),
        (signal.SIGHUP, False),
    ],
)
def test_an_agent_receives_what_its_ranks_would_obey(number: signal.Signals, heard: bool) -> None:
    """nohup ignores SIGHUP and a shell's `&` SIGINT; a SIGTERM that is ignored further up is still
    meant for the agent.
    """
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequests().handling_signals() as requests:
            signal.raise_signal(number)
            assert (requests.asked == number.name) == heard
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_launcher_that_is_gone_shortens_the_time_and_does_not_insist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, requests = Clock(), StopRequests()
    monkeypatch.setattr(module, "time", clock)
    reader, writer = os.pipe()
    requests.hold(reader)
    os.write(writer, b'{"type": "stop"}\n')
    requests.look()
    assert requests.asked == "the launcher's request"
    clock.now += 5
    os.close(writer)
    requests.look()
    os.close(reader)
    assert requests.cut_off
    assert not requests.insists


def test_a_request_before_anything_runs_is_obeyed() -> None:
    requests = StopRequests()
    requests.refuse_start()
    requests.ask("SIGTERM")
    with pytest.raises(
        RunStopped,
        match=r"stopped on request \(SIGTERM\) before any rank was started \[stopped-early\]",
    ):
        requests.refuse_start()


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9999", "soon", "12345678"])
def test_a_time_to_save_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSF_GRACE_SECONDS", text)
    with pytest.raises(UsageError, match=r"DSF_GRACE_SECONDS: .* is not a number of seconds"):
        grace_seconds(None)
    assert grace_seconds(5.0) == 5


def test_the_time_to_save_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSF_GRACE_SECONDS", "270")
    assert grace_seconds(None) == 270
