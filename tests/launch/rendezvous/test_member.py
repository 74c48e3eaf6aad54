"""Another node than node 0, with node 0's end in the hands of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from framework.errors import ConfigError, FrameworkError, PeerLostError, RunStopped
from framework.launch.rendezvous import member
from framework.launch.rendezvous.channel import Channel, ConnectionLost, proof
from framework.launch.rendezvous.member import Member
from framework.launch.rendezvous.session import Session, Start
from tests.launch.rendezvous.ends import TOKEN, hello, read, reset, run, session

pytestmark = pytest.mark.timing

GO = {"epoch": 1, "port": 29500, "words": ["a=1"], "nodes": [0, 1], "hosts": {"0": "a", "1": "b"}, "state": {}}


def end_of(
    node_0: Callable[[Channel, Member], Awaitable[None]], *, node_rank: int = 1, **terms: object
) -> tuple[Start | FrameworkError, Session]:
    """How a node's wait ends where whoever calls meets this; without a token every HELLO is welcome."""

    async def case() -> tuple[Start | FrameworkError, Session]:
        tasks = set()

        async def answer(channel: Channel) -> None:
            with suppress(ConnectionLost):
                channel.send("challenge", nonce="x", token=bool(own.token))
                nonces = ("x", (await read(channel, "hello"))["nonce"])
                channel.send("welcome", proof=proof(own.token, role="lead", nonces=nonces, content={}))
                channel.sign(own.token, is_lead=True, nonces=nonces)
                await node_0(channel, caller)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Channel(lambda channel: tasks.add(asyncio.ensure_future(answer(channel)))), "127.0.0.1", 0
        )
        own = session(
            node_rank, port=server.sockets[0].getsockname()[1] - 1, stated=hello(node_rank, host="b"), **terms
        )
        caller = Member(own)
        try:
            return await caller.begin(), own
        except FrameworkError as error:
            return error, own
        finally:
            await caller.close()
            server.close()

    return run(case())


@pytest.mark.parametrize("token", ["", TOKEN])
def test_go_names_ranks_port_and_settings_and_what_comes_behind_it_is_heard(token: str) -> None:
    """Node 0 may have much to say at once; what it says behind GO names who is to blame."""

    async def node_0(channel: Channel, caller: Member) -> None:
        failure = {"node": 0, "what": "node 0 rank 0: killed", "code": 137, "at": "x"}
        channel.send("go", **GO)
        channel.send("news", epoch=1, stop="SIGTERM at node 0 (a)", failures=[failure])

    start, _ = end_of(node_0, token=token)
    assert isinstance(start, Start)
    assert (start.topology.node_rank, start.topology.nnodes, start.topology.master_port) == (1, 2, 29500)
    assert start.words == ("a=1",)
    assert (start.peers.name(0), start.peers.own_name) == ("node 0 (a)", "node 1 (b)")


def test_ranks_follow_the_nodes_that_are_left() -> None:
    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send("go", **GO | {"nodes": [0, 3, 7], "port": 29600, "hosts": None})

    start, _ = end_of(node_0, node_rank=7, nnodes=5)
    assert isinstance(start, Start)
    assert (start.topology.node_rank, start.topology.nnodes, start.topology.master_port) == (2, 3, 29600)
    assert [start.peers.name(node) for node in (0, 7)] == ["node 0", "node 7 (b)"]  # others are known by number


def test_go_of_another_shape_is_not_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, object]] = [
        *({"nodes": [0]}, {"nodes": ["0", "1"]}, {"words": [1]}, {"port": "1"}, {"epoch": None}, {"state": []})
    ]
    sent = []

    async def node_0(channel: Channel, caller: Member) -> None:
        sent.append(changes[len(sent) % len(changes)])  # it calls again, until its deadline
        channel.send("go", **GO | sent[-1])

    monkeypatch.setattr(member, "_DIAL_AGAIN_SECONDS", 0.05)
    end, _ = end_of(node_0, deadline_seconds=1.0)
    assert isinstance(end, PeerLostError)
    assert "it does not speak this protocol" in str(end)
    assert len(sent) >= len(changes)


def test_a_refusal_is_heard_although_the_connection_behind_it_is_gone() -> None:
    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send("nogo", problems=[{"kind": "node-rank-duplicate", "reason": "two of them", "fix": "one"}])
        reset(channel)

    end, _ = end_of(node_0)
    assert isinstance(end, ConfigError)
    assert "two of them" in str(end)


def test_a_request_is_one_for_all_and_says_how_it_came() -> None:
    heard: list[object] = []

    async def node_0(channel: Channel, caller: Member) -> None:
        caller._session.requests.ask("SIGTERM")
        heard.append(await read(channel, "stop"))

    end, _ = end_of(node_0)
    assert isinstance(end, RunStopped)
    assert heard == [{"type": "stop", "why": "SIGTERM"}]


@pytest.mark.parametrize(("kind", "error"), [("stop", RunStopped), ("lost", PeerLostError)])
def test_node_0_ends_the_wait(kind: str, error: type[FrameworkError]) -> None:
    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send(kind, why="because")

    end, _ = end_of(node_0)
    assert isinstance(end, error)
    assert str(end) == "node 0: because"


def test_what_node_0_waits_for_is_said_here() -> None:
    said: list[str] = []

    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send("waiting", text="waiting for 1/3 nodes: node 2")
        await asyncio.sleep(0.2)
        said.append(caller._waiting_for())
        channel.send("stop", why="enough")

    _, own = end_of(node_0)
    assert said == [f"node 0: 127.0.0.1:{own.port} is waiting for 1/3 nodes: node 2"]


@pytest.mark.slow
@pytest.mark.parametrize(("stated", "code"), [(b"", None), (b"HTTP/1.1 400 Bad Request\r\n\r\n", 78)])
def test_only_what_speaks_another_language_is_another_program(
    monkeypatch: pytest.MonkeyPatch, stated: bytes, code: int | None
) -> None:
    """A node 0 that a thousand nodes call at once may be silent for a while, or have no place yet."""
    monkeypatch.setattr(member, "_NO_AGENT_SECONDS", 0.0)
    monkeypatch.setattr(member, "HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr(member, "_DIAL_AGAIN_SECONDS", 0.1)

    async def case() -> FrameworkError:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(stated)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1] - 1
        try:
            await Member(session(1, port=port, deadline_seconds=2.0 if code is None else 20.0)).begin()
        except FrameworkError as error:
            return error
        raise AssertionError("it began")

    end = run(case())
    assert isinstance(end, PeerLostError if code is None else ConfigError)
    assert code is None or end.exit_code == code
