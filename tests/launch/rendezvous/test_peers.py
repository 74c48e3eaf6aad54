"""State of a start as all nodes know it: only changes travel, and a state that no agent sends is
not believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from framework.launch.rendezvous.channel import Channel, ConnectionLost, Message
from framework.launch.rendezvous.peers import MOST_FAILURES, LeadPeers, MemberPeers, Peers
from tests.launch.rendezvous.ends import pair, run

HOSTS = {0: "a", 1: "b", 2: "c"}


class Net:
    """Node 0 and its others, joined by real connections, as coordinator and members join them."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.hosts = hosts
        self.members: dict[int, MemberPeers] = {}
        self.far: dict[int, Channel] = {}
        self.heard: list[Message] = []  # by node 0
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> LeadPeers:
        near: dict[int, Channel] = {}
        for node in self.hosts:
            if node:
                near[node], self.far[node] = await pair()
                self.members[node] = MemberPeers(node, self.hosts, self.far[node], epoch=1)
        self.lead = LeadPeers(self.hosts, near, epoch=1)
        for node, channel in near.items():
            self.tasks += map(
                asyncio.ensure_future, (self._lead_hears(node, channel), self._member_hears(node))
            )
        return self.lead

    async def _lead_hears(self, node: int, channel: Channel) -> None:
        try:
            while True:
                self.heard.append(await channel.receive())
                self.lead.hear(node, self.heard[-1])
        except ConnectionLost as lost:
            self.lead.lose(node, lost)

    async def _member_hears(self, node: int) -> None:
        with suppress(ConnectionLost):
            while True:
                self.members[node].hear(await self.far[node].receive())


async def until(ready: Any) -> None:
    while not ready():
        await asyncio.sleep(0.01)


def test_what_a_thousand_send_at_once_is_passed_on_once() -> None:
    """Relayed one by one, the changes took a million messages, and half a minute without any other
    message.
    """

    async def case() -> None:
        net = Net({node: f"h{node}" for node in range(101)})
        lead = await net.open()
        received = dict.fromkeys(net.members, 0)
        for node, member in net.members.items():
            member.send("stop", why="SIGTERM")
            member.send_failure(f"node {node}: storage failed", code=74)

            def count(message: Message, *, node: int = node, hear: Any = member.hear) -> None:
                received[node] += 1
                hear(message)

            member.hear = count  # type: ignore[method-assign]
        await until(
            lambda: all(len(member.failures) == MOST_FAILURES for member in net.members.values())
        )
        assert len(net.heard) == 200
        assert max(received.values()) < 10
        assert {member.stop for member in net.members.values()} == {lead.stop}
        first = [failure.what for failure in lead.failures]
        assert all(
            [each.what for each in member.failures] == first for member in net.members.values()
        )
        assert all(member.own_failure is not None for member in net.members.values())

    run(case())


def test_a_failure_of_its_own_is_kept_among_many_that_lost_a_peer() -> None:
    """A host that loses its power is found lost after all others have missed it; and every message
    fits on a line.
    """

    async def case() -> None:
        net = Net({node: f"h{node}" for node in range(101)})
        lead = await net.open()
        for node in range(1, 100):
            net.members[node].send_failure(
                f"node {node} rank {node}: ended with 76 (é{'é' * 490})", code=76
            )
        await until(lambda: len(net.heard) == 99)
        net.far[100].close()
        await until(lambda: any("lost: " in each.what for each in net.members[1].failures))
        assert len(lead.failures) < MOST_FAILURES
        assert not net.members[1].is_cut_off

    run(case())


def test_ends_reach_all_and_ranks_that_are_left_are_named() -> None:
    async def case() -> None:
        net = Net(HOSTS)
        lead = await net.open()
        net.members[1].send("ended", code=75)
        lead.send("ended", code=0)
        await until(lambda: net.members[2].ended == {0: 0, 1: 75})
        assert net.members[2].missing == ["node 2 (c)"]
        net.members[2].send("ended", code=0)
        await until(lambda: all(peers.all_ended for peers in (lead, *net.members.values())))
        net.far[1].close()  # a node may leave after its last message
        await asyncio.sleep(0.1)
        assert lead.failures == []

    run(case())


def test_a_request_to_one_rank_is_known_to_all_and_stops_no_other() -> None:
    async def case() -> None:
        net = Net(HOSTS)
        lead = await net.open()
        net.members[1].send("asked", why="SIGTERM to rank 3")
        await until(lambda: net.members[1].asked and net.members[2].asked)
        everybody = (lead, *net.members.values())
        assert {peers.any_stop for peers in everybody} == {"SIGTERM to rank 3 at node 1 (b)"}
        assert {peers.stop for peers in everybody} == {""}

    run(case())


