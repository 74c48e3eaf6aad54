"""Requests to stop, wherever they come from: signals, and the input that an ssh launcher holds
open.
"""

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
# A lost connection is one, too: the request proper may follow.
_NOTICES: Final = (*(each.name for each in NOTICES), _LAUNCHER_GONE)


class StopRequests:
    """State of requests to stop.

    Attributes:
        asked: how the first request came, such as ``SIGTERM``; empty before it.
        insists: a second one came that was no notice: no time for a checkpoint.
        cut_off: the one who started us is gone, so the time to save is short.
        lost: another host never came to be a node, or is one no more.
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
        self.insists = (
            self._insistence.again(time.monotonic(), is_notice=how in _NOTICES) or self.insists
        )

    def hold(self, life_line: int) -> None:
        """Hear from now on what an ssh launcher says, and that it is gone."""
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
        """Raise RunStopped if somebody has asked before there was anything to stop."""
        self.look()
        if self.asked:
            raise RunStopped(
                f"stopped on request ({self.asked}) before any rank was started [stopped-early]"
            )

    def wait(self, seconds: float) -> None:
        """Wait so long before a start, or raise RunStopped on request."""
        until = time.monotonic() + seconds
        self.refuse_start()
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_SECONDS, left))
            self.refuse_start()

    @contextmanager
    def handling_signals(self) -> Iterator[StopRequests]:
        """Count signals meanwhile."""
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
    """The first line of an ssh launcher: the environment that it sends.

    Raises:
        RunStopped: a signal came before it.
        UsageError: it is something else.
    """
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < 1 << 20:
        while not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
            requests.refuse_start()
        # One by one: what comes behind the line is for `StopRequests`.
        character = os.read(descriptor, 1)
        if not character:
            break
        line += character
    with suppress(ValueError):
        order = json.loads(line)
        if isinstance(order, dict):
            environment = order.get("environment")
        else:
            environment = None
        if isinstance(environment, dict) and all(
            isinstance(value, str) for value in environment.values()
        ):
            return environment
    raise UsageError("launch node: --from_stdin is for `launch -H`, which sends what belongs there")
