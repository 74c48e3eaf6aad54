"""Channels between agents: whole lines, limits, proofs of a shared token, and signatures."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.launch.rendezvous.channel import (
    LARGEST_LINE_BYTES,
    Channel,
    ConnectionLost,
    is_proof,
    proof,
)
from tests.launch.rendezvous.ends import TOKEN, pair, reset, run


def test_messages_come_whole_however_they_are_cut() -> None:
    async def case() -> None:
        near, far = await pair()
        for part in (b'{"type": "a"}\n{"ty', b'pe": "b", "x": "\xc3', b'\xa9"}\n'):
            far._transport.write(part)
            await asyncio.sleep(0.02)
        assert [await near.receive(), await near.receive()] == [
            {"type": "a"},
            {"type": "b", "x": "é"},
        ]
        near.send("c", n=1)
        assert await far.receive() == {"type": "c", "n": 1}

    run(case())


@pytest.mark.parametrize("how", ["close", "reset"])
def test_messages_before_the_end_are_received(how: str) -> None:
    """It is received even if a message to the lost node is the first to fail."""

    async def case() -> None:
        near, far = await pair()
        far.send("last")
        far.close() if how == "close" else reset(far)
        near.send("meanwhile")
        await asyncio.sleep(0.1)
        near.send("meanwhile")
        assert await near.receive() == {"type": "last"}
        with pytest.raises(ConnectionLost, match=r"closed|reset|pipe"):
            await near.receive()

    run(case())


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
        b"\n" * 5000,
    ],
    ids=lambda content: str(content[:12]),
)
def test_what_is_no_message_ends_the_channel(content: bytes) -> None:
    async def case() -> None:
        near, far = await pair()
        far._transport.write(content)
        with pytest.raises(ConnectionLost, match=r"does not speak|without an end"):
            await near.receive()
        with pytest.raises(ConnectionLost):
            await far.receive()

    run(case())


def test_who_reads_nothing_is_lost() -> None:
    async def case() -> None:
        near, far = await pair()
        far._transport.pause_reading()
        with pytest.raises(ConnectionLost, match="reads nothing"):
            send_on_and_on(near)

    run(case())


def send_on_and_on(channel: Channel) -> None:
    for _ in range(10_000):
        channel.send("x", text="y" * 10_000)


# ------------------------------------------------------------------------------------------- signed


async def signed_pair() -> tuple[Channel, Channel]:
    """Return two ends that know the token."""
    near, far = await pair()
    near.sign(TOKEN, is_lead=True, nonces=("a", "b"))
    far.sign(TOKEN, is_lead=False, nonces=("a", "b"))
    return near, far


def test_signed_messages_come_through_both_ways() -> None:
    async def case() -> None:
        near, far = await signed_pair()
        for number in range(5):
            near.send("to", n=number)
            far.send("fro", n=number)
        assert [(await far.receive())["n"] for _ in range(5)] == [*range(5)]
        assert [(await near.receive())["n"] for _ in range(5)] == [*range(5)]

    run(case())


@pytest.mark.parametrize(
    "change", ["unsigned", "altered", "repeated", "left out", "swapped", "sent back", "other key"]
)
def test_a_line_that_is_not_of_the_other_end_in_this_order_ends_the_channel(change: str) -> None:
    async def case() -> None:
        near, far = await signed_pair()
        lines: list[bytes] = []
        far._transport.write = lines.append  # type: ignore[method-assign]
        for number in range(3):
            far.send("stop", why=str(number))
        forged = {
            "unsigned": [b'{"type": "stop", "why": "me"}\n'],
            "altered": [lines[0].replace(b'"0"', b'"9"')],
            "repeated": [lines[0], lines[0]],
            "left out": [lines[0], lines[2]],
            "swapped": [lines[1], lines[0]],
            "sent back": [],
            "other key": [],
        }[change]
        if change == "sent back":  # a message of node 0, as if a node had sent it
            near._transport.write, written = forged.append, near._transport.write  # type: ignore[method-assign]
            near.send("beat")
            near._transport.write = written  # type: ignore[method-assign]
        if change == "other key":
            far._num_sent = 0
            far.sign(TOKEN, is_lead=False, nonces=("a", "of another connection"))
            far._transport.write = forged.append  # type: ignore[method-assign]
            far.send("stop", why="0")
        del far._transport.write
        far._transport.write(b"".join(forged))
        good = 1 if change in ("repeated", "left out") else 0
        for _ in range(good):
            await near.receive()
        with pytest.raises(ConnectionLost, match="not signed"):
            await near.receive()

    run(case())


@given(
    content=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4)
)
def test_a_proof_is_for_one_connection_role_and_content(content: dict[str, object]) -> None:
    given_proof = proof("token", role="node", nonces=("a", "b"), content=content)
    assert is_proof(
        given_proof,
        proof("token", role="node", nonces=("a", "b"), content=json.loads(json.dumps(content))),
    )
    signed = {"token": "token", "role": "node", "nonces": ("a", "b"), "content": content}
    for change in (
        {"token": "other"},
        {"role": "lead"},
        {"nonces": ("b", "a")},
        {"content": {"x": 1.5}},
    ):
        assert not is_proof(given_proof, proof(**{**signed, **change}))  # type: ignore[arg-type]
    assert not is_proof(None, given_proof)
    assert "token" not in given_proof


def test_anything_may_be_given_as_a_proof() -> None:
    for forged in (json.loads('"\\ud800"'), "é", 1, ["x"], None):
        assert not is_proof(forged, proof("token", role="node", nonces=("a", "b"), content={}))
