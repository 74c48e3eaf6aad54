"""Meeting of the agents before any rank starts: node 0 listens, the others call, and all are compared.

A wrong topology would otherwise be a silent hang of twice the timeout. Everything that differs is told at once, to
every node, and each ends with 78. Whatever else reaches the port can cost neither time nor memory: connections, lines
and handshakes are bounded, and a stranger is turned away alone.
"""

from __future__ import annotations

import time
from typing import Final

from framework.errors import ConfigError, Problem
from framework.launch.rendezvous.connectivity import PortInUse, listen_at, resolve
from framework.launch.rendezvous.coordinator import Coordinator
from framework.launch.rendezvous.member import Member
from framework.launch.rendezvous.messages import Peers
from framework.launch.rendezvous.session import DOUBT_SECONDS, Session, elsewhere_problem

_PORT_IN_USE_SECONDS: Final = 5.0


def meet(meeting: Session) -> Peers:
    """Wait for all nodes, and compare them.

    Raises:
        ConfigError: nodes disagree, or the port cannot be used.
        PeerLostError: not all came in time.
        RunStopped: somebody asked for that.
    """
    topology = meeting.topology
    if topology.nnodes == 1:
        return Peers(0, {}, {0: str(meeting.hello["host"])})
    try:
        return _coordinate_or_join(meeting) if topology.node_rank == 0 else Member(meeting).wait()
    finally:
        meeting.close()


def _coordinate_or_join(meeting: Session) -> Peers:
    """Node 0 listens as soon as master_addr is an address of this machine; until then it asks there who listens
    instead.
    """
    caller = Member(meeting)
    while True:
        try:
            # Who speaks with another node 0 hears it out: its last word lies there, perhaps, and its port is free
            # already.
            listener = None if caller.is_heard else listen_at(meeting.topology.master_addr, meeting.port)
            if listener is not None:
                caller.close()
                return Coordinator(meeting, listener).wait()
        except PortInUse as in_use:
            # Perhaps by another node 0, which will say so; not by an agent, if nobody has asked who we are by now.
            if not caller.is_heard and time.monotonic() - meeting.started_at > _PORT_IN_USE_SECONDS:
                raise ConfigError(
                    Problem(
                        kind="port-not-usable",
                        file="node 0",
                        key="--control_port",
                        value=meeting.port,
                        reason=f"agents cannot meet at {in_use}: another program listens there",
                        fix="give all nodes another --master_port or --control_port",
                    )
                ) from None
        peers = caller.step()
        if peers is not None:
            return peers
        if resolve(meeting.topology.master_addr) and time.monotonic() - meeting.started_at > DOUBT_SECONDS:
            raise ConfigError(elsewhere_problem(meeting))
