"""State of one start of the job, as every node knows it: failures, requests to stop, ended nodes.

Node 0 receives the reports of all nodes, gathers them for a moment, and passes on what is new. So
reports of a thousand nodes at once are a thousand messages in and a thousand out, not a million.
All nodes see one order, and decide alike. Every message carries the number of its start (`epoch`):
a late message of the last start ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Final

from framework.errors import EXIT_PEER_LOST
from framework.launch.rendezvous.channel import Channel, ConnectionLost, Message, body_of, foreign
from framework.launch.rendezvous.messages import FailureRecord, News, Report, read_message

_GATHER_SECONDS: Final = 0.05
MOST_FAILURES: Final = 64  # that are passed on, on one line
_MOST_ENDED: Final = 500  # fit on one line, beside as many failures of the longest texts
_LONGEST_TEXT: Final = 500
_LONGEST_JSON: Final = 700


class FailureKind(Enum):
    """What has failed: a rank, a node that the others do not reach, or the run's folder."""

    RANK = "rank"
    NODE_LOST = "node-lost"
    FOLDER_LOST = "folder-lost"


@dataclass(frozen=True)
class Failure:
    """Why the job ends before its end.

    Attributes:
        what: the rank and its end, a line: ``node 1 (demo-1) rank 3: killed by SIGKILL (137, out of
            memory?)``.
        code: exit code of that node.
        at: time of day on that node.
    """

    node: int
    what: str
    code: int
    at: str
    kind: FailureKind = FailureKind.RANK

    def as_record(self) -> dict[str, Any]:
        """Return plain values for a message."""
        return asdict(self) | {"kind": self.kind.value}


