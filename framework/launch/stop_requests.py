"""Requests to stop: signals, and messages of `launch -H`, which holds the standard input open."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from framework.errors import RunStopped, UsageError
from framework.system.stopping import NOTICES, Insistence, handled, put_back

_LOOK_SECONDS: Final = 0.2
_LAUNCHER_GONE: Final = "the launcher is gone"
# A lost connection is a notice, too: the request proper may follow.
_NOTICES: Final = (*(notice.name for notice in NOTICES), _LAUNCHER_GONE)


class StopRequests:
    """State of requests to stop.

    Attributes:
        asked: how the first request came, such as ``SIGTERM``; empty before it.
        insists: a second request came that was no notice: there is no time for a checkpoint.
        cut_off: the launcher is gone, so the time to save is short.
        lost: another host never became a node, or has ended.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.insists = False
        self.cut_off = False
        self.lost = False
        self._insistence = Insistence()
        self._life_line: int | None = None

    def ask(self, how: str) -> None:
        """Count a request, as `Insistence` has it."""
        self.asked = self.asked or how
        if self._insistence.again(time.monotonic(), is_notice=how in _NOTICES):
            self.insists = True

    def hold(self, life_line: int) -> None:
        """Read the messages of `launch -H` from now on, and the end of its input."""
        self._life_line = life_line

    def look(self) -> None:
        """Read what came over the life line."""
        if self._life_line is None or not select.select([self._life_line], [], [], 0)[0]:
            return
        words = os.read(self._life_line, 4096).split()
        if not words:
            self._life_line = None
            self.cut_off = True
            self.ask(_LAUNCHER_GONE)
        self.lost = self.lost or b"lost" in words
        if b"stop" in words:
            self.ask("the launcher's request")
        if b"kill" in words:
            self.asked = self.asked or "the launcher's request"
            self.insists = True

    def refuse_start(self) -> None:
        """Raise RunStopped if there was a request before any rank was started."""
        self.look()
        if self.asked:
            raise RunStopped(
                f"stopped on request ({self.asked}) before any rank was started [stopped-early]"
            )

    def wait(self, seconds: float) -> None:
        """Wait before a start; raises RunStopped on request."""
        until = time.monotonic() + seconds
        while True:
            self.refuse_start()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_LOOK_SECONDS, left))

    @contextmanager
    def handling_signals(self) -> Iterator[StopRequests]:
        """Count signals as requests during the block."""
        before = {number: signal.getsignal(number) for number in handled()}
        for number in before:
            signal.signal(number, self._receive)
        try:
            yield self
        finally:
            put_back(before)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)


def read_order(descriptor: int, requests: StopRequests) -> dict[str, str]:
    """Read the first line of `launch -H`, and return the environment that it sends.

    Raises:
        RunStopped: a signal came before it.
        UsageError: the line is something else.
    """
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < 1 << 20:
        while not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
            requests.refuse_start()
        # One by one, because the messages behind the line are for `StopRequests`.
        character = os.read(descriptor, 1)
        if not character:
            break
        line += character
    with suppress(ValueError):
        order = json.loads(line)
        environment = order.get("environment") if isinstance(order, dict) else None
        if isinstance(environment, dict):
            has_only_texts = all(isinstance(value, str) for value in environment.values())
            if has_only_texts:
                return environment
    raise UsageError("launch node: --from_stdin is for `launch -H`, which sends what belongs there")
