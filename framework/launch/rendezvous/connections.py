"""The connections to node 0, before and after their handshake. The other end may be anything that
found the port: their number is bounded, whoever holds most of them is the first to lose one, and
what is none of this job is counted and turned away.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from framework.launch.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.rendezvous.channel import Channel, ConnectionLost, new_nonce
from framework.launch.rendezvous.handshake import name_of

_MOST_REMEMBERED: Final = 1000


class TurnedAway(ConnectionLost):
    """A caller that is none of this job, with the kind of the problem that it was told."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(f"{reason} [{kind}]")
        self.kind = kind


class Rejections:
    """Rejected connections: each address is logged once with each reason, and then the tenth time,
    the hundredth...
    """

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}  # address -> kind, of what may be a node of this job
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, address: str, how: ConnectionLost) -> None:
        """Count one more; whoever scans ports must not fill the log."""
        if isinstance(how, TurnedAway) and (
            address in self._refused or len(self._refused) < _MOST_REMEMBERED
        ):
            self._refused[address] = how.kind
        key = (address, str(how))
        if key not in self._counts and len(self._counts) >= _MOST_REMEMBERED:
            key = ("other addresses", "")
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count == 1:
            print_line(f"a connection from {address} was turned away: {how}")
        elif str(count).strip("0") == "1":
            print_line(
                f"{count} connections from {key[0]} were turned away"
                + (f": {key[1]}" if key[1] else "")
            )

    def clear(self, address: str) -> None:
        """Somebody from there was let in."""
        self._refused.pop(address, None)

    def reported(self) -> str:
        """``; turned away: 10.0.0.3 (token-refused)``, or nothing: only of those that may be nodes
        of this job.
        """
        refused = [f"{address} ({kind})" for address, kind in self._refused.items()]
        if refused:
            return f"; turned away: {first_few(refused)}"
        return ""


class Client:
    """A connection to node 0, before and after its HELLO, which is empty before."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.nonce = new_nonce()
        self.challenged_at = time.time()
        self.hello: dict[str, Any] = {}

    @property
    def node(self) -> int:
        """Its number, which is its rank where nobody was lost."""
        return int(self.hello["node_rank"])

    @property
    def name(self) -> str:
        """As people know it."""
        return f"node {name_of(self.hello)}"


class Clients:
    """All connections to node 0; `version` is another number whenever a node has come or gone."""

    def __init__(self, *, most_unknown: int) -> None:
        self._most_unknown = most_unknown
        self._unknown: list[Client] = []
        self.present: list[Client] = []
        self.version = 0
        self.rejections = Rejections()

    def add(self, client: Client) -> None:
        """Take a connection in. Of too many without a handshake, the oldest of the address that has
        most goes.
        """
        self._unknown.append(client)
        if len(self._unknown) > self._most_unknown:
            address = Counter(each.channel.name for each in self._unknown).most_common(1)[0][0]
            oldest = next(each for each in self._unknown if each.channel.name == address)
            self.part(oldest, ConnectionLost("there are more connections than nodes"))

    def let_in(self, client: Client, hello: dict[str, Any]) -> None:
        """Count it among the nodes of this job."""
        if client in self._unknown:
            self._unknown.remove(client)
            client.hello = hello
            self.present.append(client)
            self.version += 1
            self.rejections.clear(client.channel.name)

    def part(self, client: Client, how: ConnectionLost, *, is_quiet: bool = False) -> bool:
        """Close a connection and say so; returns whether it was that of a node."""
        client.channel.close()
        if client in self.present:
            self.present.remove(client)
            self.version += 1
            if not is_quiet:
                print_line(f"{client.name} is gone again: {how}")
            return True
        if client in self._unknown:
            self._unknown.remove(client)
            self.rejections.add(client.channel.name, how)
        return False

    def close_unknown(self) -> None:
        """Close all but those of nodes."""
        for client in self._unknown:
            client.channel.close()
        self._unknown.clear()
