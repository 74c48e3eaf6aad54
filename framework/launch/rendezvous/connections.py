"""The connections to node 0, before and after their handshake.

The other end may be any program that found the port. So their number is bounded, the address with
the most connections is the first to lose one, and callers of other jobs are counted and turned
away.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from framework.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.rendezvous.channel import Channel, ConnectionLost, new_nonce
from framework.launch.rendezvous.handshake import name_of

_MOST_REMEMBERED: Final = 1000


class TurnedAway(ConnectionLost):
    """Error: the caller is no node of this job; `kind` is that of the problem it was sent."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(f"{reason} [{kind}]")
        self.kind = kind


class Rejections:
    """Rejected connections: an address is logged once with each reason, then the 10th, 100th time.

    So a port scan does not fill the log.
    """

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}  # address -> kind, if it may be a node of this job
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, address: str, how: ConnectionLost) -> None:
        """Count a rejected connection, and log it if it is time to."""
        has_room = address in self._refused or len(self._refused) < _MOST_REMEMBERED
        if isinstance(how, TurnedAway) and has_room:
            self._refused[address] = how.kind
        key = (address, str(how))
        if key not in self._counts and len(self._counts) >= _MOST_REMEMBERED:
            key = ("other addresses", "")
        count = self._counts.get(key, 0) + 1
        self._counts[key] = count
        if count == 1:
            print_line(f"a connection from {address} was turned away: {how}")
        elif str(count).strip("0") == "1":  # 10, 100, 1000
            address, reason = key
            line = f"{count} connections from {address} were turned away"
            if reason:
                line += f": {reason}"
            print_line(line)

    def clear(self, address: str) -> None:
        """Forget that an address was refused, once a node from there was let in."""
        self._refused.pop(address, None)

    def reported(self) -> str:
        """Describe the refused callers that may be nodes of this job, as the end of a line.

        For example ``; turned away: 10.0.0.3 (token-refused)``; empty if there are none.
        """
        refused = [f"{address} ({kind})" for address, kind in self._refused.items()]
        if refused:
            return f"; turned away: {first_few(refused)}"
        return ""


class Client:
    """A connection to node 0, before and after its HELLO, which is empty before.

    Attributes:
        nonce, challenged_at: of node 0's challenge, the latter as `time.time()`.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.nonce = new_nonce()
        self.challenged_at = time.time()
        self.hello: dict[str, Any] = {}

    @property
    def node(self) -> int:
        """Number of the node, which is its rank as long as no node was lost."""
        return int(self.hello["node_rank"])

    @property
    def name(self) -> str:
        """``node RANK (HOST)``."""
        return f"node {name_of(self.hello)}"


class Clients:
    """All connections to node 0.

    Attributes:
        present: nodes of this job, after their handshake.
        version: changes whenever a node has come or gone.
    """

    def __init__(self, *, most_unknown: int) -> None:
        self._most_unknown = most_unknown
        self._unknown: list[Client] = []
        self.present: list[Client] = []
        self.version = 0
        self.rejections = Rejections()

    def add(self, client: Client) -> None:
        """Add a connection before its handshake.

        If there are too many, close the oldest one of the address that has the most.
        """
        self._unknown.append(client)
        if len(self._unknown) > self._most_unknown:
            addresses = [waiting.channel.name for waiting in self._unknown]
            address = Counter(addresses).most_common(1)[0][0]
            oldest = self._unknown[addresses.index(address)]
            self.part(oldest, ConnectionLost("there are more connections than nodes"))

    def let_in(self, client: Client, hello: dict[str, Any]) -> None:
        """Count a client among the nodes of this job, unless its connection is closed already."""
        if client in self._unknown:
            self._unknown.remove(client)
            client.hello = hello
            self.present.append(client)
            self.version += 1
            self.rejections.clear(client.channel.name)

    def part(self, client: Client, how: ConnectionLost, *, is_quiet: bool = False) -> None:
        """Close and forget a connection, and log it unless it was forgotten before.

        A node is not logged if `is_quiet`; a caller that was no node is counted as rejected.
        """
        client.channel.close()
        if client in self.present:
            self.present.remove(client)
            self.version += 1
            if not is_quiet:
                print_line(f"{client.name} is gone again: {how}")
        elif client in self._unknown:
            self._unknown.remove(client)
            self.rejections.add(client.channel.name, how)

    def close_unknown(self) -> None:
        """Close the connections that have not done their handshake."""
        for client in self._unknown:
            client.channel.close()
        self._unknown.clear()