class Peers:
    """State of one start, on a node that is alone; `LeadPeers` and `MemberPeers` pass it on.

    Attributes:
        failures: in the order in which node 0 received them, as many as are passed on.
        own_failure: the first of this node.
        stop: the request to stop, and its node; empty before.
        asked: the same for a request that only a rank received; the ranks agree on their stop by
            themselves.
        cut: the node that has lost its launcher; empty before. Its ranks stop, and with them all.
        killed: ranks get no more time for a checkpoint.
        ended: exit codes by node, for nodes without a running rank.
        is_cut_off: no other node is connected any more.
    """

    def __init__(self, node: int, hosts: Mapping[int, str], *, epoch: int = 0) -> None:
        self._node = node
        self._hosts = dict(hosts)
        self.epoch = epoch
        self._changed = asyncio.Event()
        self.failures: list[Failure] = []
        self.own_failure: Failure | None = None
        self.stop = ""
        self.asked = ""
        self.cut = ""
        self.killed = False
        self.is_cut_off = False
        self.ended: dict[int, int] = {}

    @property
    def all_ended(self) -> bool:
        """True if every node has reported its end, or is lost."""
        return len(self.ended) == len(self._hosts)

    @property
    def missing(self) -> list[str]:
        """Nodes that have not reported their end."""
        return [self.name(node) for node in self._hosts if node not in self.ended]

    def name(self, node: int) -> str:
        """Return ``node NUMBER (HOST)``."""
        host = self._hosts[node]
        if host:
            return f"node {node} ({host})"
        return f"node {node}"

    @property
    def own_name(self) -> str:
        """``node NUMBER (HOST)`` of this node."""
        return self.name(self._node)

    @property
    def any_stop(self) -> str:
        """The request to stop, of an agent or of a rank; empty before."""
        return self.stop or self.asked

    def send_failure(self, what: str, *, code: int, kind: FailureKind = FailureKind.RANK) -> None:
        """Report that this node has failed; the others end."""
        failure = Failure(self._node, what, code, time.strftime("%H:%M:%S"), kind)
        self.own_failure = self.own_failure or failure
        self.send("failure", what=what, code=code, at=failure.at, failure_kind=kind.value)

    def send(self, kind: str, **content: Any) -> None:
        """Report something to all nodes.

        Args:
            kind: ``stop`` with `why`; ``asked`` with `why`, if only a rank received the request;
                ``cut`` with `why`, if this node has lost its launcher; ``kill``: there is no time
                for a checkpoint; ``ended`` with `code`: no rank runs here any more; ``failure``,
                which `send_failure` sends.
            content: of the message.
        """
        self._apply(self._node, kind, content)

    async def wait(self, seconds: float) -> None:
        """Wait for news, for at most `seconds`."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    async def flush(self) -> None:
        """Send what waits to be passed on."""

    def _apply(self, node: int, kind: str, content: Message) -> bool:
        """Add a node's report to the state; returns whether it is news."""
        report = read_message(Report, content)
        why = (report.why or report.what)[:_LONGEST_TEXT]
        code = report.code
        is_news = False
        if kind == "stop" and not self.stop:
            self.stop = f"{why} at {self.name(node)}"
            is_news = True
        elif kind == "asked" and not self.asked:
            self.asked = f"{why} at {self.name(node)}"
            is_news = True
        elif kind == "cut" and not self.cut:
            self.cut = f"{why} at {self.name(node)}"
            is_news = True
        elif kind == "kill" and not self.killed:
            self.killed = True
            is_news = True
        elif kind == "failure":
            kind_of_failure = FailureKind(report.failure_kind)
            is_news = self._add_failure(Failure(node, why, code, report.at[:20], kind_of_failure))
        elif kind == "ended" and node not in self.ended:
            self.ended[node] = code
            is_news = True
        if is_news:
            self._changed.set()
        return is_news

    def _add_failure(self, failure: Failure) -> bool:
        """Add a failure, shortened; returns False if there is no room for it."""
        # A thousand nodes may only have lost another one, before the cause is reported: half of
        # the room is for causes.
        is_cause = failure.code != EXIT_PEER_LOST or failure.kind is FailureKind.NODE_LOST
        most = MOST_FAILURES if is_cause else MOST_FAILURES // 2
        if len(self.failures) >= most:
            return False
        what = failure.what
        while len(json.dumps(what)) > _LONGEST_JSON:
            what = what[: len(what) // 2]
        self.failures.append(replace(failure, what=what))
        return True

    def _apply_lost(self, node: int, how: ConnectionLost) -> None:
        """Add the loss of a node to the state, as its failure and its end."""
        what = f"{self.name(node)}: lost: {how}"[:_LONGEST_TEXT]
        now = time.strftime("%H:%M:%S")
        self._add_failure(Failure(node, what, EXIT_PEER_LOST, now, FailureKind.NODE_LOST))
        self._apply(node, "ended", {"code": EXIT_PEER_LOST})
        self._changed.set()


class LeadPeers(Peers):
    """State on node 0, which receives all reports and passes them on."""

    def __init__(
        self, hosts: Mapping[int, str], channels: Mapping[int, Channel], *, epoch: int
    ) -> None:
        super().__init__(0, hosts, epoch=epoch)
        self._channels = dict(channels)
        self._num_passed_on = 0  # failures
        self._ends: list[int] = []  # that have not been passed on
        self._gathering: asyncio.Task[None] | None = None

    def hear(self, node: int, message: Message) -> None:
        """Handle a node's message. Raises ConnectionLost for content that no node sends."""
        # A request to stop that came just before GO carries no number of a start.
        if node in self._hosts and message.get("epoch", self.epoch) == self.epoch:
            self._apply(node, message["type"], message)

    def lose(self, node: int, how: ConnectionLost) -> None:
        """Note that a node is gone; a node that has reported its end may be."""
        if self._channels.pop(node, None) is not None and node not in self.ended:
            self._apply_lost(node, how)
        self.is_cut_off = not self._channels

    def _apply(self, node: int, kind: str, content: Message) -> bool:
        is_news = super()._apply(node, kind, content)
        if is_news and kind == "ended":
            self._ends.append(node)
        if is_news and self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_task(self._gather())
        return is_news

    async def _gather(self) -> None:
        """Pass on what is new after `_GATHER_SECONDS`, or at once if all nodes have ended."""
        if not self.all_ended:
            await asyncio.sleep(_GATHER_SECONDS)
        self._gathering = None
        self._pass_on()

    def _pass_on(self) -> None:
        """Send what is new to all nodes, in several messages if many have ended."""
        failures = self.failures[self._num_passed_on :]
        self._num_passed_on = len(self.failures)
        content: dict[str, Any] = {"stop": self.stop, "asked": self.asked, "cut": self.cut}
        content["kill"] = self.killed
        content["failures"] = [failure.as_record() for failure in failures]
        is_more = True
        while is_more:
            nodes = self._ends[:_MOST_ENDED]
            self._ends = self._ends[_MOST_ENDED:]
            ended = {str(node): self.ended[node] for node in nodes}
            body = body_of("news", epoch=self.epoch, **content, ended=ended)
            for channel in list(self._channels.values()):
                with suppress(ConnectionLost):  # its receiving side finds it lost
                    channel.send_body(body)
            content = {}
            is_more = bool(self._ends)

    async def flush(self) -> None:
        """Pass on what was gathered, at once."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
            self._pass_on()


class MemberPeers(Peers):
    """State on another node, which reports to node 0 and receives its news."""

    def __init__(
        self, node: int, hosts: Mapping[int, str], channel: Channel, *, epoch: int
    ) -> None:
        super().__init__(node, hosts, epoch=epoch)
        self._channel = channel

    def send(self, kind: str, **content: Any) -> None:
        """Report to node 0, which passes it on to all nodes, this one included, in one order."""
        if self.is_cut_off:
            self._apply(self._node, kind, content)
            return
        with suppress(ConnectionLost):  # the receiving side finds it lost
            self._channel.send(kind, epoch=self.epoch, **content)

    def hear(self, message: Message) -> None:
        """Handle news of node 0. Raises ConnectionLost for content that no node 0 sends."""
        if message["type"] != "news" or message.get("epoch") != self.epoch:
            return
        news = read_message(News, message)
        self.stop = self.stop or news.stop[:_LONGEST_TEXT]
        self.asked = self.asked or news.asked[:_LONGEST_TEXT]
        self.cut = self.cut or news.cut[:_LONGEST_TEXT]
        self.killed = self.killed or news.kill
        self.failures += [self._failure(record) for record in news.failures[:MOST_FAILURES]]
        self.ended |= self._codes(news.ended)
        self._changed.set()

    def _codes(self, ended: Mapping[str, int]) -> dict[int, int]:
        """Return exit codes by node. Raises NoAgent if this start has no such node."""
        nodes = {str(node): node for node in self._hosts}
        codes = {}
        for name, code in ended.items():
            if name not in nodes:
                raise foreign()
            codes[nodes[name]] = code
        return codes

    def lose(self, how: ConnectionLost) -> None:
        """Note that node 0 is gone; it may be, once all nodes have ended."""
        if not self.is_cut_off:
            self.is_cut_off = True
            if not self.all_ended:
                self._apply_lost(0, how)
            self._changed.set()

    def _failure(self, record: FailureRecord) -> Failure:
        """Return a failure from its record. Raises NoAgent if this start has no such node."""
        if record.node not in self._hosts:
            raise foreign()
        what = record.what[:_LONGEST_TEXT]
        kind = FailureKind(record.kind)
        return Failure(record.node, what, record.code, record.at, kind)
