"""Addresses of nodes, and connectivity between them.

Connectivity between nodes as their ranks will need it: every agent answers at a free port, node 0 also at the ranks'
own, and when all nodes are there each calls others, once. A firewall between two of them is a finding then, and no hang
of minutes.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psutil

from framework.doctor.node.links import Reached, call_all, connect
from framework.errors import Problem
from framework.launch.hosts.hostfile import first_few, node_names
from framework.launch.rendezvous.messages import Message

# Names, addresses and interfaces: what node 0 listens on, and how the others reach it.


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


# Calls between all pairs up to here, and beyond it by each to the next ones, as rings and trees of NCCL mix nodes.
_ALL_PAIRS: Final = 64
_NEIGHBOURS: Final = 8
_CALL_SECONDS: Final = 4.0
_AGAIN_SECONDS: Final = 0.5
_AGAIN_FOR_SECONDS: Final = 16.0  # a pod's network policy may come into force some seconds after the pod
_ROUND_SECONDS: Final = 40.0
_LONGEST_TEXT: Final = 200
_MOST_TARGETS: Final = _ALL_PAIRS + 1

Target = tuple[str, int]  # address or name, port


class Calls:
    """Calls to other nodes on a thread of its own. What fails is tried again for some seconds: a packet or an answer of
    DNS may be lost.

    Attributes:
        is_over: all have ended.
        failed: number of the target -> what happened.
    """

    def __init__(self, targets: Sequence[Target], *, token: str) -> None:
        self.is_over = False
        self.failed: dict[int, Reached] = {}
        self.token = token
        threading.Thread(target=self._run, args=(targets,), daemon=True).start()

    def _run(self, targets: Sequence[Target]) -> None:
        deadline, waiting = time.monotonic() + _AGAIN_FOR_SECONDS, list(range(len(targets)))
        while waiting:
            reached = call_all([targets[number] for number in waiting], token=self.token, seconds=_CALL_SECONDS)
            self.failed = {number: each for number, each in zip(waiting, reached, strict=True) if each.reason}
            waiting = list(self.failed) if time.monotonic() < deadline else []
            time.sleep(_AGAIN_SECONDS if waiting else 0)
        self.is_over = True

    def reported(self) -> dict[str, Any]:
        """For node 0."""
        return {
            "token": self.token,
            "failed": [[number, each.address, each.reason] for number, each in self.failed.items()],
        }


@dataclass(frozen=True)
class Place:
    """Address at which a node can be called.

    Attributes:
        name: ``RANK (HOST)``.
        address: the one from which it reaches node 0, which gloo tells the other ranks as well.
        port: a free one, at which it answers.
    """

    name: str
    address: str
    port: int


class Round:
    """All nodes call each other, once; node 0 counts."""

    def __init__(self, places: Mapping[int, Place], *, master: Target) -> None:
        """Begin with the calls of node 0.

        Args:
            places: of all nodes.
            master: where the ranks will meet, by the name that they are given.
        """
        self._places, self._master = places, master
        self._token = secrets.token_hex(16)
        self._failed: dict[int, Mapping[int, Reached]] = {}
        self._began_at = time.monotonic()
        self._own = Calls(self._targets(0), token=self._token)

    def order(self, node: int) -> dict[str, Any]:
        """Build the request to a node: the addresses to call."""
        return {"token": self._token, "targets": self._targets(node)}

    def hear(self, node: int, message: Message) -> None:
        """The answer of a node; one of another round, or of another shape, is none."""
        failed, count = message.get("failed"), len(self._targets(node))
        if (
            message.get("token") == self._token
            and isinstance(failed, list)
            and all(_is_failure(each, count) for each in failed)
        ):
            self._failed[node] = {
                number: Reached(address, reason[:_LONGEST_TEXT]) for number, address, reason in failed
            }

    @property
    def is_over(self) -> bool:
        """All have answered, or were given the time for it."""
        if self._own.is_over:
            self._failed[0] = self._own.failed
        return len(self._failed) == len(self._places) or time.monotonic() - self._began_at > _ROUND_SECONDS

    def problems(self) -> list[Problem]:
        """Describe the failed connections: by those who are not reached, or by those who do not reach, whichever are
        fewer lines.
        """
        failures = [
            (node, self._called(node)[number], reached)
            for node, failed in sorted(self._failed.items())
            for number, reached in failed.items()
        ]
        by_called = _grouped(failures, lambda caller, called, reached: (called, reached.reason, reached.is_loopback))
        by_caller = _grouped(failures, lambda caller, called, reached: (caller, reached.reason, reached.is_loopback))
        groups = by_called if len(by_called) <= len(by_caller) else by_caller
        silent = [place.name for node, place in self._places.items() if node not in self._failed]
        return [*map(self._problem, groups), *([_silent_problem(silent)] if silent else [])]

    def _problem(self, group: Sequence[tuple[int, int, Reached]]) -> Problem:
        callers = list(dict.fromkeys(self._places[caller].name for caller, _, _ in group))
        called = list(dict.fromkeys(self._name(called) for _, called, _ in group))
        reached = group[0][2]
        at = f" at {reached.address}" if reached.address and len(called) == 1 else ""
        if reached.is_loopback and group[0][1] < 0 and not is_address(self._master[0]):
            return Problem(
                kind="name-loopback",
                file=node_names(callers),
                key=first_few(called),
                fix="mend /etc/hosts there",
                reason=f"the name leads back to whoever asks{at}: {reached.reason}",
            )
        return Problem(
            kind="port-not-reached",
            file=node_names(callers),
            key=first_few(called),
            fix=_LET_THEM,
            reason=f"not reached from there{at}: {reached.reason}",
        )

    def _name(self, called: int) -> str:
        return f"{self._master[0]}:{self._master[1]}" if called < 0 else f"node {self._places[called].name}"

    def _called(self, node: int) -> list[int]:
        """The nodes that a node calls, and -1 for the place where ranks meet."""
        count = len(self._places)
        near = count if count <= _ALL_PAIRS else _NEIGHBOURS + 1
        return [(node + step) % count for step in range(1, near)] + [-1]

    def _targets(self, node: int) -> list[Target]:
        return [
            self._master if called < 0 else (self._places[called].address, self._places[called].port)
            for called in self._called(node)
        ]


_LET_THEM: Final = (
    "let the nodes connect to each other at every port (firewall, security group, network policy, service mesh), or "
    "start with --no_preflight where ranks use another network"
)


def _silent_problem(names: Sequence[str]) -> Problem:
    return Problem(
        kind="port-not-reached",
        file=node_names(names),
        fix=_LET_THEM,
        reason=f"calling the others has not ended there within {_ROUND_SECONDS:.0f} s",
    )


def _grouped(failures: Sequence[tuple[int, int, Reached]], key: Callable[[int, int, Reached], Any]) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for failure in failures:
        groups.setdefault(key(*failure), []).append(failure)
    return list(groups.values())


def is_place(reported: object) -> bool:
    """Check whether this is an address and a port."""
    return (
        isinstance(reported, list)
        and len(reported) == 2
        and isinstance(reported[0], str)
        and 0 < len(reported[0]) <= _LONGEST_TEXT
        and type(reported[1]) is int
        and 0 < reported[1] < 1 << 16
    )


def targets_of(message: Message) -> list[Target]:
    """Return the targets in a request to call; none where it has another shape."""
    reported = message.get("targets")
    if not isinstance(reported, list) or len(reported) > _MOST_TARGETS or not all(map(is_place, reported)):
        return []
    return [(host, port) for host, port in reported]


def _is_failure(reported: object, num_targets: int) -> bool:
    if (
        not isinstance(reported, list)
        or len(reported) != 3
        or type(reported[0]) is not int
        or not 0 <= reported[0] < num_targets
    ):
        return False
    return isinstance(reported[2], str) and (reported[1] == "" or is_address(reported[1]))
