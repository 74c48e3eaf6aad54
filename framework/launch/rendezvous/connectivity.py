"""Addresses of nodes, and connectivity between them as their ranks will need it.

Every agent answers at a free port, node 0 also at the ranks' own, and when all nodes are there each
calls others, once. A firewall between two of them is a finding then, and no hang of minutes.
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
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import psutil

from framework.doctor.node.links import AT_ONCE, Reached, call_all, connect, neighbours
from framework.errors import Problem
from framework.launch.hosts.hostfile import first_few, node_names
from framework.launch.rendezvous.channel import Message, foreign

_CONNECT_SECONDS: Final = 5.0
_LOOKUP_SECONDS: Final = 0.5
# a thousand nodes may call at once; the kernel's own limit is below
_WAITING_TO_BE_ACCEPTED: Final = 4096
_CALL_SECONDS: Final = 4.0
_AGAIN_SECONDS: Final = 0.5
# a pod's network policy may come into force some seconds after the pod
_AGAIN_FOR_SECONDS: Final = 16.0
_ROUND_SECONDS: Final = 40.0
_LONGEST_TEXT: Final = 200
_LEAST_PORT: Final = 1024
_LET_THEM: Final = (
    "let the nodes connect to each other at every port (firewall, security group, network policy, "
    "service mesh), or start with --no_preflight where ranks use another network"
)

Target = tuple[str, int]  # address or name, port
_T = TypeVar("_T")


class PortInUse(Exception):  # noqa: N818 - who has it is asked first
    """Something listens there already."""


def in_background(work: Callable[..., _T], *arguments: Any) -> Future[_T]:
    """Begin a call on a daemon thread: a name server may take half a minute, and nobody waits for
    it at the end.
    """
    future: Future[_T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():  # from here on nobody can cancel it
            return
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def dial(host: str, port: int) -> socket.socket | str:
    """Try to connect, once; returns the connection, or what happened instead."""
    try:
        return connect(host, port, seconds=_CONNECT_SECONDS)
    except socket.gaierror:
        return "no DNS record"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError as error:  # no name that can be asked for
        return str(error)


def resolve(host: str) -> list[str]:
    """Its addresses, or none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(host: str) -> bool:
    """It means this machine to whoever asks."""
    addresses = resolve(host)
    return bool(addresses) and all(
        ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses
    )


def listen_at(host: str, port: int) -> socket.socket | None:
    """A listener on that address alone; None where it is not an address of this machine, or not
    yet; PortInUse where another has it. A name that means loopback here, as Debian's /etc/hosts has
    it for a machine's own name, means something else to the others: then all addresses are listened
    on.
    """
    literal = host == "localhost" or is_address(host)
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        own = not literal and ipaddress.ip_address(address.partition("%")[0]).is_loopback
        try:
            place = ("" if own else address, port)
            both = own and ":" in address and socket.has_dualstack_ipv6()
            backlog = _WAITING_TO_BE_ACCEPTED
            listener = socket.create_server(
                place, family=family, backlog=backlog, dualstack_ipv6=both
            )
        except OSError as error:
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
    """Another node as far as it is known: its name, where names are numbered as pods are, and what
    DNS says of it.
    """
    numbered = re.fullmatch(r"(.*-)0(\..*)?", master)
    if rank < len(names):
        name = names[rank]
    elif numbered:
        name = f"{numbered[1]}{rank}{numbered[2] or ''}"
    else:
        name = ""
    if not name:
        return f"node {rank}"
    return f"{name} ({_looked_up(name.rpartition('@')[2])})"


def _looked_up(name: str) -> str:
    lookup = in_background(resolve, name)
    wait([lookup], _LOOKUP_SECONDS)  # no longer: the answer is for a message only
    if not lookup.done():
        return "no answer from DNS"
    if lookup.result():
        return f"{lookup.result()[0]}, not connected"
    return "no DNS record"


def is_address(host: object) -> bool:
    """It is an address, and no name."""
    with suppress(ValueError):
        return isinstance(host, str) and bool(ipaddress.ip_address(host))
    return False


def call_others(targets: Sequence[Target], token: str) -> dict[int, Reached]:
    """Call other nodes; returns what happened by number of the target, of those that were not
    reached. What fails is tried again for some seconds: a packet or an answer of DNS may be lost.
    """
    deadline = time.monotonic() + _AGAIN_FOR_SECONDS
    failed = dict.fromkeys(range(len(targets)), Reached(""))
    while True:
        reached = call_all(
            [targets[number] for number in failed], token=token, seconds=_CALL_SECONDS
        )
        failed = {number: each for number, each in zip(failed, reached, strict=True) if each.reason}
        if not failed or time.monotonic() >= deadline:
            return failed
        time.sleep(_AGAIN_SECONDS)


class Endpoint(NamedTuple):
    """A node, ``RANK (HOST)``, and where it answers: at a free port of the address from which it
    reaches node 0, which gloo tells the other ranks as well.
    """

    name: str
    address: str
    port: int


