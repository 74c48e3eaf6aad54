"""Node 0, for the life of the job.

It gathers the nodes, compares them, has them call each other, and sends GO or what differs. It
receives their messages while ranks run, and decides about another start.

Nodes that come while ranks run wait for the next start, as spares do. A start needs all nodes of
the job, or, where some do not come back, as many as `--min_nodes` allows; it takes the nodes with
the lowest numbers, and ranks follow them.
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
    is_proof,
    proof,
)
from framework.launch.rendezvous.connections import Client, Clients, TurnedAway
from framework.launch.rendezvous.connectivity import Endpoint, Round, peer_name
from framework.launch.rendezvous.handshake import disagreements, name_of
from framework.launch.rendezvous.messages import Hello, Introduction, read_message
from framework.launch.rendezvous.peers import LeadPeers
from framework.launch.rendezvous.session import (
    HANDSHAKE_SECONDS,
    LOOK_SECONDS,
    SILENCE_SECONDS,
    RestartDecision,
    Session,
    Start,
)
from framework.launch.supervision import JobEnd
from framework.system.log import print_problem
from framework.system.open_files import require

# Nodes that took part before are waited for this long, if the job can go on with fewer.
ENOUGH_SECONDS: Final = 60.0
# connections beyond one per node that may wait for their handshake at once
SPARE_CONNECTIONS: Final = 64
# so that all disagreements are reported at once, and a node that is being replaced can go
_SETTLE_SECONDS: Final = 5.0
# also when no node came: a mark in the shared folder may be visible late
_COMPARE_SECONDS: Final = 2.0
_REST: Final = 5  # between two comparisons: times as long as one took
_REPORTED_CHARACTERS: Final = 300  # of each part of a problem; a caller shows no more
_REPORT_SECONDS: Final = 15.0
_FIRST_REPORT_SECONDS: Final = 2.0
_SEE_OFF_SECONDS: Final = 2.0
# a node that has not received by then how all have ended takes node 0 for lost
_LEAVE_SECONDS: Final = 10.0
_SWEEP_SECONDS: Final = 1.0
_PORT_SECONDS: Final = 10.0  # for a port of the ranks to be free again
_OCCUPIED: Final = "a node of its rank is connected"
_LONGEST_REPORT: Final = 500
_MOST_MISSED: Final = 8
_MOST_NAMED: Final = 512  # with more nodes, their names are not sent to the others
_REST_OF_GO_BYTES: Final = 8192  # all of GO but what it has for each node
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
        except ConfigError as error:  # `begin` reports it to all nodes
            self._problems += error.problems
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._woken = asyncio.Event()
        self._stopped: RunStopped | None = None
        self._peers: LeadPeers | None = None
        self._running: dict[int, Client] = {}
        self._ending: set[Client] = set()  # nodes on which ranks of the last start may still run
        self._epoch = 0
        self._port_problems: Sequence[Problem] = ()
        self._is_over = False
        self._differences: list[Problem] = []
        self._seen_marks: set[str] = set()
        self._differ_since = 0.0
        self._compare_at = 0.0
        self._compared_version = -1  # of the clients
        self._round: Round | None = None
        self._round_version = 0
        self._reported: object = None
        self._reported_at = 0.0

    async def listen(self) -> None:
        """Accept connections from now on."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_report_no_files)
        self._server = await loop.create_server(
            lambda: Channel(self._opened), sock=self._listener, backlog=4096
        )
        self._run_task(self._sweep())

    async def close(self) -> None:
        """Accept no further connection, and close all there are.

        The nodes of the last start have `_LEAVE_SECONDS` to close theirs first.
        """
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
        """Wait until all nodes are there and agree, and start the job.

        After a ConfigError, PeerLostError or RunStopped, the other nodes know of it.
        """
        session = self._session
        session.begin_wait()
        if self._peers is not None:
            ended = self._peers.ended
            self._ending = {client for node, client in self._running.items() if node not in ended}
        self._peers = None
        self._running = {}
        self._stopped = None
        await session.begin_start()
        self._reported_at = time.monotonic() - _REPORT_SECONDS + _FIRST_REPORT_SECONDS
        try:
            chosen = await self._gather_nodes()
        except RunStopped as stopped:
            await self._send_stop(stopped)
            raise
        except PeerLostError as lost:
            await self._send_last("lost", why=str(lost)[:_LONGEST_REPORT])
            raise
        except ConfigError as error:
            await self._send_last("nogo", problems=_reported(error.problems))
            raise
        return self._go(chosen)

    async def _gather_nodes(self) -> Sequence[Client]:
        """Wait for the nodes of a start, and return them without node 0."""
        session = self._session
        while True:
            if session.restarts is not None:
                why = session.restarts.used_up
                if why:
                    raise PeerLostError(f"there is no other start: {why} [no-restart]")
            chosen = self._nodes_to_start()
            if chosen is not None:
                return chosen
            session.look(self._waiting_for)
            self._report_missing()
            await self._wait(LOOK_SECONDS)
            if self._stopped is not None:
                raise self._stopped

    async def decide_restart(self, end: JobEnd) -> RestartDecision:
        """Decide about another start, inform all nodes, and wait before it.

        Raises:
            RunStopped: on request, during the wait; the other nodes know of it.
        """
        session = self._session
        peers = self._peers
        assert peers is not None
        await peers.flush()
        again = await session.decide(end, peers)
        if again is None:
            if session.restarts is not None and not self._is_cut_off:
                await self._send_last("done", code=session.restarts.code)
            return session.decision(None)
        self._send_to_all("again", why=again.why)
        try:
            await session.pause(again.seconds, peers)
        except RunStopped as stopped:
            await self._send_stop(stopped)
            raise
        return session.decision(again)

    async def _send_stop(self, stopped: RunStopped) -> None:
        """Send a stop to all nodes, except where this node has only lost its launcher."""
        if not self._is_cut_off:
            await self._send_last("stop", why=str(stopped)[:_LONGEST_REPORT])

    @property
    def _is_cut_off(self) -> bool:
        """True if this node leaves because of its launcher: to the others, node 0 is lost."""
        requests = self._session.requests
        return requests.cut_off and not requests.is_meant

    def _go(self, chosen: Sequence[Client]) -> Start:
        """Send GO to the chosen nodes, and return the start.

        Callers before their handshake are closed. Without restarts no later one is accepted.
        """
        session = self._session
        is_later = self._is_later
        self._epoch += 1
        for problem in self._differences:  # warnings: an error would have been raised before
            print_problem(problem)
        self._differences = []
        session.meet_is_over()  # ranks listen there next
        if chosen:
            session.local_address = chosen[0].channel.local_address
        topology = replace(session.topology, nnodes=len(chosen) + 1)
        if is_later:
            topology = replace(topology, master_port=free_again(topology.master_port))
        hosts = {0: str(session.hello["host"])}
        hosts |= {client.node: client.hello["host"] for client in chosen}
        self._running = {client.node: client for client in chosen}
        channels = {client.node: client.channel for client in chosen}
        self._peers = LeadPeers(hosts, channels, epoch=self._epoch)
        start = Start(self._peers, topology, session.resumes)
        self._send_go(start, hosts)
        self._clients.close_unknown()
        if session.restarts is None and self._server is not None:
            self._server.close()
        return start

    def _send_go(self, start: Start, hosts: Mapping[int, str]) -> None:
        """Send GO to the nodes of a start, and ``idle`` to the others."""
        restarts = self._session.restarts
        body = body_of(
            "go",
            epoch=self._epoch,
            port=start.topology.master_port,
            resumes=start.resumes,
            nodes=list(hosts),
            state={} if restarts is None else restarts.state,
            **_names(hosts),
        )
        running = list(self._running.values())
        for client in running:
            self._send(client, body)
        idle = [client for client in self._clients.present if client not in running]
        for client in idle:
            self._send(client, body_of("idle"))

    @property
    def _is_later(self) -> bool:
        """True if the job has started before, in this process or before node 0 was replaced."""
        restarts = self._session.restarts
        return self._epoch > 0 or (restarts is not None and restarts.number > 0)

    def _nodes_to_start(self) -> Sequence[Client] | None:
        """Return the nodes of the next start without node 0, or None as long as it has to wait.

        Raises:
            ConfigError: the nodes differ, or cannot reach each other.
        """
        present = sorted(set(self._clients.present) - self._ending, key=lambda client: client.node)
        if self._epoch:
            return self._nodes_if_enough(present)
        is_full = len(present) + 1 >= self._session.num_nodes
        if self._round_version != self._clients.version:
            self._round = None
        now = time.monotonic()
        has_changed = self._compared_version != self._clients.version
        # Compared again when a node has gone, so that no other is refused because of it.
        if now > self._compare_at or (has_changed and (is_full or self._differences)):
            self._compare([self._session.hello, *(client.hello for client in present)])
        # A rank of this job that lost its agent holds the port for a moment.
        waited = now - self._session.started_at
        waits_for_port = bool(self._port_problems) and waited < _PORT_SECONDS
        errors = self._errors(with_port=not waits_for_port)
        if not errors:
            self._differ_since = 0.0
            chosen = None if waits_for_port else self._nodes_if_enough(present)
            if chosen is None:
                return None
            return self._nodes_if_connected(chosen)
        self._differ_since = self._differ_since or now
        # A node that has just died is still present: only nodes that send something again count.
        alive = all(client.channel.heard_at > self._differ_since for client in present)
        if alive and (is_full or now - self._differ_since > _SETTLE_SECONDS):
            raise ConfigError(errors)
        return None

    def _errors(self, *, with_port: bool) -> list[Problem]:
        """Return all that prevents a start; `with_port`: also that the ranks' port is in use."""
        errors = list(self._problems)
        if with_port:
            errors += self._port_problems
        errors += [problem for problem in self._differences if problem.severity == "error"]
        return errors

    def _nodes_if_enough(self, present: Sequence[Client]) -> Sequence[Client] | None:
        """Return the nodes that start, or None if there are too few.

        `present`: the nodes that are there, without node 0. Fewer than the job has train only in a
        later start, after `ENOUGH_SECONDS`, and if the job can be split over them.
        """
        session = self._session
        wanted = session.topology.nnodes
        here = len(present) + 1
        waited = time.monotonic() - session.started_at
        if here >= wanted:
            if here >= session.num_nodes or self._is_later or waited > ENOUGH_SECONDS:
                return present[: wanted - 1]
            return None
        if self._is_later and waited > ENOUGH_SECONDS:
            for count in range(here, 0, -1):
                if session.fits(count):
                    print_line(f"going on on {count} of {wanted} nodes [fewer-hosts]")
                    return present[: count - 1]
        return None

    def _compare(self, hellos: Sequence[Mapping[str, Any]]) -> None:
        """Compare the nodes, and set when to do so next.

        It takes a while with a thousand nodes, and reads a shared folder.
        """
        began = time.monotonic()
        self._compared_version = self._clients.version
        self._differences = disagreements(hellos, seen=self._seen_marks)
        self._port_problems = self._session.problems()
        now = time.monotonic()
        self._compare_at = now + max(_COMPARE_SECONDS, _REST * (now - began))

    def _nodes_if_connected(self, chosen: Sequence[Client]) -> Sequence[Client] | None:
        """Have the nodes call each other, and return them once they have; None before.

        Nodes without a preflight do not call each other. Raises a ConfigError for calls that fail.
        """
        hellos = [client.hello for client in chosen]
        if "look" not in self._session.hello:
            return chosen
        if not all("look" in hello and "echo" in hello for hello in hellos):
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
        """Answer at node 0's own port and at that of the ranks, and begin the calls of all nodes.

        Raises:
            ConfigError: another program has the port of the ranks.
        """
        here = name_of(self._session.hello)
        master = self._session.topology.master_port
        try:
            port = self._session.answer_at(self._address)
            self._session.answer_at(self._address, master)
        except OSError as error:
            reason = f"nodes cannot meet there: {(error.strerror or str(error)).lower()}"
            fix = "give all nodes another --master_port"
            raise ConfigError.of(
                "port-not-usable", reason, fix, "--master_port", master, f"node {here}"
            ) from None
        names = {0: here} | {client.node: name_of(client.hello) for client in chosen}
        return self._call_each_other(chosen, port, names)

    def _call_each_other(
        self, chosen: Sequence[Client], port: int, names: Mapping[int, str]
    ) -> Round:
        """Begin the calls of all nodes; `port`: where node 0 answers, `names`: of all nodes."""
        topology = self._session.topology
        endpoints = {0: Endpoint(names[0], chosen[0].channel.local_address, port)}
        for client in chosen:
            endpoints[client.node] = Endpoint(names[client.node], *client.hello["echo"])
        round_ = Round(endpoints, master=(topology.master_addr, topology.master_port))
        for client in chosen:
            self._send(client, body_of("reach", **round_.order(client.node)))
        return round_

    # Connections.

    def _opened(self, channel: Channel) -> None:
        client = Client(channel)
        self._clients.add(client)
        self._run_task(self._serve(client))

    def _run_task(self, work: Any) -> None:
        """Run a coroutine as a task until `close`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: Client) -> None:
        """Do a caller's handshake, and handle its messages until its connection is lost."""
        channel = client.channel
        try:
            try:
                await asyncio.wait_for(self._admit(client), HANDSHAKE_SECONDS)
            except asyncio.TimeoutError:
                raise ConnectionLost(f"silent for {HANDSHAKE_SECONDS:.0f} s") from None
            while True:
                self._hear(client, await channel.receive())
        except ConnectionLost as lost:
            self._drop(client, lost)

    async def _admit(self, client: Client) -> None:
        """Do the handshake with a caller.

        Raises:
            TurnedAway: it may be a node of this job, and has been refused.
            ConnectionLost: it is no agent, or comes too early.
        """
        session = self._session
        channel = client.channel
        token = session.token
        channel.send("challenge", protocol=PROTOCOL, nonce=client.nonce, token=bool(token))
        message = await channel.receive()
        if message["type"] == "refused":
            kind = str(message.get("why"))
            if not _KIND.fullmatch(kind):
                kind = "node-refused"
            raise TurnedAway("it refuses this node", kind)
        introduction = read_message(Introduction, message)
        hello = introduction.hello
        nonces = (client.nonce, introduction.nonce)
        problem = self._objection(client, hello, introduction.proof, nonces=nonces)
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

    def _objection(
        self, client: Client, hello: Any, sent_proof: object, *, nonces: tuple[str, str]
    ) -> Problem | None:
        """Return why the sender of a HELLO is refused, or None.

        Raises:
            NoAgent: this is no HELLO.
            ConnectionLost: a node with its rank is still connected; it is to call again later.
        """
        session = self._session
        if session.token:
            expected = proof(session.token, role="node", nonces=nonces, content=hello)
            if not is_proof(sent_proof, expected):
                reason = "it does not know the token of this job"
                return Problem("token-refused", reason, "give every node the same token")
        read_message(Hello, hello)
        if hello["job"] != session.hello["job"]:
            fix = "give every job a --master_port of its own"
            return Problem("other-job", "another job listens here", fix)
        if not self._epoch:
            return None
        if any(present.node == hello["node_rank"] for present in self._clients.present):
            # Its host lost its power, for example: the old connection ends when it was silent for
            # long enough, and then its place is free.
            client.channel.send("later", why=_OCCUPIED)
            raise ConnectionLost(_OCCUPIED)
        # ranks run already, so that this node alone is refused
        for problem in disagreements([session.hello, hello], seen=set()):
            if problem.severity == "error":
                return problem
        return None

    def _hear(self, client: Client, message: Message) -> None:
        """Handle a node's message. While ranks run, only those of nodes in this start count."""
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

    def _drop(self, client: Client, how: ConnectionLost) -> None:
        """Close and forget a connection; a node whose ranks run is then lost to its peers."""
        is_running = client.hello and self._running.get(client.node) is client
        self._clients.part(client, how, is_quiet=bool(is_running) or self._is_over)
        if is_running and self._peers is not None:
            self._peers.lose(client.node, how)
        self._woken.set()

    async def _sweep(self) -> None:
        """Drop silent nodes, until the task is cancelled.

        Messages that came while this process was busy are read first.
        """
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for client in list(self._clients.present):
                if time.monotonic() - client.channel.heard_at > SILENCE_SECONDS:
                    self._drop(client, ConnectionLost(f"silent for {SILENCE_SECONDS:.0f} s"))

    def _send(self, client: Client, body: bytes) -> None:
        try:
            client.channel.send_body(body)
        except ConnectionLost as lost:
            self._drop(client, lost)

    def _send_to_all(self, kind: str, **content: Any) -> None:
        body = body_of(kind, **content)
        for client in list(self._clients.present):
            self._send(client, body)

    async def _send_last(self, kind: str, **content: Any) -> None:
        """Send the last message to all nodes, and let them close their connections first.

        If this end closed first, a message on its way could be lost.
        """
        self._is_over = True
        self._send_to_all(kind, **content)
        await self._until_alone(list(self._clients.present), _SEE_OFF_SECONDS)

    async def _until_alone(self, clients: Sequence[Client], seconds: float) -> None:
        """Wait, for at most `seconds`, until none of these clients is connected."""
        until = time.monotonic() + seconds
        while any(client in self._clients.present for client in clients):
            if time.monotonic() >= until:
                return
            await self._wait(LOOK_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """Wait until a node was heard or has come or gone, for at most `seconds`."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()

    def _report_missing(self) -> None:
        """Send all nodes what node 0 waits for: a user may read the log of one of them alone."""
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
        """Describe the nodes that are missing; a name server has half a second to answer."""
        topology = self._session.topology
        here = {client.node for client in self._clients.present}
        here.add(0)
        absent = [number for number in range(self._session.num_nodes) if number not in here]
        absent = absent[: max(0, topology.nnodes - len(here))]
        if not absent:
            return f"waiting for all {topology.nnodes} nodes to agree"
        name_of_rank = partial(peer_name, master=topology.master_addr, names=self._session.names)
        with ThreadPoolExecutor(max_workers=_MOST_MISSED) as pool:  # each asks a name server
            reported = list(pool.map(name_of_rank, absent[:_MOST_MISSED]))
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
    """Return the part of GO that names the hosts; none for very many nodes.

    Names are for messages only, and without them a node is named by its number.
    """
    if len(hosts) > _MOST_NAMED:
        return {}
    # For each node GO has its number in `nodes`, and its number and name in `hosts`.
    without_name = len("99999, ") + len('"99999": "", ')
    longest = (LARGEST_LINE_BYTES - _REST_OF_GO_BYTES) // _MOST_NAMED - without_name
    names = {}
    for node, host in hosts.items():
        # ASCII takes a byte a character in JSON, any other character takes six
        names[str(node)] = host.encode("ascii", "replace").decode()[:longest]
    return {"hosts": names}


def _reported(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return as many problems as fit on a line; the rest is in node 0's output."""
    reported: list[dict[str, Any]] = []
    room = LARGEST_LINE_BYTES // 2
    for problem in problems:
        record = {}
        for name, value in problem.to_dict().items():
            record[name] = value[:_REPORTED_CHARACTERS] if isinstance(value, str) else value
        room -= len(json.dumps(record))
        if reported and room < 0:
            reason = f"{len(problems) - len(reported)} more problems"
            reported.append(
                Problem("nodes-differ", reason, "read its output", file="node 0").to_dict()
            )
            break
        reported.append(record)
    return reported


def free_again(port: int) -> int:
    """Return the port where ranks met before, or another one while a process still holds it."""
    try:
        return usable_port(port)
    except ConfigError:
        return usable_port(None)


def _report_no_files(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report that no more files can be opened, as an exception handler of asyncio.

    New connections stay pending until another one has closed: asyncio tries again a second later.
    """
    error = context.get("exception")
    if isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        print_line(f"node 0 cannot let anybody else in: {reason}; raise ulimit -n")
    else:
        loop.default_exception_handler(context)


def ahead(clock: float, *, sent: float, received: float) -> float:
    """Return the seconds by which a node's clock is ahead of ours, at least.

    Args:
        clock: time of the node, which it read between `sent` and `received`.
        sent, received: our times. What the way may have taken is not counted.
    """
    apart = clock - (sent + received) / 2
    unknown = abs(received - sent) / 2
    if apart > 0:
        return max(0.0, apart - unknown)
    return min(0.0, apart + unknown)