def test_a_lost_node_is_a_failure_and_its_last_message_comes_first() -> None:
    async def case() -> None:
        net = Net(HOSTS)
        lead = await net.open()
        net.members[1].send_failure("node 1 rank 1: out of memory", code=137)
        net.far[1].close()
        await until(lambda: len(net.members[2].failures) == 2)
        first, second = net.members[2].failures
        assert (first.what, first.code) == ("node 1 rank 1: out of memory", 137)
        assert (second.what, second.code) == ("node 1 (b): lost: the connection was closed", 76)
        assert lead.ended == {1: 76}

    run(case())


def test_messages_of_another_start_are_none_of_this_one() -> None:
    async def case() -> None:
        net = Net(HOSTS)
        lead = await net.open()
        net.members[1].epoch = 0
        net.members[1].send_failure("late", code=70)
        net.members[2].send("stop", why="SIGTERM")
        await until(lambda: net.members[2].stop)
        assert (lead.failures, net.members[1].stop) == ([], "")
        # a node that received a stop request before GO knows of no start
        net.far[1].send("stop", why="SIGINT")
        net.far[1].send("kill")
        await until(lambda: net.members[2].killed)

    run(case())


@pytest.mark.parametrize(
    "content", [{"what": 1, "code": 1}, {"what": "x", "code": "1"}, {"what": "x", "code": True}]
)
def test_a_node_that_sends_what_no_agent_sends_is_lost(content: dict[str, object]) -> None:
    async def case() -> None:
        net = Net(HOSTS)
        lead = await net.open()
        net.far[1].send("failure", **content)
        await until(lambda: lead.failures)
        assert [failure.what for failure in lead.failures] == [
            "node 1 (b): lost: it does not speak this protocol"
        ]

    run(case())


FAILURE = {"node": 0, "what": "x", "code": 1, "at": "t", "kind": "rank"}


@pytest.mark.parametrize(
    "content",
    [
        *(
            {"ended": ended}
            for ended in ([], {"7": 0}, {"0": "0"}, {"0": True}, {"1" * 5000: 0}, None)
        ),
        *(
            {"failures": failures}
            for failures in (
                {},
                [1],
                [{}],
                [{**FAILURE, "node": []}],
                [{**FAILURE, "code": "1"}],
                [{**FAILURE, "kind": "other"}],
            )
        ),
    ],
    ids=str,
)
def test_news_of_another_shape_is_not_node_0(content: dict[str, object]) -> None:
    async def case() -> None:
        _, far = await pair()
        with pytest.raises(ConnectionLost, match="does not speak"):
            MemberPeers(1, HOSTS, far, epoch=1).hear({"type": "news", "epoch": 1, **content})

    run(case())


def test_a_member_that_lost_node_0_decides_alone() -> None:
    async def case() -> None:
        _, far = await pair()
        peers = MemberPeers(1, HOSTS, far, epoch=1)
        peers.lose(ConnectionLost("silent for 15 s"))
        peers.lose(ConnectionLost("again"))
        assert [failure.what for failure in peers.failures] == ["node 0 (a): lost: silent for 15 s"]
        peers.send("stop", why="SIGTERM")
        peers.send("ended", code=0)
        assert (peers.stop, peers.ended) == ("SIGTERM at node 1 (b)", {0: 76, 1: 0})

    run(case())


def test_a_node_without_a_name_has_its_number() -> None:
    assert Peers(1, {0: "", 1: "b"}).name(0) == "node 0"


def test_news_of_the_longest_texts_and_thousands_of_ends_fit_on_lines() -> None:
    hosts = {node: f"host-{node}" for node in range(4000)}

    async def check() -> None:
        near, far = await pair()
        lead, member = LeadPeers(hosts, {1: near}, epoch=1), MemberPeers(1, hosts, far, epoch=1)
        for node in range(2, 2 + MOST_FAILURES):
            lead.hear(node, {"type": "failure", "what": "é" * 116, "code": 137, "at": "12:00:00"})
        lead.hear(2, {"type": "stop", "why": "é" * 500})
        for node in range(2, 4000):
            lead.hear(node, {"type": "ended", "code": 137})
        while len(member.ended) < 3998:
            member.hear(await far.receive())
        assert len(member.failures) == MOST_FAILURES

    run(check())
