"""Agents meet: a wrong topology is refused on every node with the name, and strangers on the port
cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from framework.errors import ConfigError, PeerLostError
from framework.launch.rendezvous import member
from framework.launch.rendezvous.channel import Channel, NoAgent
from framework.launch.rendezvous.connectivity import peer_name
from framework.launch.rendezvous.handshake import disagreements
from framework.launch.rendezvous.join import join
from framework.launch.rendezvous.messages import Hello, read_message
from framework.launch.rendezvous.session import Session, Start
from tests.launch.rendezvous.ends import TOKEN, hello, looked, meet, read, reset, run, session
from tests.launch.rendezvous.members import Members, ended
from tests.ports import free_ports

pytestmark = pytest.mark.timing

HELLO = hello(0, slots=1, host="a", machine="", clock=1.0, facts={"torch": "2.15"})


def refused(members: Members, *, kinds: tuple[str, ...]) -> list[str]:
    """Return the output of the agents; all ended with 78 in seconds and named every problem."""
    ends = [ended(process) for process in members.processes]
    assert [code for code, _ in ends] == [78] * len(ends), ends
    assert time.monotonic() - members.started_at < 50  # the deadline is a minute
    for _, stated in ends:
        assert {f"[{kind}]" for kind in kinds} <= {
            line.split()[-1] for line in stated.splitlines()
        }, stated
    return [stated for _, stated in ends]


@pytest.mark.slow
def test_all_differences_are_reported_at_once_on_every_node(members: Members) -> None:
    members.start(0, facts={"torch": "2.15", "config": "aa"})
    members.start(1, facts={"torch": "2.14", "config": "bb"}, slots=2)
    for stated in refused(members, kinds=("nodes-differ",)):
        for key, values in {
            "torch": '"2.14": .* has 2.15',
            "config": "bb: .* has aa",
            "slots": "2: .* has 1",
        }.items():
            assert re.search(rf"node 1 \(.*\): {key} = {values}", stated)
    assert not list(members.folder.glob("*.json"))


@pytest.mark.slow
def test_nodes_that_think_of_different_numbers_of_nodes(members: Members) -> None:
    members.start(0)
    members.start(1, nnodes=3)
    for stated in refused(members, kinds=("nodes-differ",)):
        assert re.search(r"node 1 \(.*\): nnodes = 3: node 0 \(.*\) has 2", stated)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1)])
def test_a_rank_that_is_there_twice_is_refused(members: Members, ranks: tuple[int, ...]) -> None:
    members.nnodes = len(ranks)
    for rank in ranks:
        members.start(rank)
    for stated in refused(members, kinds=("node-rank-duplicate",)):
        missing = set(range(len(ranks))) - set(ranks)
        assert f"2 nodes have the same rank, and rank {missing.pop()} is missing" in stated


def own_address() -> str:
    """Return an address of this machine that is no loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation addresses; nothing is sent
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address: str = probe.getsockname()[0]
        return address


@pytest.mark.slow
def test_missing_nodes_are_reported_and_the_wait_ends(members: Members) -> None:
    code, stated = ended(members.start(0, terms={"deadline_seconds": 6}))
    assert code == 76
    assert stated.count("waiting for 1/2 nodes: node 1") == 2  # after some seconds, and at the end
    assert "[rendezvous-timeout]" in stated


@pytest.mark.slow
def test_a_wait_for_node_0_names_the_reason(members: Members) -> None:
    code, stated = ended(
        members.start(1, master_addr="no-such-host.invalid", terms={"deadline_seconds": 4})
    )
    assert code == 76
    # A name server may be silent for longer than this.
    assert re.search(
        rf"waiting for node 0: no-such-host\.invalid:{members.port + 1} \((no DNS record|no answer yet)\)",
        stated,
    )


@pytest.mark.slow
def test_a_request_before_any_rank_ends_every_node(members: Members) -> None:
    members.nnodes = 3  # the third never comes
    processes = [members.start(rank) for rank in (0, 1)]
    assert processes[0].stderr is not None
    # once node 1 is there
    assert any("waiting for 1/3 nodes: node 2" in line for line in processes[0].stderr)
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        code, stated = ended(process)
        assert code == 75
        assert "[stopped-early]" in stated


# -------------------------------------------------------------------------------- tokens, strangers


@pytest.mark.slow
def test_a_shared_token_lets_nodes_in_in_any_order(members: Members) -> None:
    members.start(1, "exit=0", terms={"token": TOKEN})
    time.sleep(1.5)
    members.start(0, "exit=0", terms={"token": TOKEN})
    for process in members.processes:
        code, stated = ended(process)
        assert code == 0
        assert TOKEN not in stated


