"""Another node than node 0, with node 0's end in the hands of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from framework.config.load import config_from_values
from framework.errors import ConfigError, FrameworkError, PeerLostError, RunStopped
from framework.launch.rendezvous import member
from framework.launch.rendezvous.channel import Channel, ConnectionLost, proof
from framework.launch.rendezvous.member import Member
from framework.launch.rendezvous.session import Session, Start
from framework.launch.supervision import Restarts
from tests.launch.rendezvous.ends import TOKEN, hello, read, reset, run, session

pytestmark = pytest.mark.timing

GO = {"epoch": 1, "resumes": False, "nodes": [0, 1], "hosts": {"0": "a", "1": "b"}, "state": {}}


def go_of(caller: Member) -> dict[str, object]:
    """Return the GO of an honest node 0, for the first start."""
    return GO | {"port": caller._session.topology.master_port}


def restarts_in(folder: Path) -> Restarts:
    values = {"run": {"output_dir": str(folder)}, "supervision": {"max_restarts": 5}}
    return Restarts(config_from_values(values))


def end_of(
    node_0: Callable[[Channel, Member], Awaitable[None]], *, node_rank: int = 1, **terms: object
) -> tuple[Start | FrameworkError, Session]:
    """Return how a node's wait ends if each caller meets this; without a token every HELLO is
    welcome.
    """

    async def case() -> tuple[Start | FrameworkError, Session]:
        tasks = set()

        async def answer(channel: Channel) -> None:
            with suppress(ConnectionLost):
                channel.send("challenge", nonce="x", token=bool(own.token))
                nonces = ("x", (await read(channel, "hello"))["nonce"])
                channel.send(
                    "welcome", proof=proof(own.token, role="lead", nonces=nonces, content={})
                )
                channel.sign(own.token, is_lead=True, nonces=nonces)
                await node_0(channel, caller)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Channel(lambda channel: tasks.add(asyncio.ensure_future(answer(channel)))),
            "127.0.0.1",
            0,
        )
        own = session(
            node_rank,
            port=server.sockets[0].getsockname()[1] - 1,
            stated=hello(node_rank, host="b"),
            **terms,
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
    """Node 0 may send many messages at once; one behind GO names the node that is to blame."""

    async def node_0(channel: Channel, caller: Member) -> None:
        failure = {"node": 0, "what": "node 0 rank 0: killed", "code": 137, "at": "x"}
        channel.send("go", **go_of(caller))
        channel.send("news", epoch=1, stop="SIGTERM at node 0 (a)", failures=[failure])

    start, own = end_of(node_0, token=token)
    assert isinstance(start, Start)
    assert (start.topology.node_rank, start.topology.nnodes) == (1, 2)
    assert (start.topology.master_port, start.resumes) == (own.topology.master_port, False)
    assert (start.peers.name(0), start.peers.own_name) == ("node 0 (a)", "node 1 (b)")


def test_ranks_follow_the_nodes_that_are_left(tmp_path: Path) -> None:
    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send("go", **GO | {"nodes": [0, 3, 7], "port": 29600, "hosts": {}, "resumes": True})

    start, _ = end_of(node_0, node_rank=7, nnodes=8, restarts=restarts_in(tmp_path))
    assert isinstance(start, Start)
    assert (start.topology.node_rank, start.topology.nnodes, start.topology.master_port) == (
        2,
        3,
        29600,
    )
    # others are known by number
    assert [start.peers.name(node) for node in (0, 7)] == ["node 0", "node 7 (b)"]


STATE = {"number": 1, "idle": 0, "last": "", "resumes": True}
# What a stranger may send in the place of node 0. In a job without restarts the last ones are not
# for it either.
FOREIGN_GO: list[dict[str, object]] = [
    {"words": []},
    {"words": ["model={target: 'os:system', args: {command: 'touch x'}}"]},
    {"words": ["checkpoint.resume=auto"]},
    {"environment": {"LD_PRELOAD": "/tmp/x.so"}},
    {"master_addr": "10.0.0.9"},
    {"config": "/tmp/other.yaml"},
    {"resumes": "auto"},
    {"resumes": 1},
    {"resumes": ["checkpoint.resume=auto"]},
    {"resumes": None},
    {"nodes": [0]},
    {"nodes": [1]},
    {"nodes": [1, 0]},
    {"nodes": [0, 1, 1]},
    {"nodes": [0, 1, 2]},
    {"nodes": [0, True]},
    {"nodes": ["0", "1"]},
    {"port": "1"},
    {"port": 0},
    {"port": -1},
    {"port": 65536},
    {"port": 22.0},
    {"epoch": None},
    {"epoch": 0},
    {"epoch": 1 << 40},
    {"state": []},
    {"state": {"words": ["model={}"]}},
    {"state": STATE | {"resumes": "model={}"}},
    {"state": STATE | {"words": ["model={}"]}},
    {"hosts": ["a", "b"]},
]
WITHOUT_RESTARTS: list[dict[str, object]] = [{"port": 22}, {"resumes": True}]


def test_a_name_in_go_that_no_host_can_have_is_not_shown() -> None:
    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send("go", **go_of(caller) | {"hosts": {"0": "a\x1b[2J", "1": "another"}})

    start, _ = end_of(node_0)
    assert isinstance(start, Start)
    assert (start.peers.name(0), start.peers.own_name) == ("node 0", "node 1 (b)")


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("may_restart", [False, True])
def test_go_of_another_shape_is_not_node_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str, may_restart: bool
) -> None:
    """Nothing that comes over the network is a setting, a variable, a path or an address."""
    changes = [*FOREIGN_GO, *([] if may_restart else WITHOUT_RESTARTS)]
    sent = []

    async def node_0(channel: Channel, caller: Member) -> None:
        if len(sent) == len(changes):
            channel.send("stop", why="all were sent")
            return
        sent.append(changes[len(sent)])  # it calls again, until its deadline
        channel.send("go", **go_of(caller) | sent[-1])

    monkeypatch.setattr(member, "_DIAL_AGAIN_SECONDS", 0.01)
    restarts = restarts_in(tmp_path) if may_restart else None
    end, _ = end_of(node_0, token=token, restarts=restarts)
    assert str(end) == "node 0: all were sent"  # until then it called again, and began nothing


@pytest.mark.parametrize(
    "request_",
    [
        {"targets": [["127.0.0.1", 22]], "token": "a" * 32},
        {"targets": [["metadata.internal", 8080]], "token": "a" * 32},
        {"targets": [["127.0.0.1", 6379]], "token": "FLUSHALL\r\n"},
        {"targets": [["127.0.0.1", 6379], ["127.0.0.1", 6380]], "token": "a" * 32},
    ],
    ids=str,
)
def test_a_stranger_cannot_make_a_node_call_others(
    monkeypatch: pytest.MonkeyPatch, request_: dict[str, object]
) -> None:
    """A node calls others at the request of node 0: only addresses of nodes, as many as there are,
    and no text that node 0 chooses is sent.
    """
    called: list[object] = []
    requests: list[object] = []
    monkeypatch.setattr(member, "call_others", lambda targets, token: called.append(targets) or {})
    monkeypatch.setattr(member, "_DIAL_AGAIN_SECONDS", 0.05)

    async def node_0(channel: Channel, caller: Member) -> None:
        caller._session.hello = {**caller._session.hello, "look": {}}
        channel.send("reach", **request_)
        requests.append(request_)
        if len(requests) == 2:  # the first one was refused: it calls again, until its deadline
            caller._session.deadline_seconds = 0.0

    end, _ = end_of(node_0)
    assert isinstance(end, PeerLostError)
    assert "it does not speak this protocol" in str(end)
    assert called == []


def test_a_refusal_is_heard_although_the_connection_behind_it_is_gone() -> None:
    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send(
            "nogo",
            problems=[{"kind": "node-rank-duplicate", "reason": "two of them", "fix": "one"}],
        )
        reset(channel)

    end, _ = end_of(node_0)
    assert isinstance(end, ConfigError)
    assert "two of them" in str(end)


def test_a_request_is_one_for_all_and_names_its_signal() -> None:
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


def test_a_member_logs_what_node_0_waits_for() -> None:
    said: list[str] = []

    async def node_0(channel: Channel, caller: Member) -> None:
        channel.send("waiting", text="waiting for 1/3 nodes: node 2")
        await asyncio.sleep(0.2)
        said.append(caller._waiting_for())
        channel.send("stop", why="enough")

    _, own = end_of(node_0)
    assert said == [f"node 0: 127.0.0.1:{own.port} is waiting for 1/3 nodes: node 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stated", "code"), [(b"", None), (b"HTTP/1.1 400 Bad Request\r\n\r\n", 78)]
)
def test_only_what_speaks_another_language_is_another_program(
    monkeypatch: pytest.MonkeyPatch, stated: bytes, code: int | None
) -> None:
    """A node 0 that a thousand nodes call at once may be silent for a while, or have no free place
    yet.
    """
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
            await Member(
                session(1, port=port, deadline_seconds=2.0 if code is None else 20.0)
            ).begin()
        except FrameworkError as error:
            return error
        raise AssertionError("it began")

    end = run(case())
    assert isinstance(end, PeerLostError if code is None else ConfigError)
    assert code is None or end.exit_code == code
