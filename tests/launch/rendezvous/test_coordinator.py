"""Node 0 while it waits for the others, with their ends in the hands of the test."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from framework.doctor.node.links import Echo
from framework.doctor.node.start import _REPORTED
from framework.errors import ConfigError, FrameworkError, PeerLostError, Problem, RunStopped
from framework.launch.hosts.topology import Topology
from framework.launch.rendezvous import connections as guests
from framework.launch.rendezvous.connections import Client, Clients, Rejections, TurnedAway
from framework.launch.rendezvous.coordinator import Coordinator, ahead
from framework.launch.rendezvous.handshake import disagreements, hosts_text
from framework.launch.rendezvous.messages import (
    LARGEST_LINE_BYTES,
    ConnectionLost,
    Link,
    Message,
    NoAgent,
    Peers,
    proof,
    readable,
)
from framework.launch.rendezvous.session import Session
from framework.launch.stop_requests import StopRequests
from tests.launch.conftest import Connect
from tests.launch.rendezvous.members import reset
from tests.ports import free_ports

pytestmark = pytest.mark.timing


@pytest.fixture(autouse=True)
def _sees_nobody_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends that are in the hands of a test do not hang up by themselves."""
    monkeypatch.setattr(guests, "_SEE_OFF_SECONDS", 0.0)


@pytest.fixture
def lead() -> Iterator[Coordinator]:
    """Node 0 of three."""
    meeting = Session(Topology(3, 1, 0, "127.0.0.1", 29500), 29501, hello(0, nnodes=3), StopRequests())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Coordinator(meeting, listener)


def enter(lead: Coordinator, connect: Connect, node_rank: int) -> socket.socket:
    """A guest that has said its HELLO; returns its end."""
    link, far = connect()
    client = Client(link._connection, "test")
    lead._clients._clients.append(client)
    lead._clients.let_in(client, hello(node_rank, nnodes=3, host=f"host{node_rank}"))
    far.settimeout(20)
    return far


def test_a_node_that_dies_at_go_is_lost_to_all(lead: Coordinator, connect: Connect) -> None:
    """All the others hear GO first, and then who is lost."""
    dying, living = enter(lead, connect, 1), enter(lead, connect, 2)
    reset(dying)
    peers = lead._go(lead._clients.present)
    while not peers.failures:
        peers.poll(0.05)
    assert peers.failures[0].what.startswith("node 1 (host1): lost: ")
    lines = living.makefile()
    stated = [json.loads(lines.readline()) for _ in range(3)]
    stated = [message for message in stated if message["type"] != "beat"]
    assert [message["type"] for message in stated][:2] == ["go", "failure"]


