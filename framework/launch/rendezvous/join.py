"""Entry point of the rendezvous: before any rank starts, node 0 listens, the others call, and all
are compared.

A wrong topology would otherwise be a silent hang of twice the timeout. All differences are reported
at once, to every node, and each node ends with 78.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from framework.launch.rendezvous.coordinator import Coordinator, free_again
from framework.launch.rendezvous.member import Member, find_listener
from framework.launch.rendezvous.peers import Peers
from framework.launch.rendezvous.session import RestartDecision, Session, Start
from framework.launch.supervision import JobEnd


class SingleNode:
    """A job of one node, which meets no other."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0
        self._peers = Peers(0, {0: str(session.hello["host"])})

    async def begin(self) -> Start:
        """Begin at once; raises RunStopped on request."""
        self._session.requests.refuse_start()
        self._number += 1
        self._peers = Peers(0, {0: str(self._session.hello["host"])}, epoch=self._number)
        topology = self._session.topology
        if self._number > 1:
            topology = replace(topology, master_port=free_again(topology.master_port))
        await self._session.begin_start()
        return Start(self._peers, topology, self._session.resumes)

    async def decide_restart(self, end: JobEnd) -> RestartDecision:
        """Decide about another start, and wait before it; raises RunStopped on request."""
        again = await self._session.decide(end, self._peers)
        if again is not None:
            await self._session.pause(again.seconds, self._peers)
        return self._session.decision(again)

    async def close(self) -> None:
        """Do nothing: there is no connection."""


Job: TypeAlias = SingleNode | Coordinator | Member
"""A node's side of a job, for its whole life."""


async def join(session: Session) -> Job:
    """Listen as node 0, or call it.

    Raises:
        ConfigError: the port or the address cannot be used.
        RunStopped: on request.
    """
    if session.num_nodes == 1:
        return SingleNode(session)
    if session.topology.node_rank:
        return Member(session)
    coordinator = Coordinator(session, await find_listener(session))
    await coordinator.listen()
    return coordinator
