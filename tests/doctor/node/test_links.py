"""Which node reaches another, and which node sees another's files."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from framework.doctor.node.links import (
    CallResult,
    Echo,
    absent,
    call,
    call_all,
    existing,
    mark,
    mark_path,
)
from tests.ports import free_ports


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Take every connection, as a proxy does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(64)
                peer.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def test_an_echo_answers_many_times_until_it_is_closed() -> None:
    echo = Echo(0)
    assert [each.reason for each in call_all([("127.0.0.1", echo.port)] * 5, token="t")] == [""] * 5
    echo.close()
    assert call("127.0.0.1", echo.port, token="t").reason == "connection refused"


def test_a_port_that_is_taken() -> None:
    echo = Echo(0)
    with pytest.raises(OSError, match="in use"):
        Echo(echo.port)
    echo.close()


def test_an_echo_answers_at_its_address_alone_and_leaves_its_port_free() -> None:
    """The ranks listen there next, and not all of them take a port that waits for late packets
    (TIME_WAIT).
    """
    echo = Echo(0, address="127.0.0.2")
    assert call("127.0.0.2", echo.port, token="t").reason == ""
    assert call("127.0.0.1", echo.port, token="t").reason == "connection refused"
    echo.close()
    deadline = time.monotonic() + 20  # TIME_WAIT is a minute
    while not is_free("127.0.0.2", echo.port):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_free(address: str, port: int) -> bool:
    with socket.socket() as next_one:
        try:
            next_one.bind((address, port))
        except OSError:
            return False
        return True


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks try every address as well: the first may have no listener."""
    echo = Echo(0, address="127.0.0.2")
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, echo.port))
        for address in ("127.0.0.9", "127.0.0.2")
    ]
    really = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest: found if host == "node-0" else really(host, *rest),
    )
    assert call("node-0", echo.port, token="t") == CallResult("127.0.0.2")
    echo.close()


def test_an_answer_of_another_program_is_no_answer() -> None:
    with server(b"HTTP/1.1 400 Bad Request") as port:
        assert call("127.0.0.1", port, token="t").reason == "something else answers there"


def test_a_call_that_is_given_the_port_it_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener the kernel may choose the very port that is called for the caller's own
    end: it answers itself.
    """

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        itself = socket.socket()
        itself.settimeout(timeout)
        itself.bind(address)
        itself.connect(address)
        return itself

    monkeypatch.setattr(socket, "create_connection", create_connection)
    assert call("127.0.0.1", free_ports(1), token="x").reason == "connection refused"


def test_silence_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert (
            call("127.0.0.1", listening.getsockname()[1], token="t", seconds=0.2).reason
            == "no answer within 0 s"
        )


def test_names_that_lead_nowhere_or_back() -> None:
    assert "name is not known" in call("no-such-host.invalid", 1, token="t").reason
    assert call("localhost", 1, token="t").is_loopback


TOKEN = "0123456789abcdef"


def test_marks_are_seen_and_go_with_their_block(tmp_path: Path) -> None:
    with mark(tmp_path, TOKEN, 0), mark(tmp_path, TOKEN, 1):
        marks = {str(mark_path(tmp_path, TOKEN, node)) for node in (0, 1)}
        missing = str(mark_path(tmp_path, TOKEN, 2))
        other = str(mark_path(tmp_path, "f" * 16, 0))
        seen: set[str] = set()
        assert absent(marks | {missing, other}, seen) == {missing, other}
        assert seen == marks
    assert not list(tmp_path.iterdir())


def test_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    assert existing(tmp_path / "runs" / "a") == tmp_path
    (tmp_path / "file").touch()
    assert existing(tmp_path / "file" / "a") == tmp_path
