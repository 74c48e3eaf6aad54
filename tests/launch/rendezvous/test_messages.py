"""Links between agents: whole lines, limits, and proofs of a shared token."""

from __future__ import annotations

import fcntl
import json
import resource
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.launch.rendezvous.messages import LARGEST_LINE_BYTES, ConnectionLost, Link, is_proof, proof, readable


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    link = Link(near, name="test")
    yield link, far
    link.close()
    far.close()
    listener.close()


def received(link: Link, *, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count:
        found += link.receive()
    return found


def send_on_and_on(link: Link) -> None:
    for _ in range(10_000):
        link.send("x", text="y" * 10_000)


def test_messages_come_whole_however_they_are_cut(pair: tuple[Link, socket.socket]) -> None:
    link, far = pair
    assert link.receive() == []
    for part in (b'{"type": "a"}\n{"ty', b'pe": "b", "x": "\xc3', b'\xa9"}\n'):
        far.sendall(part)
    assert received(link, count=2) == [{"type": "a"}, {"type": "b", "x": "é"}]
    link.send("c", n=1)
    assert json.loads(far.makefile().readline()) == {"type": "c", "n": 1}


def test_what_was_said_before_the_end_counts(pair: tuple[Link, socket.socket]) -> None:
    link, far = pair
    far.sendall(b'{"type": "last"}\n')
    far.close()
    assert received(link, count=1) == [{"type": "last"}]
    with pytest.raises(ConnectionLost, match="closed"):
        received(link, count=1)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b'{"type": 1}\n',
        b"{}\n",
        b"\xff\n",
        b"null\n",
        b"[" * 60_000 + b"\n",
        b"x" * (LARGEST_LINE_BYTES + 2),
    ],
    ids=lambda content: str(content[:12]),
)
def test_what_is_no_message_ends_the_link(pair: tuple[Link, socket.socket], content: bytes) -> None:
    link, far = pair
    far.sendall(content)
    with pytest.raises(ConnectionLost, match=r"does not speak|without an end"):
        received(link, count=1)


def test_who_reads_nothing_is_lost(pair: tuple[Link, socket.socket]) -> None:
    link, _ = pair
    with pytest.raises(ConnectionLost, match="reads nothing"):
        send_on_and_on(link)


@given(content=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
def test_a_proof_is_for_one_connection_role_and_content(content: dict[str, object]) -> None:
    given_proof = proof("token", role="node", nonces=("a", "b"), content=content)
    assert is_proof(
        given_proof, proof("token", role="node", nonces=("a", "b"), content=json.loads(json.dumps(content)))
    )
    signed = {"token": "token", "role": "node", "nonces": ("a", "b"), "content": content}
    for change in ({"token": "other"}, {"role": "lead"}, {"nonces": ("b", "a")}, {"content": {"x": 1.5}}):
        assert not is_proof(given_proof, proof(**{**signed, **change}))  # type: ignore[arg-type]
    assert not is_proof(None, given_proof)
    assert "token" not in given_proof


def test_descriptors_above_1023_are_waited_for(pair: tuple[Link, socket.socket]) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] != resource.RLIM_INFINITY and limit[1] < 2048:
        pytest.skip("this machine lets nobody open 2048 files")
    _, far = pair
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 2048), limit[1]))
    try:
        high = Link(socket.socket(fileno=fcntl.fcntl(far.fileno(), fcntl.F_DUPFD, 1500)), name="high")
        assert readable([high], 0) == set()
        pair[0].send("x")
        assert readable([high], 20) == {high}
        high.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_anything_may_be_given_as_a_proof() -> None:
    for forged in (json.loads('"\\ud800"'), "é", 1, ["x"], None):
        assert not is_proof(forged, proof("token", role="node", nonces=("a", "b"), content={}))
