"""Requests to stop: signals, and messages of `launch -H`, which holds the standard input open."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from framework.errors import RunStopped, UsageError
from framework.system.json_lines import BadLineError, MessageReader
from framework.system.stopping import NOTICES, Insistence, handled, put_back

_LOOK_SECONDS: Final = 0.2
_LARGEST_ORDER_BYTES: Final = 1 << 20
_LAUNCHER_ASKS: Final = "the launcher's request"
_NO_ORDER: Final = "launch node: --from_stdin is for `launch -H`, which sends what belongs there"
_LAUNCHER_GONE: Final = "the launcher is gone"
_NOTICES: Final = tuple(notice.name for notice in NOTICES)


class StopRequests:
    """State of requests to stop.

    Attributes:
        asked: how the first request came, such as ``SIGTERM``; empty before it.
        is_meant: a request came, and not only the loss of the launcher's connection.
        insists: a second request came that was no notice: there is no time for a checkpoint.
        cut_off: the launcher is gone, so the time to save is short.
        lost: another host never became a node, or has ended.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.is_meant = False
        self.insists = False
        self.cut_off = False
        self.lost = False
        self._insistence = Insistence()
        self._life_line: MessageReader | None = None

    def ask(self, how: str) -> None:
        """Note a request to stop; `system/stopping.py` `Insistence` finds whether it `insists`."""
        self.asked = self.asked or how
        self.is_meant = True
        if self._insistence.again(time.monotonic(), is_notice=how in _NOTICES):
            self.insists = True

    def hold(self, life_line: int) -> None:
        """Read the messages of `launch -H` from now on, and the end of its input."""
        self._life_line = MessageReader(life_line, largest=_LARGEST_ORDER_BYTES)

    def read_order(self) -> AgentOrder:
        """Wait for the first message of `launch -H`.

        Raises:
            RunStopped: a signal came before it.
            UsageError: it is something else.
        """
        assert self._life_line is not None
        while True:
            self._raise_if_asked()
            try:
                message = self._life_line.receive(_LOOK_SECONDS)
                return AgentOrder.model_validate(message)
            except TimeoutError:
                continue
            except ValueError:  # of JSON, and pydantic's
                raise UsageError(_NO_ORDER) from None

    def look(self) -> None:
        """Read what came over the life line, without waiting: requests, or its end."""
        while self._life_line is not None:
            try:
                message = self._life_line.receive(0)
            except TimeoutError:
                return
            except BadLineError:
                continue
            if message is None:
                self._life_line = None
                self.cut_off = True
                self.asked = self.asked or _LAUNCHER_GONE
            else:
                self._hear(message.get("type"))

    def _hear(self, kind: object) -> None:
        """Handle a message of `launch -H` by its type."""
        if kind == "lost":
            self.lost = True
        elif kind == "stop":
            self.ask(_LAUNCHER_ASKS)
        elif kind == "kill":
            self.asked = self.asked or _LAUNCHER_ASKS
            self.is_meant = True
            self.insists = True

    def refuse_start(self) -> None:
        """Raise RunStopped if there was a request before any rank was started."""
        self.look()
        self._raise_if_asked()

    def _raise_if_asked(self) -> None:
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


class AgentOrder(BaseModel):
    """The first line of `launch -H` to an agent.

    Attributes:
        environment: variables that are set.
        restarts: `supervision.Restarts.state`, for the agent of a host that was lost.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    environment: dict[str, str]
    restarts: dict[str, Any] = {}
