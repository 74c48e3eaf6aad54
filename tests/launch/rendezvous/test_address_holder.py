"""A node that has node 0's address tells whoever calls there, and nobody who calls ends it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from framework.errors import ConfigError
from framework.launch.hosts.topology import Topology
from framework.launch.rendezvous.member import AddressHolder, Member
from framework.launch.rendezvous.session import Session
from framework.launch.stop_requests import StopRequests
from tests.launch.rendezvous.members import reset


def named(name: str = "train-0.train") -> Session:
    """Of node 1, where node 0 is known by name."""
    return Session(Topology(2, 1, 1, name, 29500), 29501, {"host": "b", "node_rank": 1}, StopRequests())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        opened.setblocking(False)
        yield opened


def stepped(address_holder: AddressHolder, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        assert address_holder.step()


def test_a_name_that_leads_elsewhere_by_now_is_let_go(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 is a pod that has come back with another address, and a name server had the old one, which is ours now."""
    addresses = ["127.0.0.1"]
    monkeypatch.setattr("framework.launch.rendezvous.member.resolve", lambda _: list(addresses))
    monkeypatch.setattr("framework.launch.rendezvous.member._LOOK_UP_SECONDS", 0.0)
    address_holder = AddressHolder(named(), listener)
    caller = Member(named())
    caller._address_holder = address_holder
    with socket.create_connection(listener.getsockname()) as called:
        called.settimeout(20)
        stepped(address_holder, lambda: bool(address_holder._links))
        addresses[:] = []  # no answer is no other answer
        stepped(address_holder, lambda: address_holder._lookup is None)
        assert address_holder.step()
        addresses[:] = ["10.0.0.9"]
        deadline = time.monotonic() + 20
        while caller._address_holder is not None:
            assert time.monotonic() < deadline
            caller._call(0.0)
        assert b"nogo" not in b"".join(iter(lambda: called.recv(4096), b"")), "it calls again, and reaches node 0"
    assert listener.fileno() == -1


def test_a_listener_of_every_address_has_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host's file gives its name a loopback address beside its own."""
    asked: list[str] = []
    monkeypatch.setattr(
        "framework.launch.rendezvous.member.resolve", lambda name: asked.append(name) or ["127.0.1.1", "10.0.0.5"]
    )
    monkeypatch.setattr("framework.launch.rendezvous.member._LOOK_UP_SECONDS", 0.0)
    with socket.create_server(("", 0)) as listener:
        listener.setblocking(False)
        address_holder = AddressHolder(named(), listener)
        stepped(address_holder, lambda: len(asked) > 3)
        assert listener.fileno() != -1


@pytest.mark.parametrize(
    ("name", "in_pod", "at_once"),
    [("train-0.train", True, False), ("worker-0", False, True), ("127.0.0.1", True, True)],
)
def test_nobody_is_told_while_a_name_server_may_have_an_old_answer(
    name: str, in_pod: bool, at_once: bool, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.launch.rendezvous.member.resolve", lambda _: ["127.0.0.1"])
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    meeting = named(name)
    address_holder = AddressHolder(meeting, listener)
    with socket.create_connection(listener.getsockname()) as called:
        called.sendall(b'{"type": "hello"}\n')
        stepped(address_holder, lambda: bool(address_holder._greeted or address_holder._reported_at))
        assert bool(address_holder._reported_at) == at_once
        address_holder._opened_at -= 60  # longer than it waits for somebody to tell
        meeting.started_at -= 121
        with pytest.raises(ConfigError, match="node-rank-swapped"):
            stepped(address_holder, lambda: False)
        called.settimeout(20)
        assert b"node-rank-swapped" in b"".join(iter(lambda: called.recv(4096), b""))


def test_who_is_gone_again_costs_nothing() -> None:
    meeting = Session(Topology(2, 1, 1, "127.0.0.1", 29500), 29501, {"host": "b", "node_rank": 1}, StopRequests())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address_holder = AddressHolder(meeting, listener)
        caller = socket.create_connection(listener.getsockname())
        reset(caller)
        assert select.select([listener], [], [], 20)[0]
        address_holder.step()
        with socket.create_connection(listener.getsockname(), timeout=20) as second:
            address_holder.step()
            assert b'"challenge"' in second.recv(4096)
        address_holder.step()
