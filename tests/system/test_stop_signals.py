"""Signals that are a request to stop: one rule for ranks and launchers."""

from __future__ import annotations

import signal

import pytest

from framework.system.stopping import SIGNALS, Insistence, handled, put_back

IGNORED_BY_SHELLS = (signal.SIGINT, signal.SIGHUP)


def test_only_what_shells_ignore_stays_ignored() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        assert set(handled()) == set(SIGNALS) - set(IGNORED_BY_SHELLS)
        for number in IGNORED_BY_SHELLS:
            signal.signal(number, signal.SIG_DFL)
        assert set(handled()) == set(SIGNALS)
    finally:
        put_back(before)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_handler_of_other_than_python_is_given_back_as_the_default() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        put_back({signal.SIGUSR1: None})
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("requests", "insists"),
    [
        ([(0.0, False)], False),
        ([(0.0, False), (2.0, False)], False),  # one request, sent twice
        ([(0.0, False), (2.1, False)], True),
        ([(0.0, True), (300.0, False)], False),
        ([(0.0, True), (300.0, False), (302.1, False)], True),
        ([(0.0, False), (300.0, True)], False),
    ],
)
def test_a_later_second_request_insists_unless_it_is_a_notice(
    requests: list[tuple[float, bool]], insists: bool
) -> None:
    insistence = Insistence()
    assert [insistence.again(now, is_notice=is_notice) for now, is_notice in requests][
        -1
    ] == insists
