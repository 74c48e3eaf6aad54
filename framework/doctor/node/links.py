"""Connections for the comparison with other nodes: answers at a port, calls, marks in a shared
folder.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

_CALL_SECONDS: Final = 5.0
# NFS may show another host's new file after its attribute cache expires, 3 s by default.
_SEE_SECONDS: Final = 5.0
_LONGEST_TOKEN: Final = 64
_BACKLOG: Final = 1024
_MOST_PEERS: Final = 256  # that an echo port holds open
_LOOK_SECONDS: Final = 0.1
_MARK: Final = re.compile(r"\.preflight-[0-9a-f]{16}-[0-9]{1,6}")
_ALL_PAIRS: Final = 64
_NEIGHBOURS: Final = 8
AT_ONCE: Final = _ALL_PAIRS + 1  # one silent host must not keep the calls to others waiting


@dataclass(frozen=True)
class Reached:
    """Result of a call: the address that the name stands for here, if any, and why it was not
    reached, if so.
    """

    address: str
    reason: str = ""

    @property
    def is_loopback(self) -> bool:
        """Check whether the name leads back to this host."""
        return bool(self.address) and ip_address(self.address.partition("%")[0]).is_loopback


class Echo:
    """Returns to every caller the first 64 bytes that it sends, in one thread; of many silent ones
    the oldest ends.
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
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # in the order in which they came, with the time when they are over
        peers: dict[socket.socket, float] = {}
        with self._server, selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._is_closed.is_set():
                ready = [key.fileobj for key, _ in selector.select(_LOOK_SECONDS)]
                over = [peer for peer, until in peers.items() if until < time.monotonic()]
                for peer in [
                    one for one in ready if isinstance(one, socket.socket) and one in peers
                ]:
                    over += [] if _answered(peer) else [peer]
                if self._server in ready:
                    try:
                        peer, _ = self._server.accept()
                        peer.setblocking(False)
                        peers[peer] = time.monotonic() + _CALL_SECONDS
                        selector.register(peer, selectors.EVENT_READ)
                    except OSError:  # whoever called is gone again; or too many files are open
                        time.sleep(0.01)
                over += list(peers)[: max(0, len(peers) - _MOST_PEERS)]
                for peer in {*over}:
                    selector.unregister(peer)
                    del peers[peer]
                    peer.close()
            for peer in peers:
                peer.close()

    def close(self) -> None:
        """Stop listening."""
        self._is_closed.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # it wakes the thread
        self._thread.join()


def _answered(peer: socket.socket) -> bool:
    """Answer what has come; false where the caller has closed: who closes first keeps the port for
    a minute.
    """
    try:
        content = peer.recv(_LONGEST_TOKEN)
        return bool(content) and peer.send(content) == len(content)
    except OSError:
        return False


def connect(host: str, port: int, *, seconds: float) -> socket.socket:
    """As `socket.create_connection`, except to itself: a call to a port where nobody listens may be
    given that port.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connection


def call(host: str, port: int, *, token: str, seconds: float = _CALL_SECONDS) -> Reached:
    """Ask an `Echo`: a proxy that takes every connection does not answer with the token."""
    try:
        found = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as error:
        return Reached("", f"its name is not known: {error.strerror or error}")
    except ValueError as error:
        return Reached("", f"it cannot be a name: {error}")
    reached: list[Reached] = []
    for address in dict.fromkeys(str(entry[4][0]) for entry in found):  # as ranks do
        reached.append(Reached(address, _asked(address, port, token=token, seconds=seconds)))
        if not reached[-1].reason:
            return reached[-1]
    return reached[0]


def _asked(address: str, port: int, *, token: str, seconds: float) -> str:
    try:
        with connect(address, port, seconds=seconds) as peer:
            peer.settimeout(seconds)
            peer.sendall(token.encode())
            stated = peer.recv(_LONGEST_TOKEN).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if stated == token else "something else answers there"


def call_all(
    targets: Sequence[tuple[str, int]], *, token: str, seconds: float = _CALL_SECONDS
) -> list[Reached]:
    """Call (host, port) pairs at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, min(AT_ONCE, len(targets)))) as pool:
        return list(pool.map(lambda target: call(*target, token=token, seconds=seconds), targets))


def neighbours(node: int, count: int) -> list[int]:
    """The nodes that one of so many calls: all others, or of very many the next ones, as NCCL's
    rings mix nodes.
    """
    near = count if count <= _ALL_PAIRS else _NEIGHBOURS + 1
    return [(node + step) % count for step in range(1, near)]


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))


def mark_path(folder: Path, token: str, node: int) -> Path:
    """The mark of a node."""
    return folder / f".preflight-{token}-{node}"


@contextmanager
def mark(folder: Path, token: str, node: int) -> Iterator[None]:
    """Leave a mark for the time of the block; an OSError where it cannot be written."""
    path = mark_path(folder, token, node)
    path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def unseen(
    folder: Path, token: str, nodes: Iterable[int], *, seconds: float = _SEE_SECONDS
) -> list[int]:
    """Nodes whose marks are not seen here, after waiting for them."""
    marks = {str(mark_path(folder, token, node)): node for node in nodes}
    seen = set[str]()
    deadline = time.monotonic() + seconds
    while (missing := absent({*marks}, seen)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [node for path, node in marks.items() if path in missing]


def absent(marks: set[str], seen: set[str]) -> set[str]:
    """Return the marks that are absent; a folder, which a thousand nodes may share, is listed once
    at most.
    """
    # Paths come from other nodes: nothing but marks is looked at.
    places = {
        path
        for path in marks - seen
        if Path(path).is_absolute() and _MARK.fullmatch(Path(path).name)
    }
    for folder in {Path(path).parent for path in places if not _is_file(path)}:
        with suppress(OSError, ValueError):
            list(folder.iterdir())  # makes NFS look again
    missing = marks - seen - {path for path in places if _is_file(path)}
    seen |= marks - missing
    return missing


def _is_file(path: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(path).is_file()
    return False
