"""Ends of channels in the hands of a test, and agents in its event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from framework.doctor.node.start import EMPTY_LOOK
from framework.errors import FrameworkError
from framework.hosts.topology import HostTopology
from framework.launch.rendezvous.channel import PROTOCOL, Channel, Message, proof
from framework.launch.rendezvous.coordinator import Coordinator
from framework.launch.rendezvous.join import join
from framework.launch.rendezvous.session import Session, Start
from framework.launch.stop_requests import StopRequests
from tests.ports import free_ports

TOKEN = "a token of sixteen bytes or more"
_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T], *, seconds: float = 60) -> _T:
    """Run a test's coroutine, within a time limit."""

    async def bounded() -> _T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


def hello(node_rank: int, *, nnodes: int = 2, **other: object) -> dict[str, Any]:
    """Return the HELLO of a node."""
    return {
        "protocol": PROTOCOL,
        "job": "",
        "node_rank": node_rank,
        "nnodes": nnodes,
        "spares": 0,
        "slots": 8,
        "master_port": 29500,
        "host": f"llama-train-{node_rank}",
        "machine": f"{node_rank}",
        "hosts": "",
        "clock": time.time(),
        "facts": {"code": "a", "config": "b"},
        **other,
    }


def looked(node_rank: int, *, port: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the HELLO of a node that has inspected itself and answers at a port."""
    look = {**EMPTY_LOOK, **changes}
    return hello(node_rank, look=look) | ({"echo": ["127.0.0.1", port]} if port else {})


def session(
    node_rank: int, *, nnodes: int = 2, port: int = 0, address: str = "127.0.0.1", **terms: Any
) -> Session:
    """Return one node's part in a job that no other process asks to stop."""
    spares, restarts = terms.pop("spares", 0), terms.pop("restarts", None)
    given = terms.pop("stated", None) or hello(node_rank, nnodes=nnodes, spares=spares)
    topology = HostTopology(nnodes, 8, node_rank, address, port or 29500)
    made = Session(topology, given, StopRequests(), (port or 29500) + 1, **terms)
    made.spares, made.restarts = spares, restarts
    return made


async def pair() -> tuple[Channel, Channel]:
    """Return the two ends of one connection."""
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    server = await asyncio.get_running_loop().create_server(
        lambda: Channel(accepted.set_result), "127.0.0.1", 0
    )
    near = await call(server.sockets[0].getsockname()[1])
    server.close()
    return near, await accepted


async def call(port: int) -> Channel:
    """Connect to a port."""
    _, channel = await asyncio.get_running_loop().create_connection(Channel, "127.0.0.1", port)
    return channel


async def read(channel: Channel, kind: str) -> Message:
    """Return the next message of a kind."""
    while (message := await channel.receive())["type"] != kind:
        pass
    return message


async def introduce(channel: Channel, stated: Mapping[str, Any], *, token: str = "") -> None:
    """Send HELLO, as a node does."""
    nonces = ((await read(channel, "challenge"))["nonce"], "n")
    signed = proof(token, role="node", nonces=nonces, content=dict(stated))
    channel.send("hello", hello=dict(stated), nonce="n", proof=signed)
    await read(channel, "welcome")
    channel.sign(token, is_lead=False, nonces=nonces)


@asynccontextmanager
async def coordinating(nnodes: int, **terms: Any) -> Any:
    """Yield node 0 that waits for others, its port, and the task of its start."""
    port = terms.pop("port", 0) or free_ports(2)
    lead = Coordinator(
        session(0, nnodes=nnodes, port=port, **terms), socket.create_server(("127.0.0.1", port + 1))
    )
    await lead.listen()
    beginning = asyncio.ensure_future(lead.begin())
    try:
        yield lead, port + 1, beginning
    finally:
        beginning.cancel()
        await lead.close()


async def meet(*sessions: Session) -> list[Start | FrameworkError]:
    """Return how each node begins; all leave then."""

    async def one(each: Session) -> Start | FrameworkError:
        try:
            job = await join(each)
            try:
                return await job.begin()
            finally:
                await job.close()
        except FrameworkError as error:
            return error

    return list(await asyncio.gather(*map(one, sessions)))


def reset(channel: Channel) -> None:
    """End a connection as the death of a machine's process does: what comes after is refused."""
    channel._transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
    )
    channel._transport.abort()


def kinds(problems: Sequence[Any]) -> list[str]:
    """Return the kinds of problems."""
    return [problem.kind for problem in problems]
