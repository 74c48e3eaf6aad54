"""Addresses of nodes, and connectivity between them as their ranks will need it.

Every agent answers at a free port, node 0 also at the port of the ranks. When all nodes are there,
each one calls others, once. A firewall between two of them is then a problem with a name, and not a
hang of minutes.
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
from typing import Any, Final, NamedTuple, TypeVar

import psutil

from framework.doctor.node.links import AT_ONCE, CallResult, call_all, connect, neighbours
from framework.errors import Problem
from framework.hosts.hostfile import first_few, node_names
from framework.launch.rendezvous.channel import Message, NoAgent, foreign
from framework.launch.rendezvous.messages import Reach, Reached, is_address, read_message

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
_LET_THEM: Final = (
    "let the nodes connect to each other at every port (firewall, security group, network policy, "
    "service mesh), or start with --no_preflight where ranks use another network"
)

Target = tuple[str, int]  # address or name, port
_T = TypeVar("_T")


class PortInUse(Exception):  # noqa: N818 - the listener is called before it is an error
    """Error: a program listens there already."""


def in_background(work: Callable[..., _T], *arguments: Any) -> Future[_T]:
    """Begin a call on a daemon thread: a name server may take half a minute.

    The end of this process does not wait for the thread.
    """
    future: Future[_T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            return
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def dial(host: str, port: int) -> socket.socket | str:
    """Try to connect, once, for some seconds; returns the connection, or why there is none."""
    try:
        return connect(host, port, seconds=_CONNECT_SECONDS)
    except socket.gaierror:
        return "no DNS record"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError as error:  # no name that can be looked up
        return str(error)


def resolve(host: str) -> list[str]:
    """Return the addresses of a host, none if it is not known; blocks while DNS answers."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _is_loopback_address(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_loopback(host: str) -> bool:
    """Check whether this name means the machine itself, on every machine."""
    addresses = resolve(host)
    return bool(addresses) and all(_is_loopback_address(address) for address in addresses)