@pytest.mark.slow
def test_a_wrong_token_is_turned_away_alone(members: Members) -> None:
    lead = members.start(0, "exit=0", terms={"token": TOKEN})
    stranger = members.start(1, "exit=0", terms={"token": "another token of sixteen bytes"})
    code, stated = ended(stranger)
    assert code == 78
    assert "[token-refused]" in stated
    assert lead.poll() is None
    members.start(1, "exit=0", terms={"token": TOKEN})
    assert ended(lead)[0] == 0


@pytest.mark.slow
def test_another_job_is_turned_away_alone(members: Members) -> None:
    lead = members.start(0, "exit=0", terms={"job_id": "mine"})
    code, stated = ended(members.start(1, "exit=0", terms={"job_id": "other"}))
    assert code == 78
    assert "another job listens here" in stated
    members.start(1, "exit=0", terms={"job_id": "mine"})
    assert ended(lead)[0] == 0


@pytest.fixture
def rejections(members: Members) -> Iterator[list[socket.socket]]:
    """Yield connections to node 0, which is up."""
    members.start(0, "exit=0")
    connections: list[socket.socket] = []
    deadline = time.monotonic() + 50
    while len(connections) < 6:
        try:
            connections.append(
                socket.create_connection(("127.0.0.1", members.port + 1), timeout=20)
            )
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield connections
    for connection in connections:
        connection.close()


@pytest.mark.slow
def test_strangers_do_not_keep_nodes_from_meeting(
    members: Members, rejections: list[socket.socket]
) -> None:
    garbage, endless, nested, liar, slow, gone = rejections
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
    nested.sendall(b"[" * 60_000 + b"\n")
    liar.sendall(
        json.dumps({"type": "hello", "hello": {**HELLO, "node_rank": "0"}, "nonce": "n"}).encode()
        + b"\n"
    )
    slow.sendall(b'{"type":')
    gone.close()
    # the agent reads no more than it needs
    with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
        endless.sendall(b"x" * (64 << 20))
    for connection in (garbage, nested, liar):
        assert read_until_closed(connection).count(b"\n") == 1  # the challenge
    members.start(1, "exit=0")
    assert [ended(process)[0] for process in members.processes] == [0, 0]


@pytest.mark.slow
def test_a_slow_stranger_is_cut_off(members: Members, rejections: list[socket.socket]) -> None:
    begun = time.monotonic()
    rejections[0].sendall(b"{")
    read_until_closed(rejections[0])
    assert 5 < time.monotonic() - begun < 40


@pytest.mark.slow
def test_a_port_of_the_ranks_that_is_in_use_is_reported_to_all(members: Members) -> None:
    with socket.socket() as other:
        other.bind(("", members.port))
        other.listen()
        for rank in (0, 1):
            members.start(rank)
        for stated in refused(members, kinds=("port-not-usable",)):
            assert f"--master_port = {members.port}: ranks cannot meet there" in stated


@pytest.mark.slow
def test_a_port_of_another_program_is_refused(members: Members) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", members.port + 1))
        other.listen()
        members.start(0)
        refused(members, kinds=("port-not-usable",))


def read_until_closed(connection: socket.socket) -> bytes:
    content = b""
    try:
        while part := connection.recv(65_536):
            content += part
    except ConnectionError:
        pass
    return content


# ----------------------------------------------------------------------------------- pure functions


def test_equal_nodes_agree() -> None:
    assert (
        disagreements([HELLO, {**HELLO, "node_rank": 1, "host": "b", "clock": 9.0}], seen=set())
        == []
    )


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {**HELLO, "slots": "1"},
        {**HELLO, "nnodes": True},
        {**HELLO, "facts": {"a": 1}},
        {**HELLO, "clock": float("nan")},
        {**HELLO, "node_rank": 2},
        {**HELLO, "echo": ["a", 0]},
    ],
)
def test_what_is_no_hello(wrong: object) -> None:
    with pytest.raises(NoAgent):
        read_message(Hello, wrong)
    read_message(Hello, HELLO)


@pytest.mark.parametrize(
    ("rank", "master", "names", "expected"),
    [
        (1, "demo-0.no-such-host.invalid", (), "demo-1.no-such-host.invalid (no DNS record)"),
        (2, "127.0.0.1", (), "node 2"),
        (1, "x", ("x", "me@localhost"), "me@localhost (127.0.0.1, not connected)"),
    ],
)
def test_the_name_of_a_peer(rank: int, master: str, names: tuple[str, ...], expected: str) -> None:
    got = peer_name(rank, master=master, names=names)
    assert got in (
        expected,
        expected.replace("127.0.0.1", "::1"),
        expected.replace("no DNS record", "no answer from DNS"),
    )


