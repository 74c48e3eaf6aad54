"""Connections to other nodes, for tests: answers at a port, calls, marks in a shared folder."""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

_CALL_SECONDS: Final = 5.0
_LONGEST_TOKEN: Final = 64
_BACKLOG: Final = 1024
_MOST_PEERS: Final = 256  # that an echo port holds open
_LOOK_SECONDS: Final = 0.1
_MARK: Final = re.compile(r"\.preflight-[0-9a-f]{16}-[0-9]{1,6}")
_ALL_PAIRS: Final = 64
_NEIGHBOURS: Final = 8
AT_ONCE: Final = _ALL_PAIRS + 1  # one silent host must not keep the calls to others waiting


@dataclass(frozen=True)
class CallResult:
    """Result of a call.

    Attributes:
        address: to which the name resolves here; empty if it does not.
        reason: why the call failed; empty if it did not.
    """

    address: str
    reason: str = ""

    @property
    def is_loopback(self) -> bool:
        """Check whether the name leads back to this host."""
        return bool(self.address) and ip_address(self.address.partition("%")[0]).is_loopback


class Echo:
    """Server that returns to every caller the first 64 bytes that it sends, in one thread.

    Of too many silent callers the oldest one is closed.
    """

    def __init__(self, port: int, *, address: str = "") -> None:
        """Listen at a port (0: any that is free), on one `address` of this machine or on all."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server(
            (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=address == "::"
        )
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._is_closed = threading.Event()
        # in the order of their calls, with the time at which they are closed
        self._peers: dict[socket.socket, float] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Accept and answer callers until `close`, in the thread."""
        with self._server, selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ, self._server)
            while not self._is_closed.is_set():
                ready = {key.data for key, _ in selector.select(_LOOK_SECONDS)}
                over = self._answer(ready)
                if self._server in ready:
                    self._accept(selector)
                over.update(list(self._peers)[: max(0, len(self._peers) - _MOST_PEERS)])
                for peer in over:
                    selector.unregister(peer)
                    del self._peers[peer]
                    peer.close()
            for peer in self._peers:
                peer.close()

    def _answer(self, ready: set[socket.socket]) -> set[socket.socket]:
        """Answer the peers that have sent something, and return those to close."""
        over = set()
        for peer, until in self._peers.items():
            is_closed = peer in ready and not _send_back(peer)
            if is_closed or until < time.monotonic():
                over.add(peer)
        return over

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Accept one caller, which has `_CALL_SECONDS` until it is closed."""
        try:
            peer, _ = self._server.accept()
            peer.setblocking(False)
            self._peers[peer] = time.monotonic() + _CALL_SECONDS
            selector.register(peer, selectors.EVENT_READ, peer)
        except OSError:  # the caller is gone again, or too many files are open
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening, close all connections, and wait for the thread."""
        self._is_closed.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # it wakes the thread
        self._thread.join()


def _send_back(peer: socket.socket) -> bool:
    """Send back the bytes that have come; returns False if the connection is of no more use.

    The caller closes it, because the end that closes first keeps the port for a minute.
    """
    try:
        content = peer.recv(_LONGEST_TOKEN)
        return bool(content) and peer.send(content) == len(content)
    except OSError:
        return False


def connect(host: str, port: int, *, seconds: float) -> socket.socket:
    """Connect as `socket.create_connection` does, but never to this connection itself.

    The system may give a call to a free port of this machine that same port.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connection


def call(host: str, port: int, *, token: str, seconds: float = _CALL_SECONDS) -> CallResult:
    """Call an `Echo` with a token: a proxy that takes every connection does not return it.

    All addresses of the host are tried. If none answers, the result is that of the first one.
    """
    try:
        addresses = _addresses(host, port)
    except OSError as error:
        return CallResult("", f"its name is not known: {error.strerror or error}")
    except ValueError as error:
        return CallResult("", f"it cannot be a name: {error}")
    reached: list[CallResult] = []
    for address in addresses:
        reason = _reason_of_failure(address, port, token=token, seconds=seconds)
        if not reason:
            return CallResult(address)
        reached.append(CallResult(address, reason))
    return reached[0]


def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, each once, in the order in which ranks take them."""
    entries = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _reason_of_failure(address: str, port: int, *, token: str, seconds: float) -> str:
    """Call one address; returns why that failed, or an empty text."""
    try:
        with connect(address, port, seconds=seconds) as peer:
            peer.settimeout(seconds)
            peer.sendall(token.encode())
            answer = peer.recv(_LONGEST_TOKEN).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if answer == token else "something else answers there"


def call_all(
    targets: Sequence[tuple[str, int]], *, token: str, seconds: float = _CALL_SECONDS
) -> list[CallResult]:
    """Call (host, port) pairs at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, min(AT_ONCE, len(targets)))) as pool:
        return list(pool.map(lambda target: call(*target, token=token, seconds=seconds), targets))


def neighbours(node: int, count: int) -> list[int]:
    """Return the nodes that a node calls, of `count` nodes.

    They are all others, or if there are many, the next ones: NCCL's rings connect nodes in any
    order.
    """
    near = count if count <= _ALL_PAIRS else _NEIGHBOURS + 1
    return [(node + step) % count for step in range(1, near)]


def existing(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    for candidate in (folder, *folder.parents):
        if candidate.is_dir():
            return candidate
    return Path("/")


def mark_path(folder: Path, token: str, node: int) -> Path:
    """Return the path of a node's mark."""
    return folder / f".preflight-{token}-{node}"


@contextmanager
def mark(folder: Path, token: str, node: int) -> Iterator[None]:
    """Leave a mark during the block; raises OSError if it cannot be written."""
    path = mark_path(folder, token, node)
    path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def absent(marks: set[str], seen: set[str]) -> set[str]:
    """Return the marks that are absent, and add the others to `seen`.

    A folder, which a thousand nodes may share, is listed once at most.
    """
    new = marks - seen
    # Paths come from other nodes: only paths of marks are opened.
    valid = set(filter(_is_mark, new))
    for folder in {Path(path).parent for path in valid if not _is_file(path)}:
        with suppress(OSError, ValueError):
            list(folder.iterdir())  # makes NFS ask its server again
    present = set(filter(_is_file, valid))
    missing = new - present
    seen |= marks - missing
    return missing


def _is_mark(path: str) -> bool:
    return Path(path).is_absolute() and _MARK.fullmatch(Path(path).name) is not None


def _is_file(path: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(path).is_file()
    return False