def listen_at(host: str, port: int) -> socket.socket | None:
    """Listen at the address of a host alone; None as long as this machine does not have it.

    A name that means loopback here, as in Debian's /etc/hosts the machine's own name does, means
    another address on the other nodes: then this listens at all addresses.

    Raises:
        PortInUse: another program listens there.
    """
    is_literal = host == "localhost" or is_address(host)
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        at_all_addresses = not is_literal and _is_loopback_address(address)
        try:
            listener = socket.create_server(
                ("" if at_all_addresses else address, port),
                family=family,
                backlog=_WAITING_TO_BE_ACCEPTED,
                dualstack_ipv6=at_all_addresses and ":" in address and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(address) from None
            continue
        listener.setblocking(False)
        return listener
    return None


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address; empty if there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return ""


def peer_name(rank: int, *, master: str, names: Sequence[str] = ()) -> str:
    """Describe another node: its name with the answer of DNS, or its number.

    Without a hostfile the name follows from `master`, if that is numbered as the names of pods are.
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
    return f"{name} ({_dns_answer(name.rpartition('@')[2])})"


def _dns_answer(name: str) -> str:
    """Describe what DNS answers for a name within half a second."""
    lookup = in_background(resolve, name)
    wait([lookup], _LOOKUP_SECONDS)  # no longer: the answer is for a message only
    if not lookup.done():
        return "no answer from DNS"
    if lookup.result():
        return f"{lookup.result()[0]}, not connected"
    return "no DNS record"


def call_others(targets: Sequence[Target], token: str) -> dict[int, CallResult]:
    """Call other nodes, and return the failed calls, by the place of the target.

    This blocks: a failed call is tried again for `_AGAIN_FOR_SECONDS`, because a packet or an
    answer of DNS may be lost.
    """
    deadline = time.monotonic() + _AGAIN_FOR_SECONDS
    left = list(range(len(targets)))
    while True:
        calls = call_all([targets[number] for number in left], token=token, seconds=_CALL_SECONDS)
        failed = {number: call for number, call in zip(left, calls, strict=True) if call.reason}
        if not failed or time.monotonic() >= deadline:
            return failed
        left = list(failed)
        time.sleep(_AGAIN_SECONDS)


class Endpoint(NamedTuple):
    """Name of a node, ``RANK (HOST)``, and the address and port where it answers.

    It is a free port of the address from which the node reaches node 0, which gloo, too, sends to
    the other ranks.
    """

    name: str
    address: str
    port: int


class Round:
    """All nodes call each other, once; node 0 collects the results."""

    def __init__(self, endpoints: Mapping[int, Endpoint], *, master: Target) -> None:
        """Begin with the calls of node 0.

        Args:
            endpoints: of all nodes, by their numbers.
            master: where the ranks will meet, by the name that they are given.
        """
        self._endpoints = endpoints
        self._nodes = list(endpoints)
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._master = master
        self._token = secrets.token_hex(16)
        self._failed: dict[int, Mapping[int, CallResult]] = {}
        self._began_at = time.monotonic()
        self._own_calls = in_background(call_others, self._targets(0), self._token)

    def order(self, node: int) -> dict[str, Any]:
        """Build the request to a node: the endpoints to call, without that of the ranks.

        The node has the endpoint of the ranks in its own topology.
        """
        return {"token": self._token, "targets": self._targets(node)[:-1]}

    def hear(self, node: int, message: Message) -> None:
        """Note the results of a node; a message of another round, or malformed, is ignored."""
        try:
            reached = read_message(Reached, message)
        except NoAgent:
            return
        count = len(self._called(node))
        is_known = all(number < count for number, _, _ in reached.failed)
        if reached.token == self._token and is_known:
            calls = {}
            for number, address, reason in reached.failed:
                calls[number] = CallResult(address, reason[:_LONGEST_TEXT])
            self._failed[node] = calls

    @property
    def is_over(self) -> bool:
        """True once all nodes have answered, or have had the time to."""
        if self._own_calls.done():
            self._failed[0] = self._own_calls.result()
        if len(self._failed) == len(self._endpoints):
            return True
        return time.monotonic() - self._began_at > _ROUND_SECONDS

    @property
    def num_calls(self) -> int:
        """Number of connections that are tried."""
        return sum(len(self._called(node)) for node in self._endpoints)

    def problems(self, *, with_master: bool = True) -> list[Problem]:
        """Describe the failed connections, grouped by caller or by called node.

        The grouping with fewer problems is used. `with_master`: also connections to the endpoint of
        the ranks.
        """
        by_called: dict[Any, list[tuple[int, int, CallResult]]] = {}
        by_caller: dict[Any, list[tuple[int, int, CallResult]]] = {}
        for caller, failed in sorted(self._failed.items()):
            for number, reached in failed.items():
                called = self._called(caller)[number]
                if called < 0 and not with_master:
                    continue
                how = (reached.reason, reached.is_loopback)
                by_called.setdefault((called, how), []).append((caller, called, reached))
                by_caller.setdefault((caller, how), []).append((caller, called, reached))
        groups = min(by_called, by_caller, key=len)
        problems = [self._problem(group) for group in groups.values()]
        silent = [
            endpoint.name for node, endpoint in self._endpoints.items() if node not in self._failed
        ]
        if silent:
            reason = f"calling the others has not ended there within {_ROUND_SECONDS:.0f} s"
            problems.append(
                Problem(
                    kind="port-not-reached", file=node_names(silent), fix=_LET_THEM, reason=reason
                )
            )
        return problems

    def _problem(self, group: Sequence[tuple[int, int, CallResult]]) -> Problem:
        """Describe failed calls with one reason, given as (caller, called node, result)."""
        names = {node: f"node {endpoint.name}" for node, endpoint in self._endpoints.items()}
        names[-1] = f"{self._master[0]}:{self._master[1]}"
        callers = list(dict.fromkeys(self._endpoints[caller].name for caller, _, _ in group))
        called = list(dict.fromkeys(names[node] for _, node, _ in group))
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
            what = "the name leads back to the host that asks"
            fix = "correct /etc/hosts there"
        return Problem(
            kind,
            f"{what}{at}: {reached.reason}",
            fix,
            key=first_few(called),
            file=node_names(callers),
        )

    def _called(self, node: int) -> list[int]:
        """Return the numbers of the nodes that a node calls; -1 is the endpoint of the ranks."""
        near = neighbours(self._places[node], len(self._nodes))
        return [*(self._nodes[place] for place in near), -1]

    def _targets(self, node: int) -> list[Target]:
        targets: list[Target] = []
        for called in self._called(node):
            if called < 0:
                targets.append(self._master)
            else:
                endpoint = self._endpoints[called]
                targets.append((endpoint.address, endpoint.port))
        return targets


def targets_of(reach: Reach, *, most: int) -> list[Target]:
    """Return the targets in a request to call. Raises NoAgent if there are too many.

    A node calls fewer nodes than the `most` in the job, and fewer than `AT_ONCE`.
    """
    if len(reach.targets) >= min(AT_ONCE, most):
        raise foreign()
    return list(reach.targets)
