"""Node 0 while it waits for the others: compares them, has them call each other, and says GO or what differs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NoReturn

from framework.errors import ConfigError, PeerLostError, Problem, RunStopped
from framework.launch.rendezvous.connections import Client, Clients, TurnedAway
from framework.launch.rendezvous.connectivity import Place, Round, peer_name
from framework.launch.rendezvous.handshake import disagreements, is_hello, name_of
from framework.launch.rendezvous.messages import (
    LARGEST_LINE_BYTES,
    ConnectionLost,
    Message,
    Peers,
    foreign,
    is_proof,
    proof,
)
from framework.launch.rendezvous.session import CALLING_SECONDS, LOOK_SECONDS, SPARE_CONNECTIONS, Session
from framework.system.limits import require
from framework.system.log import print_problem

_SETTLE_SECONDS: Final = 5.0  # so that all disagreements are told at once, and a node that is being replaced can go
_COMPARE_SECONDS: Final = 2.0  # also when nobody came: a mark in the shared folder may be seen late
_REST: Final = 5  # times as long as a comparison took
_REPORTED_CHARACTERS: Final = 300  # of each part of a problem; a caller shows no more
_REPORT_SECONDS: Final = 15.0
_FIRST_REPORT_SECONDS: Final = 2.0
_LONGEST_REPORT: Final = 500
_MOST_MISSED: Final = 8
_MOST_NAMED: Final = 512  # nodes whose names all others get to know
_FILES_OF_A_NODE: Final = 2  # its link, and its call
_OWN_FILES: Final = 128
_KIND: Final = re.compile(r"[a-z][a-z0-9-]{1,40}")


class Coordinator:
    """Node 0 while it waits for the others."""

    def __init__(self, meeting: Session, listener: socket.socket) -> None:
        self._meeting = meeting
        self._address = str(listener.getsockname()[0])
        self._clients = Clients(listener, nnodes=meeting.topology.nnodes, has_token=bool(meeting.token))
        self._problems, nnodes = [*meeting.problems], meeting.topology.nnodes
        try:
            require(_FILES_OF_A_NODE * nnodes + SPARE_CONNECTIONS + _OWN_FILES, f"{nnodes} nodes")
        except ConfigError as error:  # for the others to hear of
            self._problems += error.problems
        self._found: list[Problem] = []
        self._seen: set[str] = set()  # marks
        self._differ_since = self._compare_at = 0.0
        self._compared = -1  # version of the clients
        self._round: Round | None = None
        self._round_version = 0
        self._reported: object = None
        self._reported_at = time.monotonic() - _REPORT_SECONDS + _FIRST_REPORT_SECONDS

    def wait(self) -> Peers:
        """Until all are there and agree; closes the listener."""
        peers = None
        try:
            while peers is None:
                self._meeting.look(self._waiting_for)
                self._clients.step(self._heard, LOOK_SECONDS if self._round is None else CALLING_SECONDS)
                self._report_missing()
                peers = self._judge()
            return peers
        except (RunStopped, PeerLostError) as error:
            kind = "stop" if isinstance(error, RunStopped) else "lost"
            self._clients.send_to_all(kind, why=str(error)[:_LONGEST_REPORT])
            self._clients.see_off()
            raise
        finally:
            self._clients.close()

    def _heard(self, client: Client, message: Message) -> None:
        if client.hello:
            if message["type"] == "stop":
                raise RunStopped(f"{client.name} was asked to stop before any rank was started [stopped-early]")
            if message["type"] == "reached" and self._round is not None:
                self._round.hear(client.node, message)
            return
        if message["type"] == "refused":
            kind = str(message.get("why"))
            raise TurnedAway("it refuses this node", kind if _KIND.fullmatch(kind) else "node-refused")
        hello: Any = message.get("hello")
        nonce = message.get("nonce")
        if message["type"] != "hello" or not is_hello(hello) or not isinstance(nonce, str):
            raise foreign()
        nonces, token = (client.nonce, nonce), self._meeting.token
        refused = None
        if token and not is_proof(message.get("proof"), proof(token, role="node", nonces=nonces, content=hello)):
            reason, fix = "it does not know the token of this job", "give every node the same DSF_TOKEN"
            refused = Problem("token-refused", reason, fix)
        elif hello["job"] != self._meeting.hello["job"]:
            refused = Problem("other-job", "another job listens here", "give every job a --master_port of its own")
        if refused is not None:
            client.link.send("nogo", problems=[refused.to_dict()])
            raise TurnedAway(refused.reason, refused.kind)
        clock = ahead(hello["clock"], sent=client.challenged_at, received=time.time())
        self._clients.let_in(client, hello | {"ahead": clock})
        client.link.send("welcome", proof=proof(token, role="lead", nonces=nonces, content={}))

    def _judge(self) -> Peers | None:
        present = self._clients.present
        hellos = [self._meeting.hello, *(client.hello for client in present)]
        is_full = len(hellos) >= self._meeting.topology.nnodes
        if self._round_version != self._clients.version:
            self._round = None
        now = time.monotonic()
        # Nobody is refused for a node that has gone since.
        if now > self._compare_at or (self._compared != self._clients.version and (is_full or self._found)):
            self._compare(hellos)
        errors = [*self._problems, *(problem for problem in self._found if problem.severity == "error")]
        if not errors:
            self._differ_since = 0.0
            return self._meet(present, hellos) if len(hellos) == self._meeting.topology.nnodes else None
        self._differ_since = self._differ_since or now
        # A node that has just died is still among them: only those that speak again count.
        alive = all(client.link.heard_at > self._differ_since for client in present)
        if alive and (is_full or now - self._differ_since > _SETTLE_SECONDS):
            self._refuse(errors)
        return None

    def _compare(self, hellos: Sequence[Mapping[str, Any]]) -> None:
        """It takes a while with a thousand nodes, and reads a shared folder: now and then is enough."""
        began = time.monotonic()
        self._compared, self._found = self._clients.version, disagreements(hellos, seen=self._seen)
        now = time.monotonic()
        self._compare_at = now + max(_COMPARE_SECONDS, _REST * (now - began))

    def _meet(self, present: Sequence[Client], hellos: Sequence[Mapping[str, Any]]) -> Peers | None:
        """All are there and agree; where they have looked at themselves, they call each other first."""
        if not all("look" in hello for hello in hellos) or not all("echo" in hello for hello in hellos[1:]):
            return self._go(present)
        if self._round is None:
            self._round_version = self._clients.version
            self._round = self._begin_round(present)
        elif self._round.is_over:
            if problems := self._round.problems():
                self._refuse(problems)
            return self._go(present)
        return None

    def _begin_round(self, present: Sequence[Client]) -> Round:
        here, master = name_of(self._meeting.hello), self._meeting.topology.master_port
        try:
            port = self._meeting.answer_at(self._address)
            self._meeting.answer_at(self._address, master)
        except OSError as error:
            reason = f"nobody can meet there: {(error.strerror or str(error)).lower()}"
            fix = "give all nodes another --master_port"
            self._refuse([Problem("port-not-usable", reason, fix, "--master_port", master, file=f"node {here}")])
        places = {0: Place(here, present[0].local_address, port)}
        places |= {client.node: Place(name_of(client.hello), *client.hello["echo"]) for client in present}
        found = Round(places, master=(self._meeting.topology.master_addr, master))
        for client in present:
            try:
                client.link.send("reach", **found.order(client.node))
            except ConnectionLost as lost:
                self._clients.part(client, lost)
        return found

    def _go(self, present: Sequence[Client]) -> Peers:
        for problem in self._found:  # no errors: they have all been refused
            print_problem(problem)
        hosts = {0: str(self._meeting.hello["host"])} | {client.node: client.hello["host"] for client in present}
        self._meeting.local_address = present[0].local_address
        self._meeting.close()  # ranks listen there next
        links = {client.node: client.link for client in present}
        self._send_go(hosts)
        self._clients.close_unknown()
        return Peers(0, links, hosts)

    def _refuse(self, problems: Sequence[Problem]) -> NoReturn:
        """Tell all what differs, as much of it as fits on a line: the rest is in node 0's output."""
        reported: list[dict[str, Any]] = []
        room = LARGEST_LINE_BYTES // 2
        for problem in problems:
            values = problem.to_dict().items()
            stated = {name: value[:_REPORTED_CHARACTERS] if isinstance(value, str) else value for name, value in values}
            room -= len(json.dumps(stated))
            if reported and room < 0:
                reason = f"{len(problems) - len(reported)} more problems"
                reported.append(Problem("nodes-differ", reason, "read its output", file="node 0").to_dict())
                break
            reported.append(stated)
        self._clients.send_to_all("nogo", problems=reported)
        self._clients.see_off()
        raise ConfigError(problems)

    def _send_go(self, hosts: Mapping[int, str]) -> None:
        """Names are for messages: of very many nodes each is known to the others by its number."""
        if len(hosts) > _MOST_NAMED:
            self._clients.send_to_all("go", nnodes=len(hosts))
            return
        longest = (LARGEST_LINE_BYTES - 4096) // _MOST_NAMED - len('"99999": "", ')
        names = {str(node): host.encode("ascii", "replace").decode()[:longest] for node, host in hosts.items()}
        self._clients.send_to_all("go", hosts=names)

    def _report_missing(self) -> None:
        """The others would otherwise say only that they wait, and the log of a node may be all that somebody reads."""
        now, state = time.monotonic(), (self._clients.version, self._clients.rejections.reported())
        if state != self._reported and now - self._reported_at > _REPORT_SECONDS and self._round is None:
            self._reported, self._reported_at = state, now
            self._clients.send_to_all("waiting", text=self._waiting_for()[:_LONGEST_REPORT])

    def _waiting_for(self) -> str:
        topology = self._meeting.topology
        here = {0, *(client.node for client in self._clients.present)}
        absent = [rank for rank in range(topology.nnodes) if rank not in here]
        if not absent:
            return f"waiting for all {topology.nnodes} nodes to agree"
        known = partial(peer_name, master=topology.master_addr, names=self._meeting.names)
        with ThreadPoolExecutor(max_workers=_MOST_MISSED) as pool:  # each asks a name server
            reported = list(pool.map(known, absent[:_MOST_MISSED]))
        more = f" and {len(absent) - _MOST_MISSED} more" if len(absent) > _MOST_MISSED else ""
        rejected = self._clients.rejections.reported()
        return f"waiting for {len(absent)}/{topology.nnodes} nodes: {', '.join(reported)}{more}{rejected}"


def ahead(clock: float, *, sent: float, received: float) -> float:
    """Seconds by which a clock, read between two moments of ours, is ahead; what the way may take is not counted."""
    apart, unknown = clock - (sent + received) / 2, abs(received - sent) / 2
    return max(0.0, apart - unknown) if apart > 0 else min(0.0, apart + unknown)
