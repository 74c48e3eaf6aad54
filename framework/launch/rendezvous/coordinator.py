"""Node 0, for the life of the job: gathers the nodes, compares them, has them call each other, says
GO or what differs; hears them while ranks run; and says whether there is another start.

Nodes that come while ranks run wait for the next start, as spares do. A start needs all nodes of
the job, or, where some do not come back, as many as `--min_nodes` allows; it takes those of the
lowest numbers, and ranks follow them.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from framework.errors import ConfigError, PeerLostError, Problem, RunStopped
from framework.launch.deepspeed_command import usable_port
from framework.launch.job import print_line
from framework.launch.rendezvous.channel import (
    LARGEST_LINE_BYTES,
    PROTOCOL,
    Channel,
    ConnectionLost,
    Message,
    body_of,
    foreign,
    is_proof,
    proof,
)
from framework.launch.rendezvous.connections import Client, Clients, TurnedAway
from framework.launch.rendezvous.connectivity import Endpoint, Round, peer_name
from framework.launch.rendezvous.handshake import disagreements, is_hello, name_of
from framework.launch.rendezvous.peers import LeadPeers
from framework.launch.rendezvous.session import (
    HANDSHAKE_SECONDS,
    LOOK_SECONDS,
    SILENCE_SECONDS,
    RestartDecision,
    Session,
    Start,
)
from framework.launch.returning_hosts import ENOUGH_SECONDS
from framework.launch.supervision import JobEnd
from framework.system.limits import require
from framework.system.log import print_problem

# connections beyond one per node that may wait for their handshake at once
SPARE_CONNECTIONS: Final = 64
# so that all disagreements are told at once, and a node that is being replaced can go
_SETTLE_SECONDS: Final = 5.0
_COMPARE_SECONDS: Final = 2.0  # also when nobody came: a mark in the shared folder may be seen late
_REST: Final = 5  # times as long as a comparison took
_REPORTED_CHARACTERS: Final = 300  # of each part of a problem; a caller shows no more
_REPORT_SECONDS: Final = 15.0
_FIRST_REPORT_SECONDS: Final = 2.0
_SEE_OFF_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 10.0  # who has not heard by then how all have ended takes node 0 for lost
_SWEEP_SECONDS: Final = 1.0
_PORT_SECONDS: Final = 10.0  # for a port of the ranks to be free again
_OCCUPIED: Final = "a node of its rank is connected"
_LONGEST_REPORT: Final = 500
_MOST_MISSED: Final = 8
_MOST_NAMED: Final = 512  # nodes whose names all others get to know
_FILES_OF_A_NODE: Final = 2  # its link, and its call
_OWN_FILES: Final = 128
_KIND: Final = re.compile(r"[a-z][a-z0-9-]{1,40}")


class Coordinator:
    """Node 0. `listen` comes first, `close` last."""

    def __init__(self, session: Session, listener: socket.socket) -> None:
        self._session = session
        self._listener = listener
        self._address = str(listener.getsockname()[0])
        self._clients = Clients(most_unknown=session.num_nodes + SPARE_CONNECTIONS)
        self._problems: list[Problem] = []
        try:
            require(
                _FILES_OF_A_NODE * session.num_nodes + SPARE_CONNECTIONS + _OWN_FILES,
                f"{session.num_nodes} nodes",
            )
        except ConfigError as error:  # for the others to hear of
            self._problems += error.problems
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._woken = asyncio.Event()
        self._stopped: RunStopped | None = None
        self._peers: LeadPeers | None = None
        self._running: dict[int, Client] = {}
        self._ending: set[Client] = set()  # whose ranks of the last start may run still
        self._epoch = 0
        self._ports: Sequence[Problem] = ()
        self._is_over = False
        self._found: list[Problem] = []
        self._seen: set[str] = set()  # marks
        self._differ_since = self._compare_at = 0.0
        self._compared = -1  # version of the clients
        self._round: Round | None = None
        self._round_version = 0
        self._reported: object = None
        self._reported_at = 0.0

    async def listen(self) -> None:
        """Let nodes in."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_report_no_files)
        self._server = await loop.create_server(
            lambda: Channel(self._opened), sock=self._listener, backlog=4096
        )
        self._keep(self._sweep())

    async def close(self) -> None:
        """Let nobody else in, and hang up."""
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            await self._peers.flush()
            await self._until_alone(list(self._running.values()), _LEAVE_SECONDS)
        for task in self._tasks:
            task.cancel()
        for client in list(self._clients.present):
            client.channel.close()
        self._clients.close_unknown()
        self._session.close()

    # Starts and ends.

    async def begin(self) -> Start:
        """Wait until all are there and agree. After a ConfigError, PeerLostError or RunStopped the
        others know.
        """
        session = self._session
        session.begin_wait()
        if self._peers is not None:
            self._ending = {
                client for node, client in self._running.items() if node not in self._peers.ended
            }
        self._peers = None
        self._running = {}
        self._stopped = None
        await session.begin_start()
        self._reported_at = time.monotonic() - _REPORT_SECONDS + _FIRST_REPORT_SECONDS
        try:
            while True:
                if session.restarts is not None and (why := session.restarts.used_up):
                    raise PeerLostError(f"there is no other start: {why} [no-restart]")
                chosen = self._judge()
                if chosen is not None:
                    break
                session.look(self._waiting_for)
                self._report_missing()
                await self._wait(LOOK_SECONDS)
                if self._stopped is not None:
                    raise self._stopped
        except (RunStopped, PeerLostError) as error:
            if isinstance(error, RunStopped):
                kind = "stop"
            else:
                kind = "lost"
            await self._send_last(kind, why=str(error)[:_LONGEST_REPORT])
            raise
        except ConfigError as error:
            await self._send_last("nogo", problems=_reported(error.problems))
            raise
        return self._go(chosen)

    async def decide_restart(self, end: JobEnd) -> RestartDecision:
        """Decide about another start, and say so to all."""
        session = self._session
        peers = self._peers
        assert peers is not None
        await peers.flush()
        again = await session.decide(end, peers)
        if again is None:
            if session.restarts is not None:
                await self._send_last("done", code=session.restarts.code)
            return session.decision(None)
        self._send_to_all("again", why=again.why)
        try:
            await session.pause(again.seconds, peers)
        except RunStopped as stopped:
            await self._send_last("stop", why=str(stopped)[:_LONGEST_REPORT])
            raise
        return session.decision(again)

    def _go(self, chosen: Sequence[Client]) -> Start:
        session = self._session
        is_later = self._is_later
        self._epoch += 1
        for problem in self._found:  # no errors: they have all been refused
            print_problem(problem)
        self._found = []
        session.meet_is_over()  # ranks listen there next
        session.local_address = chosen[0].channel.local_address if chosen else session.local_address
        topology = replace(session.topology, nnodes=len(chosen) + 1)
        if is_later:
            topology = replace(topology, master_port=free_again(topology.master_port))
        hosts = {0: str(session.hello["host"])} | {
            client.node: client.hello["host"] for client in chosen
        }
        self._running = {client.node: client for client in chosen}
        self._peers = LeadPeers(
            hosts,
            {node: client.channel for node, client in self._running.items()},
            epoch=self._epoch,
        )
        start = Start(self._peers, topology, session.resumes)
        go: dict[str, Any] = {
            "epoch": self._epoch,
            "port": topology.master_port,
            "resumes": start.resumes,
        }
        go |= {
            "nodes": [*hosts],
            "state": {} if session.restarts is None else session.restarts.state,
        }
        body = body_of("go", **go, **_names(hosts))
        for client in chosen:
            self._send(client, body)
        for client in [each for each in self._clients.present if each not in chosen]:
            self._send(client, body_of("idle"))
        self._clients.close_unknown()
        if session.restarts is None and self._server is not None:
            self._server.close()
        return start

    @property
    def _is_later(self) -> bool:
        """Whatever this process knows of itself, the job has begun before."""
        restarts = self._session.restarts
        return self._epoch > 0 or (restarts is not None and restarts.number > 0)

    def _judge(self) -> Sequence[Client] | None:
        present = sorted({*self._clients.present} - self._ending, key=lambda client: client.node)
        if self._epoch:
            return self._enough(present)
        hellos = [self._session.hello, *(client.hello for client in present)]
        is_full = len(hellos) >= self._session.num_nodes
        if self._round_version != self._clients.version:
            self._round = None
        now = time.monotonic()
        # Nobody is refused for a node that has gone since.
        if now > self._compare_at or (
            self._compared != self._clients.version and (is_full or self._found)
        ):
            self._compare(hellos)
        # A rank of this job that lost its agent holds the port for a moment.
        is_patient = bool(self._ports) and now - self._session.started_at < _PORT_SECONDS
        ports = () if is_patient else self._ports
        errors = [
            *self._problems,
            *ports,
            *(problem for problem in self._found if problem.severity == "error"),
        ]
        if not errors:
            self._differ_since = 0.0
            if is_patient:
                chosen = None
            else:
                chosen = self._enough(present)
            if chosen is None:
                return None
            return self._connected(chosen)
        self._differ_since = self._differ_since or now
        # A node that has just died is still among them: only those that speak again count.
        alive = all(client.channel.heard_at > self._differ_since for client in present)
        if alive and (is_full or now - self._differ_since > _SETTLE_SECONDS):
            raise ConfigError(errors)
        return None

    def _enough(self, present: Sequence[Client]) -> Sequence[Client] | None:
        """All that are needed; fewer only after a while, and where the job can train on them."""
        wanted = self._session.topology.nnodes
        here = len(present) + 1
        session = self._session
        waited = time.monotonic() - session.started_at
        if here >= wanted:
            is_time = here >= session.num_nodes or self._is_later or waited > ENOUGH_SECONDS
            return present[: wanted - 1] if is_time else None
        if self._is_later and waited > ENOUGH_SECONDS:
            for count in range(here, 0, -1):
                if session.fits(count):
                    print_line(f"going on on {count} of {wanted} nodes [fewer-hosts]")
                    return present[: count - 1]
        return None

    def _compare(self, hellos: Sequence[Mapping[str, Any]]) -> None:
        """It takes a while with a thousand nodes, and reads a shared folder: now and then is
        enough.
        """
        began = time.monotonic()
        self._compared, self._found = self._clients.version, disagreements(hellos, seen=self._seen)
        self._ports = self._session.problems()
        now = time.monotonic()
        self._compare_at = now + max(_COMPARE_SECONDS, _REST * (now - began))

    def _connected(self, chosen: Sequence[Client]) -> Sequence[Client] | None:
        """All are there and agree; where they have looked at themselves, they call each other
        first.
        """
        hellos = [self._session.hello, *(client.hello for client in chosen)]
        if not all("look" in hello for hello in hellos) or not all(
            "echo" in hello for hello in hellos[1:]
        ):
            return chosen
        if self._round is None:
            self._round_version = self._clients.version
            self._round = self._begin_round(chosen)
        elif self._round.is_over:
            problems = self._round.problems()
            if problems:
                raise ConfigError(problems)
            return chosen
        return None

    def _begin_round(self, chosen: Sequence[Client]) -> Round:
        here = name_of(self._session.hello)
        master = self._session.topology.master_port
        try:
            port = self._session.answer_at(self._address)
            self._session.answer_at(self._address, master)
        except OSError as error:
            reason = f"nobody can meet there: {(error.strerror or str(error)).lower()}"
            fix = "give all nodes another --master_port"
            raise ConfigError.of(
                "port-not-usable", reason, fix, "--master_port", master, f"node {here}"
            ) from None
        places = {0: Endpoint(here, chosen[0].channel.local_address, port)}
        places |= {
            client.node: Endpoint(name_of(client.hello), *client.hello["echo"]) for client in chosen
        }
        found = Round(places, master=(self._session.topology.master_addr, master))
        for client in chosen:
            self._send(client, body_of("reach", **found.order(client.node)))
        return found

    # Connections.

    def _opened(self, channel: Channel) -> None:
        client = Client(channel)
        self._clients.add(client)
        self._keep(self._serve(client))

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: Client) -> None:
        channel = client.channel
        try:
            try:
                await asyncio.wait_for(self._admit(client), HANDSHAKE_SECONDS)
            except asyncio.TimeoutError:
                raise ConnectionLost(f"silent for {HANDSHAKE_SECONDS:.0f} s") from None
            while True:
                self._hear(client, await channel.receive())
        except ConnectionLost as lost:
            self._part(client, lost)

    async def _admit(self, client: Client) -> None:
        session = self._session
        channel = client.channel
        token = self._session.token
        channel.send("challenge", protocol=PROTOCOL, nonce=client.nonce, token=bool(token))
        message = await channel.receive()
        if message["type"] == "refused":
            kind = str(message.get("why"))
            raise TurnedAway(
                "it refuses this node", kind if _KIND.fullmatch(kind) else "node-refused"
            )
        hello: Any = message.get("hello")
        nonce = message.get("nonce")
        if message["type"] != "hello" or not isinstance(nonce, str):
            raise foreign()
        nonces = (client.nonce, nonce)
        problem = None
        if token and not is_proof(
            message.get("proof"), proof(token, role="node", nonces=nonces, content=hello)
        ):
            reason = "it does not know the token of this job"
            fix = "give every node the same token"
            problem = Problem("token-refused", reason, fix)
        elif not is_hello(hello):
            raise foreign()
        elif hello["job"] != session.hello["job"]:
            problem = Problem(
                "other-job", "another job listens here", "give every job a --master_port of its own"
            )
        elif self._epoch and any(each.node == hello["node_rank"] for each in self._clients.present):
            # Of a host that lost its power, say: silence ends the old connection, and then there is
            # a place.
            channel.send("later", why=_OCCUPIED)
            raise ConnectionLost(_OCCUPIED)
        elif self._epoch:
            found = disagreements([session.hello, hello], seen=set())
            # it alone is refused
            problem = next((each for each in found if each.severity == "error"), None)
        if problem is not None:
            problems = [problem.to_dict()]
            signed = proof(
                "" if problem.kind == "token-refused" else token,
                role="nogo",
                nonces=nonces,
                content={"problems": problems},
            )
            channel.send("nogo", problems=problems, proof=signed)
            raise TurnedAway(problem.reason, problem.kind)
        clock = ahead(hello["clock"], sent=client.challenged_at, received=time.time())
        channel.send("welcome", proof=proof(token, role="lead", nonces=nonces, content={}))
        channel.sign(token, is_lead=True, nonces=nonces)
        if session.restarts is not None:
            session.restarts.restore(hello.get("state"))
        self._clients.let_in(client, hello | {"ahead": clock})
        if self._peers is not None:
            channel.send("idle")
        self._woken.set()

    def _hear(self, client: Client, message: Message) -> None:
        kind = message["type"]
        if kind == "beat":
            client.channel.send("beat")
        elif self._peers is not None:
            if self._running.get(client.node) is client:
                self._peers.hear(client.node, message)
        elif kind == "ended":
            self._ending.discard(client)
        elif kind == "reached" and self._round is not None:
            self._round.hear(client.node, message)
        elif kind == "stop":
            self._stopped = RunStopped(
                f"{client.name} was asked to stop before any rank was started [stopped-early]"
            )
        self._woken.set()

    def _part(self, client: Client, how: ConnectionLost) -> None:
        is_running = client.hello and self._running.get(client.node) is client
        self._clients.part(client, how, is_quiet=bool(is_running) or self._is_over)
        if is_running and self._peers is not None:
            self._peers.lose(client.node, how)
        self._woken.set()

    async def _sweep(self) -> None:
        """Find who is silent. What came in while this process was busy has been read before."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for client in list(self._clients.present):
                if time.monotonic() - client.channel.heard_at > SILENCE_SECONDS:
                    self._part(client, ConnectionLost(f"silent for {SILENCE_SECONDS:.0f} s"))

    def _send(self, client: Client, body: bytes) -> None:
        try:
            client.channel.send_body(body)
        except ConnectionLost as lost:
            self._part(client, lost)

    def _send_to_all(self, kind: str, **content: Any) -> None:
        body = body_of(kind, **content)
        for client in list(self._clients.present):
            self._send(client, body)

    async def _send_last(self, kind: str, **content: Any) -> None:
        """Say the last word to all, and let them hang up first: else what is on its way would be
        taken back.
        """
        self._is_over = True
        self._send_to_all(kind, **content)
        await self._until_alone(list(self._clients.present), _SEE_OFF_SECONDS)

    async def _until_alone(self, clients: Sequence[Client], seconds: float) -> None:
        until = time.monotonic() + seconds
        while (
            any(client in self._clients.present for client in clients) and time.monotonic() < until
        ):
            await self._wait(LOOK_SECONDS)

    async def _wait(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()

    def _report_missing(self) -> None:
        """The others would otherwise say only that they wait, and the log of a node may be all that
        somebody reads.
        """
        now = time.monotonic()
        state = (self._clients.version, self._clients.rejections.reported())
        if (
            state != self._reported
            and now - self._reported_at > _REPORT_SECONDS
            and self._round is None
        ):
            self._reported = state
            self._reported_at = now
            self._send_to_all("waiting", text=self._waiting_for()[:_LONGEST_REPORT])

    def _waiting_for(self) -> str:
        topology = self._session.topology
        here = {0, *(client.node for client in self._clients.present)}
        absent = [number for number in range(self._session.num_nodes) if number not in here]
        absent = absent[: max(0, topology.nnodes - len(here))]
        if not absent:
            return f"waiting for all {topology.nnodes} nodes to agree"
        known = partial(peer_name, master=topology.master_addr, names=self._session.names)
        with ThreadPoolExecutor(max_workers=_MOST_MISSED) as pool:  # each asks a name server
            reported = list(pool.map(known, absent[:_MOST_MISSED]))
        if len(absent) > _MOST_MISSED:
            more = f" and {len(absent) - _MOST_MISSED} more"
        else:
            more = ""
        rejected = self._clients.rejections.reported()
        return (
            f"waiting for {len(absent)}/{topology.nnodes} nodes: "
            f"{', '.join(reported)}{more}{rejected}"
        )


def _names(hosts: Mapping[int, str]) -> dict[str, Any]:
    """Names are for messages: of very many nodes each is known to the others by its number."""
    if len(hosts) > _MOST_NAMED:
        return {}
    longest = (LARGEST_LINE_BYTES - 8192) // _MOST_NAMED - len('"99999": "", 99999, ')
    return {
        "hosts": {
            str(node): host.encode("ascii", "replace").decode()[:longest]
            for node, host in hosts.items()
        }
    }


def _reported(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """As many problems as fit on a line: the rest is in node 0's output."""
    reported: list[dict[str, Any]] = []
    room = LARGEST_LINE_BYTES // 2
    for problem in problems:
        values = problem.to_dict().items()
        stated = {
            name: value[:_REPORTED_CHARACTERS] if isinstance(value, str) else value
            for name, value in values
        }
        room -= len(json.dumps(stated))
        if reported and room < 0:
            reason = f"{len(problems) - len(reported)} more problems"
            reported.append(
                Problem("nodes-differ", reason, "read its output", file="node 0").to_dict()
            )
            break
        reported.append(stated)
    return reported


def free_again(port: int) -> int:
    """The port where ranks met before; another where something of theirs still has it."""
    try:
        return usable_port(port)
    except ConfigError:
        return usable_port(None)


def _report_no_files(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """New connections stay pending until another one has closed; asyncio tries again a second
    later.
    """
    error = context.get("exception")
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        print_line(f"node 0 cannot let anybody else in: {reason}; raise ulimit -n")
    else:
        loop.default_exception_handler(context)


def ahead(clock: float, *, sent: float, received: float) -> float:
    """Seconds by which a clock, read between two moments of ours, is ahead; what the way may take
    is not counted.
    """
    apart = clock - (sent + received) / 2
    unknown = abs(received - sent) / 2
    if apart > 0:
        return max(0.0, apart - unknown)
    return min(0.0, apart + unknown)
