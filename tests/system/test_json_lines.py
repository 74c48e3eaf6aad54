"""Messages between processes: whole lines, limits, and ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.system.json_lines import (
    BadLineError,
    LineBuffer,
    MessageReader,
    MessageSocket,
    decode,
    encode,
)


@pytest.fixture
def pipe() -> Iterator[tuple[MessageReader, int]]:
    read_end, write_end = os.pipe()
    yield MessageReader(read_end, largest=100), write_end
    for end in (read_end, write_end):
        with suppress(OSError):
            os.close(end)


@pytest.fixture
def sockets() -> Iterator[tuple[MessageSocket, MessageSocket]]:
    near, far = map(MessageSocket, socket.socketpair())
    yield near, far
    near.close()
    far.close()


@given(st.text(), st.integers(1, 7))
def test_a_message_arrives_as_it_was_sent_however_it_is_cut(text: str, size: int) -> None:
    buffer = LineBuffer()
    data = 2 * (encode({"text": text}) + b"\n")
    for begin in range(0, len(data), size):
        buffer.feed(data[begin : begin + size])
    assert [decode(line) for line in buffer.lines] == 2 * [{"text": text}]


def test_a_byte_that_is_no_text_arrives() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert decode(encode({"name": name})) == {"name": name}


@pytest.mark.parametrize(
    "line", [b"", b"null", b"[]", b"3", b'"text"', b"{", b"\xff", b"[" * 100_000, b"{}" + b" " * 99]
)
def test_what_is_no_object_is_no_message(line: bytes) -> None:
    with pytest.raises(BadLineError):
        decode(line, largest=100 if line.startswith(b"{}") else 1 << 20)


def test_lines_before_one_without_an_end_are_kept() -> None:
    buffer = LineBuffer(largest=10)
    with pytest.raises(BadLineError, match="without an end"):
        buffer.feed(b"{}\n{}\n" + b"x" * 11)
    assert list(buffer.lines) == [b"{}", b"{}"]


def test_a_reader_reads_on_behind_a_bad_line(pipe: tuple[MessageReader, int]) -> None:
    reader, write_end = pipe
    os.write(write_end, b'nonsense\n{"n": 1}\n{"n"')
    with pytest.raises(BadLineError):
        reader.receive(0)
    assert reader.receive(0) == {"n": 1}
    with pytest.raises(TimeoutError):
        reader.receive(0)
    os.write(write_end, b": 2}\n{")
    assert reader.receive() == {"n": 2}
    os.close(write_end)
    assert reader.receive() is None  # half a line is no message


def test_both_ends_of_a_pair_send(sockets: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = sockets
    near.send(word="é" * 40_000)  # more than is read at once
    far.send(word="back")
    assert far.receive() == {"word": "é" * 40_000}
    assert near.receive() == {"word": "back"}
    far.close()
    assert near.receive() is None
    with pytest.raises(OSError, match=r"pipe|reset"):
        near.send(word="too late")