def test_the_last_word_of_who_has_gone_is_heard(
    lead: Coordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after a look and before a beat, which finds that the connection is gone."""
    far = enter(lead, connect, 1)

    def nothing_yet(waiting: Iterable[Any], seconds: float) -> set[Any]:
        found = readable(waiting, 0)
        far.sendall(b'{"type": "stop", "why": "SIGTERM"}\n')
        reset(far)
        time.sleep(0.2)
        return found

    heard: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("framework.launch.rendezvous.connections.readable", nothing_yet)
        lead._clients.step(lambda client, message: heard.append(message["type"]), 0.0)
    while lead._clients.present:
        lead._clients.step(lambda client, message: heard.append(message["type"]), 0.05)
    assert heard == ["stop"]


def test_who_refuses_lets_the_others_hang_up_first(
    lead: Coordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their beats lie unread in its connections: closing these would take back a refusal that is still on its way."""
    monkeypatch.setattr(guests, "_SEE_OFF_SECONDS", 60.0)
    far = enter(lead, connect, 1)
    far.sendall(b'{"type": "beat"}\n')

    def refuse() -> None:
        with pytest.raises(ConfigError):
            lead._refuse([Problem(kind="nodes-differ", reason="a", fix="b")])

    refusing = threading.Thread(target=refuse)
    refusing.start()
    assert b'"nogo"' in far.recv(65_536)
    refusing.join(0.3)
    assert refusing.is_alive()
    far.close()
    refusing.join(20)
    assert not refusing.is_alive()


def hello(node_rank: int, *, nnodes: int, **other: object) -> dict[str, Any]:
    return {
        "protocol": 2,
        "job": "",
        "attempt": 0,
        "node_rank": node_rank,
        "nnodes": nnodes,
        "slots": 8,
        "master_port": 29500,
        "host": f"llama-train-{node_rank}",
        "hosts": "",
        "clock": 1.0,
        "facts": {"code": "a", "config": "b"},
        **other,
    }


@pytest.mark.parametrize("count", [1, 64, 400])
def test_what_differs_is_told_on_one_line_however_many_nodes(lead: Coordinator, connect: Connect, count: int) -> None:
    """A line above the limit would be taken for nonsense, and the others would wait on for node 0."""
    far = enter(lead, connect, 1)
    hellos = [
        hello(
            rank,
            nnodes=count + 1,
            hosts=f"worker-{rank}",
            facts={"code": f"{rank}" * 1500, "config": f"é{rank}" * 1500},
        )
        for rank in range(count + 1)
    ]
    problems = disagreements(hellos, seen=set())
    assert len(problems) == 3 * min(count, 400)
    with pytest.raises(ConfigError):
        lead._refuse(problems)
    line = far.makefile("rb").readline()
    assert len(line) < LARGEST_LINE_BYTES
    reported = json.loads(line)["problems"]
    assert reported[0]["key"] == problems[0].key
    if len(reported) < len(problems):
        assert reported[-1]["reason"] == f"{len(problems) - len(reported) + 1} more problems"


@pytest.mark.parametrize(("nnodes", "length"), [(512, 20), (512, 255), (513, 20), (9999, 20)])
def test_go_is_one_line_however_many_nodes(lead: Coordinator, connect: Connect, nnodes: int, length: int) -> None:
    far = enter(lead, connect, 1)
    lead._send_go(dict.fromkeys(range(nnodes), "h" * length))
    line = far.makefile("rb").readline()
    assert len(line) < LARGEST_LINE_BYTES
    reported = json.loads(line)
    if nnodes > 512:
        assert reported == {"type": "go", "nnodes": nnodes}
    else:
        assert reported["hosts"].keys() == {str(rank) for rank in range(nnodes)}
        assert {len(name) for name in reported["hosts"].values()} == {min(length, 107)}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of nodes of each comparison."""
    compared: list[int] = []

    def compare(hellos: Sequence[Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
        compared.append(len(hellos))
        return disagreements(hellos, seen=seen)

    monkeypatch.setattr("framework.launch.rendezvous.coordinator.disagreements", compare)
    return compared


def test_nodes_are_compared_now_and_then_and_when_all_are_there(
    lead: Coordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand that come at once, each compared with all others would keep node 0 busy for minutes."""
    compared = counted(monkeypatch)
    monkeypatch.setattr("framework.launch.rendezvous.coordinator._COMPARE_SECONDS", 1e9)
    monkeypatch.setattr(Coordinator, "_go", lambda self, present: None)
    for rank in (1, 2):
        for _ in range(3):
            lead._judge()
        enter(lead, connect, rank)
    for _ in range(3):
        lead._judge()
    assert compared == [1, 3]
    lead._clients.part(lead._clients.present[0], ConnectionLost("gone"))
    lead._judge()
    assert compared == [1, 3]


@pytest.mark.parametrize(
    ("first", "second", "reported"),
    [
        ("a,b", "b,a", ("b as number 1", "a as number 1")),
        ("a,b", "a", ("nothing as number 2", "b as number 2")),
        ("a,b", "", ("none", "2 hosts")),
        ("", "a,b", ("2 hosts", "none")),
    ],
)
def test_the_first_difference_of_hostfiles_is_told(first: str, second: str, reported: tuple[str, str]) -> None:
    (problem,) = disagreements([hello(0, nnodes=2, hosts=first), hello(1, nnodes=2, hosts=second)], seen=set())
    assert problem.value == reported[0]
    assert problem.reason == f"node 0 (llama-train-0) has {reported[1]}"


def test_long_hostfiles_are_compared_to_their_end() -> None:
    names = [f"llama-train-{rank:04d}.cluster.local" for rank in range(1000)]
    first, second = hosts_text(names), hosts_text([*names[:900], "other", *names[901:]])
    (problem,) = disagreements([hello(0, nnodes=2, hosts=first), hello(1, nnodes=2, hosts=second)], seen=set())
    assert re.fullmatch(r"node 0 \(llama-train-0\) has 1000 hosts \([0-9a-f]{16}\)", problem.reason)
    assert re.fullmatch(r"1000 hosts \([0-9a-f]{16}\)", str(problem.value))
    (problem,) = disagreements(
        [hello(0, nnodes=2, hosts=hosts_text(names[:9])), hello(1, nnodes=2, hosts=second)], seen=set()
    )
    assert problem.reason.endswith(" has 9 hosts")


@pytest.mark.parametrize(("odd", "file"), [(0, "node 0 (llama-train-0)"), (7, "node 7 (llama-train-7)")])
def test_the_odd_one_is_named_on_one_line(odd: int, file: str) -> None:
    hellos = [hello(rank, nnodes=1000) for rank in range(1000)]
    hellos[odd]["facts"]["torch"] = "2.14"
    (problem,) = disagreements(hellos, seen=set())
    assert (problem.file, problem.key, problem.value) == (file, "torch", "2.14")
    assert problem.reason.endswith(" and 996 more have nothing")


def test_many_with_the_same_difference_are_one_line() -> None:
    hellos = [hello(rank, nnodes=9, slots=4 if rank in (2, 5, 6, 8) else 8) for rank in range(9)]
    (problem,) = disagreements(hellos, seen=set())
    assert problem.file == "nodes 2 (llama-train-2), 5 (llama-train-5), 6 (llama-train-6), 8 (llama-train-8)"


def test_a_node_that_takes_itself_for_the_place_of_node_0_differs() -> None:
    (problem,) = disagreements([hello(0, nnodes=2), hello(1, nnodes=2, master_addr="node-1")], seen=set())
    assert (problem.kind, problem.key, problem.value) == ("nodes-differ", "master_addr", "node-1")


@pytest.mark.parametrize(("clock", "expected"), [(100.5, 0.0), (101.0, 0.0), (99.0, 0.0), (161.0, 60.0), (39.0, -60.0)])
def test_what_the_way_takes_is_no_difference_of_clocks(clock: float, expected: float) -> None:
    assert ahead(clock, sent=99.0, received=101.0) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------ over real connections


class Joining:
    """The ends of nodes that call a listening node 0, which runs on a thread."""

    def __init__(self, nnodes: int, *, stated: Mapping[str, Any] | None = None, **terms: Any) -> None:
        stated = stated or hello(0, nnodes=nnodes)
        self.port = free_ports(2)
        meeting = Session(
            Topology(nnodes, 1, 0, "127.0.0.1", self.port), self.port + 1, stated, StopRequests(), **terms
        )
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = self.listener.getsockname()
        self.meeting, self.lead = meeting, Coordinator(meeting, self.listener)
        self.ends: list[object] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ends.append(self.lead.wait())
        except FrameworkError as error:
            self.ends.append(error)
        finally:
            self.meeting.close()

    def call(self) -> Link:
        return Link(socket.create_connection(self.address, timeout=20), name="node 0")

    def end(self) -> Any:
        self.thread.join(60)
        return self.ends[0]


def read(link: Link, kind: str) -> Message:
    """The next message of a kind."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for message in link.receive() if readable([link], 0.2) else ():
            if message["type"] == kind:
                return message
        with suppress(ConnectionLost):
            link.send("beat")
    raise AssertionError(f"no {kind}")


def join(link: Link, stated: dict[str, Any]) -> None:
    read(link, "challenge")
    link.send("hello", hello=stated, nonce="n", proof="")


def test_many_that_come_at_once_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compared with all others for each that comes, and one accepted for each look, made it minutes."""
    compared = counted(monkeypatch)
    job = Joining(150)
    links = [job.call() for _ in range(149)]
    for rank, link in enumerate(links, 1):
        join(link, hello(rank, nnodes=150))
    for link in links:
        read(link, "go")
    assert not job.end().failures
    assert len(compared) < 10  # now and then, and once when all were there
    for link in links:
        link.close()
    job.end().close()


@pytest.mark.slow
def test_others_hear_who_was_turned_away_and_why_node_0_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of any node may be the one that is read."""
    monkeypatch.setattr("framework.launch.rendezvous.coordinator._REPORT_SECONDS", 2.0)
    job = Joining(3, token="right", deadline_seconds=8.0)
    good, bad, without = job.call(), job.call(), job.call()
    challenge = read(good, "challenge")
    stated = hello(1, nnodes=3)
    good.send(
        "hello",
        hello=stated,
        nonce="n",
        proof=proof("right", role="node", nonces=(challenge["nonce"], "n"), content=stated),
    )
    join(bad, hello(2, nnodes=3))
    assert read(bad, "nogo")["problems"][0]["kind"] == "token-refused"
    read(without, "challenge")
    without.send("refused", why="token-refused")
    expected = r"waiting for 1/3 nodes: node 2; turned away: 127\.0\.0\.1 \(token-refused\)"
    while not re.search(expected, read(good, "waiting")["text"]):
        pass  # it came before the others were turned away
    assert re.search(expected, read(good, "lost")["why"])
    error = job.end()
    assert isinstance(error, PeerLostError)
    assert re.search(expected, str(error))


def test_strangers_are_told_once_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever scans ports must not fill the log of node 0."""
    rejections = Rejections()
    for _ in range(250):
        rejections.add("10.0.0.9", NoAgent("it does not speak this protocol"))
    rejections.add("10.0.0.9", ConnectionLost("the connection was closed"))
    rejections.add("10.0.0.8", TurnedAway("it does not know the token of this job", "token-refused"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[2] == "launch: 100 connections from 10.0.0.9 were turned away: it does not speak this protocol"
    assert rejections.reported() == "; turned away: 10.0.0.8 (token-refused)"
    rejections.clear("10.0.0.8")
    assert rejections.reported() == ""
    for number in range(3000):
        rejections.add(f"10.1.{number // 256}.{number % 256}", ConnectionLost("the connection was closed"))
    assert len(capsys.readouterr().err.splitlines()) < 1020


def test_without_files_node_0_says_so_and_rests(capsys: pytest.CaptureFixture[str]) -> None:
    """The listener stays readable: without a rest node 0 would spin, and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guests = Clients(listener, nnodes=2, has_token=False)
        links = [socket.create_connection(listener.getsockname(), timeout=20)]

        lowest = os.dup(listener.fileno())  # of the descriptors that are free
        os.close(lowest)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
        try:
            looks = looked_for(guests, seconds=1.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert looks < 20
        assert capsys.readouterr().err.count("too many open files") == 1
        guests._accept_at = 0.0
        guests.step(lambda client, message: None, 5)
        assert b'"challenge"' in links[0].recv(4096)
        links[0].close()


def looked_for(guests: Clients, *, seconds: float) -> int:
    """How often node 0 looks meanwhile."""
    looks, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        guests.step(lambda client, message: None, 0.2)
        looks += 1
    return looks


def looked(rank: int, *, port: int = 1, **changes: Any) -> dict[str, Any]:
    """The HELLO of a node that has looked at itself, and answers at a port."""
    look = {name: kind() for name, kind in _REPORTED.items()} | changes
    return hello(rank, nnodes=2, clock=time.time(), look=look) | ({"echo": ["127.0.0.1", port]} if rank else {})


@pytest.fixture
def job() -> Iterator[Joining]:
    """Node 0 of two, which has looked at itself."""
    job = Joining(2, stated=looked(0))
    yield job
    for end in job.ends:
        if isinstance(end, Peers):
            end.close()


def test_a_clock_that_is_wrong_refuses_the_start(job: Joining) -> None:
    link = job.call()
    join(link, looked(1) | {"clock": time.time() - 3600})
    (problem,) = read(link, "nogo")["problems"]
    assert (problem["kind"], problem["file"]) == ("clock-differs", "node 1 (llama-train-1)")
    assert isinstance(job.end(), ConfigError)


def test_warnings_between_nodes_are_told_and_stop_nobody(job: Joining, capsys: pytest.CaptureFixture[str]) -> None:
    link = job.call()
    echo = Echo(0, address="127.0.0.1")
    join(link, looked(1, port=echo.port, gpu_names=["A100"]) | {"clock": time.time() + 30})
    order = read(link, "reach")
    link.send("reached", token=order["token"], failed=[])
    read(link, "go")
    assert isinstance(job.end(), Peers)
    echo.close()
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split()[-1] for line in warned] == ["[gpus-differ]", "[clock-differs]"]


def test_nodes_that_do_not_reach_each_other_are_refused(job: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 does not get through to node 1, and node 1 says that it does not reach the port of the ranks."""
    monkeypatch.setattr("framework.launch.rendezvous.connectivity._AGAIN_FOR_SECONDS", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        link = job.call()
        join(link, looked(1, port=taken.getsockname()[1]))
        order = read(link, "reach")
        assert [port for _, port in order["targets"]][1:] == [job.port]
        link.send("reached", token=order["token"], failed=[[1, "127.0.0.1", "no answer within 4 s"]])
        link.send("reached", token="of another round", failed=[])
        problems = {(each["kind"], each["file"], each["key"]) for each in read(link, "nogo")["problems"]}
    assert problems == {
        ("port-not-reached", "node 0 (llama-train-0)", "node 1 (llama-train-1)"),
        ("port-not-reached", "node 1 (llama-train-1)", f"127.0.0.1:{job.port}"),
    }
    assert isinstance(job.end(), ConfigError)


def test_a_node_that_goes_while_all_call_each_other_may_come_again(job: Joining) -> None:
    echo = Echo(0, address="127.0.0.1")
    for is_first in (True, False):
        link = job.call()
        join(link, looked(1, port=echo.port))
        order = read(link, "reach")
        if is_first:
            link.close()
    link.send("reached", token=order["token"], failed=[])
    read(link, "go")
    assert isinstance(job.end(), Peers)
    echo.close()


def test_the_last_word_before_all_call_each_other_is_heard(job: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is asked to stop, and goes, while node 0 compares what all have said."""
    link, really = job.call(), job.lead._begin_round

    def begin(present: Sequence[Client]) -> Any:
        link._connection.sendall(b'{"type": "stop", "why": "SIGTERM"}\n')
        reset(link._connection)
        time.sleep(0.2)
        return really(present)

    monkeypatch.setattr(job.lead, "_begin_round", begin)
    join(link, looked(1))
    assert isinstance(job.end(), RunStopped)


def test_nobody_is_refused_for_a_node_that_has_gone(
    lead: Coordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.launch.rendezvous.coordinator._SETTLE_SECONDS", 0.0)
    other, gone = enter(lead, connect, 1), enter(lead, connect, 2)
    (_, other_guest) = lead._clients.present
    assert other_guest.hello is not None
    other_guest.hello["slots"] = 4
    lead._judge()  # it differs, and may yet be one that is being replaced
    lead._clients.part(other_guest, ConnectionLost("gone"))
    for client in lead._clients.present:
        client.link.heard_at = time.monotonic() + 60
    assert lead._judge() is None
    assert lead._found == []
    other.close()
    gone.close()
