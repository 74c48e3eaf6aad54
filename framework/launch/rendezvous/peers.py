"""State of one start of the job, as every node knows it: who failed, who asked for a stop, who has
ended.

Node 0 hears each node, and passes on what is news, gathered for a moment: what a thousand nodes say
at once is a thousand messages in and a thousand out, and no million. All see one order, and decide
alike. Every message carries the number of its start (`epoch`): a late word of the last one ends
nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from framework.errors import EXIT_PEER_LOST
from framework.launch.rendezvous.channel import Channel, ConnectionLost, Message, body_of, foreign

_GATHER_SECONDS: Final = 0.05
MOST_FAILURES: Final = 64  # that are passed on, on one line
_MOST_ENDED: Final = 500  # fit on one line, beside as many failures of the longest texts
_LONGEST_TEXT: Final = 500
_LONGEST_JSON: Final = 700


@dataclass(frozen=True)
class Failure:
    """Why the job ends before its end.

    Attributes:
        what: who and how, a line: ``node 1 (demo-1) rank 3: killed by SIGKILL (137, out of
            memory?)``.
        code: exit code of that node.
        at: time of day there.
    """

    node: int
    what: str
    code: int
    at: str


class Peers:
    """State of one start, on a node that is alone; `LeadPeers` and `MemberPeers` pass it on.

    Attributes:
        failures: in the order in which node 0 heard of them, as many as are passed on.
        own_failure: the first of this node.
        stop: who asked for a stop, and how; empty before.
        asked: the same of a stop that only a rank was asked for, and which the ranks agree on by
            themselves.
        killed: no time for a checkpoint any more.
        ended: exit code of every node whose ranks have ended.
        is_cut_off: nobody is left to hear from.
    """

    def __init__(self, node: int, hosts: Mapping[int, str], *, epoch: int = 0) -> None:
        self._node = node
        self._hosts = dict(hosts)
        self.epoch = epoch
        self._changed = asyncio.Event()
        self.failures: list[Failure] = []
        self.own_failure: Failure | None = None
        self.stop = self.asked = ""
        self.killed = self.is_cut_off = False
        self.ended: dict[int, int] = {}

    @property
    def all_ended(self) -> bool:
        """Every node has said how it ended, or is lost."""
        return len(self.ended) == len(self._hosts)

    @property
    def missing(self) -> list[str]:
        """Nodes that have not said how they ended."""
        return [self.name(node) for node in self._hosts if node not in self.ended]

    def name(self, node: int) -> str:
        """As people know it."""
        host = self._hosts[node]
        if host:
            return f"node {node} ({host})"
        return f"node {node}"

    @property
    def own_name(self) -> str:
        """This node, as people know it."""
        return self.name(self._node)

    @property
    def any_stop(self) -> str:
        """Who asked for a stop, wherever that was."""
        return self.stop or self.asked

    def send_failure(self, what: str, *, code: int) -> None:
        """Report that this node has failed; the others end."""
        failure = Failure(self._node, what, code, time.strftime("%H:%M:%S"))
        self.own_failure = self.own_failure or failure
        self.send("failure", what=what, code=code, at=failure.at)

    def send(self, kind: str, **content: Any) -> None:
        """Report to all nodes: ``stop`` with `why`; ``asked``: a rank was, alone; ``kill``: there
        is no time for a checkpoint; ``ended`` with `code`: no rank runs here any more.
        """
        self._apply(self._node, kind, content)

    async def wait(self, seconds: float) -> None:
        """Wait for news, for at most so long."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    async def flush(self) -> None:
        """Wait until what is to be passed on is on its way."""

    def _apply(self, node: int, kind: str, content: Message) -> bool:
        """Take what a node reports; returns whether it is news."""
        why = content.get("why", content.get("what", ""))
        code = content.get("code", 0)
        if not isinstance(why, str) or type(code) is not int:
            raise foreign()
        why = why[:_LONGEST_TEXT]
        is_news = False
        if kind == "stop" and not self.stop:
            self.stop = f"{why} at {self.name(node)}"
            is_news = True
        elif kind == "asked" and not self.asked:
            self.asked = f"{why} at {self.name(node)}"
            is_news = True
        elif kind == "kill" and not self.killed:
            self.killed = is_news = True
        elif kind == "failure":
            # Of those that only lost somebody there may be a thousand; who was lost, and what
            # failed by itself, comes late, perhaps.
            is_cause = code != EXIT_PEER_LOST or ": lost: " in why
            is_news = len(self.failures) < (MOST_FAILURES if is_cause else MOST_FAILURES // 2)
            while len(json.dumps(why)) > _LONGEST_JSON:
                why = why[: len(why) // 2]
            if is_news:
                self.failures.append(Failure(node, why, code, str(content.get("at", ""))[:20]))
        elif kind == "ended" and node not in self.ended:
            self.ended[node], is_news = code, True
        if is_news:
            self._changed.set()
        return is_news

    def _apply_lost(self, node: int, how: ConnectionLost) -> None:
        what = f"{self.name(node)}: lost: {how}"
        self._apply(
            node, "failure", {"what": what, "code": EXIT_PEER_LOST, "at": time.strftime("%H:%M:%S")}
        )
        self._apply(node, "ended", {"code": EXIT_PEER_LOST})
        self._changed.set()


class LeadPeers(Peers):
    """On node 0: hears all, and passes on."""

    def __init__(
        self, hosts: Mapping[int, str], channels: Mapping[int, Channel], *, epoch: int
    ) -> None:
        super().__init__(0, hosts, epoch=epoch)
        self._channels = dict(channels)
        self._num_passed_on = 0  # failures
        self._ends: list[int] = []  # that have not been passed on
        self._gathering: asyncio.Task[None] | None = None

    def hear(self, node: int, message: Message) -> None:
        """Take a message of a node; ConnectionLost where it is one that none of us sends."""
        # One that was asked to stop just before it heard GO does not know of this start.
        if node in self._hosts and message.get("epoch", self.epoch) == self.epoch:
            self._apply(node, message["type"], message)

    def lose(self, node: int, how: ConnectionLost) -> None:
        """Note that a node is gone: one that has said its last word may be."""
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
        if not self.all_ended:
            await asyncio.sleep(_GATHER_SECONDS)
        self._gathering = None
        self._pass_on()

    def _pass_on(self) -> None:
        failures, self._num_passed_on = self.failures[self._num_passed_on :], len(self.failures)
        content: dict[str, Any] = {"stop": self.stop, "asked": self.asked, "kill": self.killed}
        content |= {"failures": [*map(asdict, failures)]}
        is_more = True
        while is_more:
            nodes = self._ends[:_MOST_ENDED]
            self._ends = self._ends[_MOST_ENDED:]
            ended = {str(node): self.ended[node] for node in nodes}
            body = body_of("news", epoch=self.epoch, **content, ended=ended)
            for channel in list(self._channels.values()):
                with suppress(ConnectionLost):  # it is found lost where it is heard
                    channel.send_body(body)
            content = {}
            is_more = bool(self._ends)

    async def flush(self) -> None:
        """Pass on what was gathered."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
            self._pass_on()


class MemberPeers(Peers):
    """On another node: reports to node 0, and hears from it."""

    def __init__(
        self, node: int, hosts: Mapping[int, str], channel: Channel, *, epoch: int
    ) -> None:
        super().__init__(node, hosts, epoch=epoch)
        self._channel = channel

    def send(self, kind: str, **content: Any) -> None:
        """Report to node 0, which passes it on to everybody, this node included: all see one
        order.
        """
        if self.is_cut_off:
            self._apply(self._node, kind, content)
            return
        with suppress(ConnectionLost):  # found lost where it is heard
            self._channel.send(kind, epoch=self.epoch, **content)

    def hear(self, message: Message) -> None:
        """Take news; ConnectionLost where they are none that node 0 sends."""
        if message["type"] != "news" or message.get("epoch") != self.epoch:
            return
        failures = message.get("failures", [])
        ended = message.get("ended", {})
        if not isinstance(failures, list) or not isinstance(ended, dict):
            raise foreign()
        if message.get("stop"):
            self.stop = self.stop or str(message["stop"])[:_LONGEST_TEXT]
        if message.get("asked"):
            self.asked = self.asked or str(message["asked"])[:_LONGEST_TEXT]
        self.killed = self.killed or bool(message.get("kill"))
        self.failures += [self._failure(each) for each in failures[:MOST_FAILURES]]
        nodes = {str(node): node for node in self._hosts}
        if not nodes.keys() >= ended.keys() or {*map(type, ended.values())} - {int}:
            raise foreign()
        self.ended |= {nodes[node]: code for node, code in ended.items()}
        self._changed.set()

    def lose(self, how: ConnectionLost) -> None:
        """Note that node 0 is gone: it may be, as soon as it has told everybody everything."""
        if not self.is_cut_off:
            self.is_cut_off = True
            if not self.all_ended:
                self._apply_lost(0, how)
            self._changed.set()

    def _failure(self, reported: object) -> Failure:
        match reported:
            case {"node": int(node), "what": str(what), "code": int(code), "at": str(at), **more}:
                # True is an int as well
                if {type(node), type(code)} == {int} and node in self._hosts and not more:
                    return Failure(node, what[:_LONGEST_TEXT], code, at)
        raise foreign()
