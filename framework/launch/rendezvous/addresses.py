"""Names, addresses and interfaces: what node 0 listens on, and how the others reach it."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import psutil

from framework.doctor.node.links import connect

_CONNECT_SECONDS: Final = 5.0
_LOOKUP_SECONDS: Final = 0.5
_WAITING_TO_BE_ACCEPTED: Final = 4096  # a thousand nodes may call at once; the kernel's own limit is below


class PortInUse(Exception):  # noqa: N818 - who has it is asked first
    """Something listens there already."""


class Dial:
    """One attempt to connect, on a thread of its own: a name server may take half a minute to say nothing.

    Attributes:
        connection: the socket, when it was answered.
        why: what happened instead.
    """

    def __init__(self, host: str, port: int) -> None:
        self.connection: socket.socket | None = None
        self.why = ""
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(host, port), daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """It is over."""
        return self._over.wait(seconds)

    def _run(self, host: str, port: int) -> None:
        try:
            self.connection = connect(host, port, seconds=_CONNECT_SECONDS)
        except socket.gaierror:
            self.why = "no DNS record"
        except TimeoutError:
            self.why = "no answer"
        except OSError as error:
            self.why = (error.strerror or str(error)).lower()
        except ValueError as error:  # no name that can be asked for
            self.why = str(error)
        finally:
            self._over.set()


class Lookup:
    """The addresses of a name, on a thread of its own, as `Dial`; None until they are known."""

    def __init__(self, host: str) -> None:
        self.addresses: list[str] | None = None
        threading.Thread(target=self._run, args=(host,), daemon=True).start()

    def _run(self, host: str) -> None:
        self.addresses = resolve(host)


def resolve(host: str) -> list[str]:
    """Its addresses, or none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(host: str) -> bool:
    """It means this machine to whoever asks."""
    addresses = resolve(host)
    return bool(addresses) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def listen_at(host: str, port: int) -> socket.socket | None:
    """A listener on that address alone; None where it is not an address of this machine, or not yet.

    A name that means loopback here, as Debian's /etc/hosts has it for a machine's own name, means something else to the
    others: then all addresses are listened on.

    Raises:
        PortInUse: by another node, or another program.
    """
    literal = host == "localhost" or is_address(host)
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        own = not literal and ipaddress.ip_address(address.partition("%")[0]).is_loopback
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("" if own else address, port))
            listener.listen(_WAITING_TO_BE_ACCEPTED)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(address) from None
            continue
        listener.setblocking(False)
        return listener
    return None


def interface_of(address: str) -> str:
    """The network interface that has it, or nothing."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return ""


def peer_name(rank: int, *, master: str, names: Sequence[str] = ()) -> str:
    """Another node as far as it is known: its name, where the names are numbered as pods are, and what DNS says about
    it.
    """
    numbered = re.fullmatch(r"(.*-)0(\..*)?", master)
    name = names[rank] if rank < len(names) else f"{numbered[1]}{rank}{numbered[2] or ''}" if numbered else ""
    if not name:
        return f"node {rank}"
    return f"{name} ({_looked_up(name.rpartition('@')[2])})"


def _looked_up(name: str) -> str:
    """Bounded: the answer is for a message only."""
    found: list[Mapping[str, list[str]]] = []
    lookup = threading.Thread(target=lambda: found.append({"addresses": resolve(name)}), daemon=True)
    lookup.start()
    lookup.join(_LOOKUP_SECONDS)
    if not found:
        return "no answer from DNS"
    return f"{found[0]['addresses'][0]}, not connected" if found[0]["addresses"] else "no DNS record"


def is_address(host: object) -> bool:
    """It is an address, and no name."""
    with suppress(ValueError):
        return isinstance(host, str) and bool(ipaddress.ip_address(host))
    return False
