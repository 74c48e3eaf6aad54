"""A node on its way to node 0, with the other end in the hands of the test."""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import suppress

import pytest

from framework.errors import ConfigError, FrameworkError, PeerLostError, RunStopped
from framework.launch.hosts.topology import Topology
from framework.launch.rendezvous.member import Member
from framework.launch.rendezvous.messages import Link
from framework.launch.rendezvous.session import Session
from framework.launch.stop_requests import StopRequests
from tests.launch.conftest import Connect
from tests.launch.rendezvous.members import reset

pytestmark = pytest.mark.timing


def welcomed(link: Link, requests: StopRequests) -> Member:
    """Node 1 of two, after its handshake."""
    meeting = Session(Topology(2, 1, 1, "127.0.0.1", 29500), 29501, {"host": "b", "node_rank": 1}, requests)
    caller = Member(meeting)
    caller._link, caller._challenge, caller._welcomed_at = link, "nonce", time.monotonic()
    return caller


def test_a_request_is_obeyed_also_when_node_0_has_just_gone(connect: Connect) -> None:
    link, far = connect()
    requests = StopRequests()
    caller = welcomed(link, requests)
    reset(far)
    assert select.select([link], [], [], 20)[0]
    requests.ask("SIGTERM")
    with pytest.raises(RunStopped, match="SIGTERM"):
        caller.step()


def test_a_refusal_is_heard_although_the_connection_behind_it_is_gone(connect: Connect) -> None:
    """Node 0 refuses and ends; a beat that is due meanwhile must not find out first that it is gone."""
    link, far = connect()
    caller = welcomed(link, StopRequests())
    caller._beaten_at = 0.0
    problem = {"kind": "node-rank-duplicate", "reason": "two of them", "fix": "one"}
    far.sendall(json.dumps({"type": "nogo", "problems": [problem]}).encode() + b"\n")
    assert select.select([link], [], [], 20)[0]
    reset(far)
    time.sleep(0.2)
    with pytest.raises(ConfigError, match=r"two of them.*\[node-rank-duplicate\]"):
        caller.step()


def test_what_comes_with_go_is_heard(connect: Connect) -> None:
    """Node 0 may have much to say at once; what it says behind GO names who is to blame."""
    link, far = connect()
    caller = welcomed(link, StopRequests())
    stated = [
        {"type": "go", "hosts": {"0": "a", "1": "b"}},
        {"type": "failure", "node": 0, "what": "node 0 rank 0: killed", "code": 137, "at": "x"},
        {"type": "stop", "node": 0, "why": "SIGTERM"},
    ]
    far.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in stated))
    assert select.select([link], [], [], 20)[0]
    peers = caller.step()
    assert peers is not None
    assert [failure.code for failure in peers.failures] == [137]
    assert peers.stop == "SIGTERM at node 0 (a)"


def test_nonsense_behind_go_is_a_lost_node(connect: Connect) -> None:
    link, far = connect()
    caller = welcomed(link, StopRequests())
    far.sendall(b'{"type": "go", "hosts": {"0": "a", "1": "b"}}\n{"type": "stop", "node": 9}\n')
    assert select.select([link], [], [], 20)[0]
    peers = caller.step()
    assert peers is not None
    assert [failure.what for failure in peers.failures] == ["node 0 (a): lost: it speaks for another node"]


def test_a_request_says_how_it_came(connect: Connect) -> None:
    link, far = connect()
    requests = StopRequests()
    caller = welcomed(link, requests)
    requests.ask("SIGTERM")
    with pytest.raises(RunStopped):
        caller.step()
    far.settimeout(20)
    assert json.loads(far.makefile().readline()) == {"type": "stop", "why": "SIGTERM"}


@pytest.mark.slow
def test_each_connection_has_a_nonce_and_silence_ends_a_suspicion() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        caller = Member(
            Session(Topology(2, 1, 1, "127.0.0.1", 29500), port, {"host": "b", "node_rank": 1}, StopRequests())
        )
        seen = set()
        for _ in range(2):
            deadline = time.monotonic() + 20
            while caller._link is None:
                assert time.monotonic() < deadline
                caller._call(0.2)
            seen.add(caller._nonce)
            caller.close()
    assert len(seen) == 2
    caller._no_agent_since = 1.0
    deadline = time.monotonic() + 20
    while caller._no_agent_since:
        assert time.monotonic() < deadline
        caller._call(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("stated", "code"), [(b"", None), (b"HTTP/1.1 400 Bad Request\r\n\r\n", 78)])
def test_only_what_speaks_another_language_is_another_program(
    monkeypatch: pytest.MonkeyPatch, stated: bytes, code: int | None
) -> None:
    """A node 0 that a thousand nodes call at once may be silent for a while, or have no place yet."""
    monkeypatch.setattr("framework.launch.rendezvous.member._NO_AGENT_SECONDS", 0.0)
    monkeypatch.setattr("framework.launch.rendezvous.member.HANDSHAKE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        hello = {"host": "b", "node_rank": 1}
        seconds = 2.0 if code is None else 20.0
        caller = Member(
            Session(Topology(2, 1, 1, "127.0.0.1", 29500), port, hello, StopRequests(), deadline_seconds=seconds)
        )
        listener.settimeout(0.05)
        end = end_of(caller, listener, stated)
    assert isinstance(end, PeerLostError if code is None else ConfigError)
    assert code is None or end.exit_code == code


def end_of(caller: Member, listener: socket.socket, stated: bytes) -> FrameworkError:
    """How the wait ends where whoever calls is told this, and no more."""
    while True:
        with suppress(TimeoutError):
            peer, _ = listener.accept()
            peer.sendall(stated)
            peer.close()
        try:
            caller.step()
        except FrameworkError as error:
            return error


def test_what_node_0_waits_for_is_said_here(connect: Connect) -> None:
    link, far = connect()
    caller = welcomed(link, StopRequests())
    far.sendall(b'{"type": "waiting", "text": "waiting for 1/3 nodes: node 2"}\n')
    assert select.select([link], [], [], 20)[0]
    assert caller.step() is None
    assert caller._waiting_for() == "node 0: 127.0.0.1:29501 is waiting for 1/3 nodes: node 2"


def test_of_very_many_nodes_others_are_known_by_number(connect: Connect) -> None:
    link, far = connect()
    caller = welcomed(link, StopRequests())
    far.sendall(b'{"type": "go", "nnodes": 2}\n')
    assert select.select([link], [], [], 20)[0]
    peers = caller.step()
    assert peers is not None
    assert [peers.name(node) for node in (0, 1)] == ["node 0", "node 1 (b)"]
