"""Signals that ask to stop: which, when one is heeded, and when asking again means "now". Ranks and launchers have one
rule.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Some minutes before the time is up, a closed terminal: the request proper may follow.
NOTICES: Final = (signal.SIGUSR1, signal.SIGHUP)
# nohup ignores SIGHUP, a shell script's `&` SIGINT: whoever did that meant it. The others are ignored by somebody
# further up for himself, and nobody else could ask.
_MAY_BE_IGNORED: Final = (signal.SIGINT, signal.SIGHUP)
# `timeout` and some schedulers send one request twice; a person who means "now" takes longer than this.
_SAME_REQUEST_SECONDS: Final = 2.0


class Insistence:
    """Whether somebody who was heard asks again."""

    def __init__(self) -> None:
        self._meant_at: float | None = None

    def again(self, now: float, *, is_notice: bool) -> bool:
        """Count a request. Notices never insist, and what follows them is the first that is meant."""
        if is_notice:
            return False
        if self._meant_at is None:
            self._meant_at = now
        return now - self._meant_at > _SAME_REQUEST_SECONDS


def handled() -> list[signal.Signals]:
    """All but those that whoever started this process has ignored for good reason."""
    return [
        number for number in SIGNALS if number not in _MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    ]


def put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    """Give signals the handlers that they had."""
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set from Python


@contextmanager
def ending_in_good_order() -> Iterator[None]:
    """SIGTERM ends a command with 143 as it always does, but not before what lies half-written is removed on the way
    out.
    """

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