class Round:
    """All nodes call each other, once; node 0 counts."""

    def __init__(self, places: Mapping[int, Endpoint], *, master: Target) -> None:
        """Begin with the calls of node 0; `master`: where the ranks will meet, by the name that
        they are given.
        """
        self._places = places
        self._master = master
        self._token = secrets.token_hex(16)
        self._failed: dict[int, Mapping[int, Reached]] = {}
        self._began_at = time.monotonic()
        self._own = in_background(call_others, self._targets(0), self._token)

    def order(self, node: int) -> dict[str, Any]:
        """Build the request to a node: the addresses to call, without the place where ranks meet,
        which it knows.
        """
        return {"token": self._token, "targets": self._targets(node)[:-1]}

    def hear(self, node: int, message: Message) -> None:
        """The answer of a node; one of another round, or of another shape, is none."""
        failed = message.get("failed")
        count = len(self._called(node))
        if message.get("token") != self._token or not isinstance(failed, list):
            return
        if all(_is_failure(each, count) for each in failed):
            self._failed[node] = {
                number: Reached(place, reason[:_LONGEST_TEXT]) for number, place, reason in failed
            }

    @property
    def is_over(self) -> bool:
        """All have answered, or were given the time for it."""
        if self._own.done():
            self._failed[0] = self._own.result()
        return (
            len(self._failed) == len(self._places)
            or time.monotonic() - self._began_at > _ROUND_SECONDS
        )

    def problems(self) -> list[Problem]:
        """Describe the failed connections, by those who call or those who are called: whichever are
        fewer lines.
        """
        by_called: dict[Any, list[tuple[int, int, Reached]]] = {}
        by_caller: dict[Any, list[tuple[int, int, Reached]]] = {}
        for caller, failed in sorted(self._failed.items()):
            for number, reached in failed.items():
                called = self._called(caller)[number]
                how = (reached.reason, reached.is_loopback)
                by_called.setdefault((called, how), []).append((caller, called, reached))
                by_caller.setdefault((caller, how), []).append((caller, called, reached))
        problems = [self._problem(group) for group in min(by_called, by_caller, key=len).values()]
        silent = [place.name for node, place in self._places.items() if node not in self._failed]
        if silent:
            reason = f"calling the others has not ended there within {_ROUND_SECONDS:.0f} s"
            problems.append(
                Problem(
                    kind="port-not-reached", file=node_names(silent), fix=_LET_THEM, reason=reason
                )
            )
        return problems

    def _problem(self, group: Sequence[tuple[int, int, Reached]]) -> Problem:
        names = {node: f"node {place.name}" for node, place in self._places.items()} | {
            -1: "{}:{}".format(*self._master)
        }
        callers = list(dict.fromkeys(self._places[caller].name for caller, _, _ in group))
        called = list(dict.fromkeys(names[called] for _, called, _ in group))
        reached = group[0][2]
        if reached.address and len(called) == 1:
            at = f" at {reached.address}"
        else:
            at = ""
        kind = "port-not-reached"
        what = "not reached from there"
        fix = _LET_THEM
        if reached.is_loopback and group[0][1] < 0 and not is_address(self._master[0]):
            kind = "name-loopback"
            what = "the name leads back to whoever asks"
            fix = "mend /etc/hosts there"
        return Problem(
            kind,
            f"{what}{at}: {reached.reason}",
            fix,
            key=first_few(called),
            file=node_names(callers),
        )

    def _called(self, node: int) -> list[int]:
        """Nodes that a node calls, and -1 for the place where ranks meet."""
        return [*neighbours(node, len(self._places)), -1]

    def _targets(self, node: int) -> list[Target]:
        return [
            self._master if called < 0 else self._places[called][1:]
            for called in self._called(node)
        ]


def is_place(reported: object) -> bool:
    """Check whether this is an address at which a node may answer, and a port that it may have:
    others will connect to it, so no name, and no port of a system's own services.
    """
    if not isinstance(reported, list) or list(map(type, reported)) != [str, int]:
        return False
    if not is_address(reported[0]) or not _LEAST_PORT <= reported[1] < 1 << 16:
        return False
    address = ipaddress.ip_address(reported[0])
    return not (address.is_multicast or address.is_unspecified)


def targets_of(message: Message, *, most: int) -> list[Target]:
    """Return the targets in a request to call; NoAgent where one is no place of a node, or there
    are too many.
    """
    reported = message.get("targets")
    if (
        not isinstance(reported, list)
        or len(reported) >= min(AT_ONCE, most)
        or not all(map(is_place, reported))
    ):
        raise foreign()
    return [(host, port) for host, port in reported]


def _is_failure(reported: object, num_targets: int) -> bool:
    if not isinstance(reported, list) or list(map(type, reported)) != [int, str, str]:
        return False
    return 0 <= reported[0] < num_targets and (reported[1] == "" or is_address(reported[1]))