# ------------------------------------------------------------------------------- agents in one loop


def test_nodes_that_reach_each_other_meet_and_answer_no_caller_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_ports(2)
    opened: list[int] = []

    def answer_at(self: Session, address: str, port: int = 0) -> int:
        opened.append(really(self, address, port))
        return opened[-1]

    really = Session.answer_at
    monkeypatch.setattr(Session, "answer_at", answer_at)
    nodes = (
        session(rank, nnodes=3, port=port, stated=looked(rank) | {"nnodes": 3}) for rank in range(3)
    )
    assert all(isinstance(end, Start) for end in run(meet(*nodes)))
    assert len(opened) == 4  # one port of each node, and that of the ranks
    for number in opened:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", number), timeout=20)


@pytest.mark.slow
def test_a_node_that_is_not_reached_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall lets calls of node 1 pass, and blocks calls to node 1."""
    monkeypatch.setattr("framework.launch.rendezvous.connectivity._AGAIN_FOR_SECONDS", 0.2)
    port = free_ports(2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        behind = session(1, port=port, stated=looked(1))
        behind.answer_at = lambda address, port=0: closed.getsockname()[1]  # type: ignore[method-assign]
        ends = run(meet(session(0, port=port, stated=looked(0)), behind))
    for end in ends:
        assert isinstance(end, ConfigError)
        assert [(each.kind, each.file, each.key) for each in end.problems] == [
            ("port-not-reached", "node 0 (llama-train-0)", "node 1 (llama-train-1)")
        ]


@pytest.mark.slow
def test_a_master_addr_that_is_not_node_0s_is_a_finding_at_both_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Swapped ranks: node 1 has the address, and node 0 does not."""
    monkeypatch.setattr(member, "_ELSEWHERE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(member, "_DOUBT_ELSEWHERE_SECONDS", 2.0)
    monkeypatch.setattr(member, "is_loopback", lambda host: False)
    port = free_ports(2)
    (end,) = run(meet(session(1, port=port, address=own_address(), token=TOKEN)))
    assert isinstance(end, ConfigError)
    (problem,) = end.problems
    assert (problem.kind, problem.key) == ("node-rank-swapped", "master_addr")
    assert problem.reason == "this is the address of node 1, not of node 0"
    monkeypatch.setattr(member, "listen_at", lambda host, port: None)
    (end,) = run(meet(session(0, port=port, address=own_address(), token=TOKEN)))
    assert isinstance(end, ConfigError)
    (problem,) = end.problems
    assert (problem.kind, problem.key) == ("node-rank-swapped", "master_addr")
    assert problem.reason == "node 0 does not have this address"


def test_a_refusal_is_heard_although_the_port_of_who_refused_is_free_again() -> None:
    """Two nodes of rank 0: the one that listens refuses and ends, and the other must not take its
    place and wait for ever.
    """
    port = free_ports(2)

    async def refuse(channel: Channel) -> None:
        channel.send("challenge", nonce="n", token=False)
        await read(channel, "hello")
        channel.send("welcome", proof="")
        channel.send(
            "nogo",
            problems=[{"kind": "node-rank-duplicate", "reason": "two of them", "fix": "one"}],
        )
        reset(channel)
        server.close()

    async def case() -> None:
        nonlocal server
        tasks = set()
        server = await asyncio.get_running_loop().create_server(
            lambda: Channel(lambda channel: tasks.add(asyncio.ensure_future(refuse(channel)))),
            "127.0.0.1",
            port + 1,
        )
        with pytest.raises(ConfigError, match=r"two of them.*\[node-rank-duplicate\]"):
            await join(session(0, port=port, deadline_seconds=10.0))

    server: Any = None
    run(case())


@pytest.mark.slow
def test_node_0_ends_the_wait_and_the_others_report_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The node that gives up first must not be the one that is blamed."""
    port = free_ports(2)
    nodes = (
        session(rank, nnodes=3, port=port, deadline_seconds=4.5 - 1.5 * rank) for rank in (0, 1)
    )
    first, second = run(meet(*nodes))
    assert isinstance(first, PeerLostError)
    assert re.search(
        r"within 4 s; waiting for 1/3 nodes: node 2 \[rendezvous-timeout\]", str(first)
    )
    assert str(second) == f"node 0: {first}"
    assert "gone again" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_node_that_refuses_the_challenge_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(2)
    ends = run(
        meet(session(0, port=port, token=TOKEN, deadline_seconds=4.0), session(1, port=port))
    )
    assert isinstance(ends[1], ConfigError)
    assert "turned away: 127.0.0.1 (token-refused)" in str(ends[0])
    assert "[token-refused]" in capsys.readouterr().err
