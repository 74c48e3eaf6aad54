"""A node other than node 0.

It calls node 0 until it is answered, sends its HELLO, waits for GO, and stays connected for the
life of the job. If it loses node 0 between two starts, it calls again, and sends what it knows of
the restarts.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from framework.errors import (
    EXIT_OK,
    MISSING,
    ConfigError,
    PeerLostError,
    Problem,
    RunStopped,
)
from framework.hosts.hostfile import is_host
from framework.launch.job import print_line
from framework.launch.rendezvous.channel import (
    Channel,
    ConnectionLost,
    Message,
    NoAgent,
    foreign,
    is_proof,
    new_nonce,
    proof,
    reason_of,
)
from framework.launch.rendezvous.connectivity import (
    PortInUse,
    Target,
    call_others,
    dial,
    in_background,
    is_loopback,
    listen_at,
    resolve,
    targets_of,
)
from framework.launch.rendezvous.messages import (
    Challenge,
    Done,
    Go,
    Reach,
    read_message,
    read_problems,
)
from framework.launch.rendezvous.peers import MemberPeers
from framework.launch.rendezvous.session import (
    BEAT_SECONDS,
    HANDSHAKE_SECONDS,
    LOOK_SECONDS,
    RUNNING_BEAT_SECONDS,
    SILENCE_SECONDS,
    JobOver,
    RestartDecision,
    Session,
    Start,
)
from framework.launch.supervision import JobEnd, is_final

_DIAL_AGAIN_SECONDS: Final = 1.0
_NO_AGENT_SECONDS: Final = 20.0
_PORT_IN_USE_SECONDS: Final = 5.0
# A name may still mean the last pod of this rank: name servers keep an answer for half a minute,
# and several of them may be chained.
_DOUBT_SECONDS: Final = 120.0
_DOUBT_ELSEWHERE_SECONDS: Final = 10.0  # the same for node 0 where there are no pods
_OF_A_POD: Final = "KUBERNETES_SERVICE_HOST"  # the kubelet gives it to every container
_ELSEWHERE_AFTER_SECONDS: Final = 5.0  # and for other nodes where there are no pods
# Node 0 keeps the deadline and sends the reason, so no other node leaves before it.
_AFTER_DEADLINE_SECONDS: Final = 30.0
_WAITS: Final = "waiting for the others"
_LONGEST_REPORT: Final = 500
_DECISIONS: Final = ("again", "done", "stop", "lost")
_T = TypeVar("_T")


class Member:
    """One node. `close` comes last.

    Attributes:
        is_heard: an agent answers at node 0's address.
    """

    def __init__(self, session: Session) -> None:
        """Prepare to call node 0; `session`: this node's part in the job."""
        self._session = session
        self._where = session.topology.master_addr
        self._channel: Channel | None = None
        self._peers: MemberPeers | None = None
        self._noting: asyncio.Future[None] | None = None
        self._heard: asyncio.Queue[Start | Message | ConnectionLost] = asyncio.Queue()
        self._is_known = False  # to a node 0 of this job, which has proved that it is one
        self._hearing: asyncio.Task[None] | None = None
        self._why = "no answer yet"
        self._welcomed_at: float | None = None
        self._waits = _WAITS
        self._no_agent_since = math.inf
        self.is_heard = False

    # Starts and ends.

    async def begin(self) -> Start:
        """Wait until node 0 sends GO.

        Raises:
            ConfigError, PeerLostError, RunStopped: there is no start.
            JobOver: the job has ended without this node.
        """
        self._session.begin_wait()
        while True:
            start = await self._watched(self.attempt())
            if start is not None:
                return start

    async def attempt(self) -> Start | None:
        """Wait for GO, after a call of node 0 if none is connected.

        Returns:
            None a second after the connection failed or was lost: it is time to call again.

        Raises:
            ConfigError: this node is refused, or its addresses cannot be right.
            PeerLostError, RunStopped, JobOver: node 0 reports it.
        """
        try:
            if self._channel is None:
                self._channel = await self._call()
                await asyncio.wait_for(self._introduce(self._channel), HANDSHAKE_SECONDS)
                self._hearing = asyncio.ensure_future(self._hear(self._channel))
            return await self._wait_for_go(self._channel)
        except asyncio.TimeoutError:
            lost = ConnectionLost("connected, but no agent answers there")
        except ConnectionLost as error:
            lost = error
        self._why = str(lost)
        self._note_no_agent(lost)
        if self._session.is_idle:
            self._session.begin_wait()
        self.hang_up()
        self._refuse_place()
        await asyncio.sleep(_DIAL_AGAIN_SECONDS)
        return None

    async def decide_restart(self, end: JobEnd) -> RestartDecision:
        """Wait for node 0's decision about another start.

        A node 0 that is lost may come back, so this node calls it again. After a request to stop
        here there is no other start.
        """
        session = self._session
        peers = self._peers
        if session.restarts is None:
            return RestartDecision(is_again=False)
        assert peers is not None
        session.begin_wait()
        self._waits = "deciding about another start"
        try:
            while True:
                message = await self._watched(self._take(), takes_requests=False)
                if isinstance(message, Start) or message["type"] not in _DECISIONS:
                    continue
                self._waits = reason_of(message.get("why"))
                code = read_message(Done, message).code if message["type"] == "done" else EXIT_OK
                return RestartDecision(message["type"] == "again", code)
        except ConnectionLost as lost:
            self.hang_up()
            if is_final(end.code) or peers.any_stop or session.requests.asked:
                return RestartDecision(is_again=False)
            print_line(f"node 0 is lost ({lost}); calling it again [rejoining]")
            await asyncio.to_thread(session.restarts.count_lost)
            session.state = session.restarts.state
            return RestartDecision(is_again=True)

    async def close(self) -> None:
        """Close the connection and the echo ports."""
        self.hang_up()
        self._session.close()

    async def _watched(self, work: Awaitable[_T], *, takes_requests: bool = True) -> _T:
        """Await with the checks of `Session.watch`; a request to stop here is sent to node 0."""
        try:
            return await self._session.watch(
                work, self._waiting_for, deadline=self._deadline, takes_requests=takes_requests
            )
        except RunStopped:
            if self._channel is not None and self._session.requests.is_meant:
                with suppress(ConnectionLost):
                    self._channel.send("stop", why=self._session.requests.asked)
                await asyncio.sleep(0)  # the event loop sends it
            raise

    def _deadline(self) -> float | None:
        """Return the `time.monotonic()` at which the wait is over; None for the session's own.

        Once a node has been let in, node 0 keeps the deadline and sends the reason, so that this
        one is later.
        """
        if self._welcomed_at is None:
            return None
        if self._session.is_idle:
            return math.inf
        began = max(self._session.started_at, self._welcomed_at)
        return began + self._session.deadline_seconds + _AFTER_DEADLINE_SECONDS

    def _waiting_for(self) -> str:
        node_0 = f"node 0: {self._where}:{self._session.port}"
        if self._welcomed_at is None:
            return f"waiting for {node_0} ({self._why})"
        return f"{node_0} is {self._waits}"

    # The handshake.

    async def _call(self) -> Channel:
        """Open a connection to node 0. Raises ConnectionLost if none can be opened."""
        answer = await asyncio.wrap_future(in_background(dial, self._where, self._session.port))
        if isinstance(answer, str):
            self._no_agent_since = math.inf  # nothing listens there, so no other program does
            raise ConnectionLost(answer)
        answer.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_connection(Channel, sock=answer)
        channel.name = "node 0"
        return channel

    async def _introduce(self, channel: Channel) -> None:
        """Do the handshake with node 0.

        Raises:
            ConfigError: this node is refused.
            ConnectionLost: no node 0 of this job answers, or it wants to be called again later.
        """
        session = self._session
        token = session.token
        own_nonce = new_nonce()
        session.local_address = channel.local_address
        challenge = read_message(Challenge, await channel.receive())
        self._check_challenge(channel, challenge)
        self.is_heard = True
        hello = self._hello(channel)
        nonces = (challenge.nonce, own_nonce)
        channel.send(
            "hello",
            hello=hello,
            nonce=own_nonce,
            proof=proof(token, role="node", nonces=nonces, content=hello),
        )
        answer = await channel.receive()
        if answer["type"] == "nogo":
            refusal = proof(
                token, role="nogo", nonces=nonces, content={"problems": answer.get("problems")}
            )
            self._raise_refusal(answer, is_proven=is_proof(answer.get("proof"), refusal))
            raise ConnectionLost(
                "the program that answers there refuses, and does not know the token"
            )
        if answer["type"] == "later":
            raise ConnectionLost(reason_of(answer.get("why")))
        signed = proof(token, role="lead", nonces=nonces, content={})
        if answer["type"] != "welcome" or not is_proof(answer.get("proof"), signed):
            raise ConnectionLost("the program that answers there does not know the token")
        channel.sign(token, is_lead=False, nonces=nonces)
        self._welcomed_at = time.monotonic()
        self._no_agent_since = math.inf
        self._is_known = True

    def _check_challenge(self, channel: Channel, challenge: Challenge) -> None:
        """Raise an error if one side has a token and the other has none."""
        if challenge.token == bool(self._session.token):
            return
        if self._is_known:  # the address has another owner for a while
            raise ConnectionLost("the program that answers there is none of this job")
        if challenge.token:
            reason = "it asks for a token"
        else:
            reason = "it has no token, and this node has one"
        channel.send("refused", why="token-refused")
        fix = "give every node the same token (--token_file), or none"
        raise ConfigError.of("token-refused", reason, fix, file="node 0")

    def _hello(self, channel: Channel) -> dict[str, Any]:
        """Return this node's HELLO, and answer at the port in it if there was a preflight."""
        session = self._session
        hello = {**session.hello, "clock": time.time(), "state": dict(session.state)}
        if "look" in hello:
            with suppress(OSError):  # without a port or a file left, no other node calls this one
                hello["echo"] = [channel.local_address, session.answer_at(channel.local_address)]
        return hello

    async def _next_message(
        self, channel: Channel, *, beat_seconds: float = BEAT_SECONDS
    ) -> Message:
        """Wait for a message, and send a beat every `beat_seconds` meanwhile.

        Raises:
            ConnectionLost: node 0 is gone, or silent for `SILENCE_SECONDS`.
        """
        receiving = asyncio.ensure_future(channel.receive())
        try:
            while not (await asyncio.wait({receiving}, timeout=beat_seconds))[0]:
                channel.send("beat")
                if time.monotonic() - channel.heard_at > SILENCE_SECONDS:
                    raise ConnectionLost(f"silent for {SILENCE_SECONDS:.0f} s")
            return receiving.result()
        finally:
            receiving.cancel()

    async def _hear(self, channel: Channel) -> None:
        """Receive the messages of node 0 until it is lost.

        News of a start reach its peers; every other message is queued for `_take`.
        """
        try:
            while True:
                beat_seconds = BEAT_SECONDS if self._peers is None else RUNNING_BEAT_SECONDS
                message = await self._next_message(channel, beat_seconds=beat_seconds)
                if message["type"] == "news":
                    if self._peers is not None:
                        self._peers.hear(message)
                elif message["type"] == "go":
                    self._heard.put_nowait(self._go(channel, message))
                elif message["type"] != "beat":
                    self._heard.put_nowait(message)
        except ConnectionLost as lost:
            if self._peers is not None:
                self._peers.lose(lost)
            self._heard.put_nowait(lost)

    async def _take(self) -> Start | Message:
        """Wait for what `_hear` queues next. Raises ConnectionLost once node 0 is lost."""
        heard = await self._heard.get()
        if isinstance(heard, ConnectionLost):
            raise heard
        return heard

    async def _wait_for_go(self, channel: Channel) -> Start:
        """Wait for GO, and call other nodes when node 0 asks for it. Raises as `attempt` does."""
        calls: asyncio.Task[None] | None = None
        try:
            while True:
                message = await self._take()
                if isinstance(message, Start):
                    return message
                if message["type"] == "reach":
                    targets, token = self._calls_of_round(message)
                    if calls is None or calls.done():
                        calls = asyncio.ensure_future(_call_others(channel, targets, token))
                else:
                    self._raise_end(message)
                    self._note_wait(message)
        finally:
            if calls is not None:
                calls.cancel()

    def _raise_end(self, message: Message) -> None:
        """Raise the error of a message that ends the wait for GO, see `begin`."""
        if message["type"] == "nogo":
            self._raise_refusal(message, is_proven=True)
        elif message["type"] == "done":
            raise JobOver(read_message(Done, message).code)
        elif message["type"] in ("stop", "lost"):
            error = RunStopped if message["type"] == "stop" else PeerLostError
            raise error(f"node 0: {str(message.get('why'))[:_LONGEST_REPORT]}")

    def _note_wait(self, message: Message) -> None:
        """Note what node 0 waits for, and whether this node is a spare meanwhile."""
        if message["type"] in ("waiting", "again"):
            if self._session.is_idle:
                self._session.begin_wait()
            self._waits = str(message.get("text", message.get("why")))[:_LONGEST_REPORT]
        elif message["type"] == "idle":
            self._session.begin_wait(is_idle=True)
            self._waits = "training, and this node is a spare"

    def _calls_of_round(self, message: Message) -> tuple[list[Target], str]:
        """Return the endpoints to call, and the token to send to them.

        Raises:
            NoAgent: an endpoint cannot be that of a node, or this node was to call none. The sender
                may not be node 0, and want this node to connect to others.
        """
        topology = self._session.topology
        reach = read_message(Reach, message)
        if "look" not in self._session.hello:
            raise foreign()
        nodes = targets_of(reach, most=self._session.num_nodes)
        return [*nodes, (topology.master_addr, topology.master_port)], reach.token

    def _go(self, channel: Channel, message: Message) -> Start:
        """Return the start that node 0 describes: its nodes, its port, and whether it resumes.

        This node takes over the state of the restarts. Raises NoAgent if it is not a GO of this
        job.
        """
        session = self._session
        own_node = session.topology.node_rank
        go = read_message(Go, message)
        is_port = self._is_port(go.port, resumes=go.resumes)
        if not is_port or not self._are_nodes(go.nodes) or own_node not in go.nodes:
            raise foreign()
        names = {node: _host_name(go.hosts.get(str(node))) for node in go.nodes}
        names[own_node] = session.hello["host"]
        session.state = go.state
        if session.restarts is not None:
            session.restarts.restore(go.state)
            self._noting = asyncio.ensure_future(asyncio.to_thread(session.restarts.begin))
        session.meet_is_over()
        topology = replace(
            session.topology,
            nnodes=len(go.nodes),
            node_rank=go.nodes.index(own_node),
            master_port=go.port,
        )
        self._peers = MemberPeers(own_node, names, channel, epoch=go.epoch)
        return Start(self._peers, topology, go.resumes)

    def _is_port(self, port: int, *, resumes: bool) -> bool:
        """Check whether ranks may meet at this port of node 0.

        Only a job that restarts may use another one than its command line gives.
        """
        if self._session.restarts is None:
            return port == self._session.topology.master_port and not resumes
        return True

    def _are_nodes(self, nodes: Sequence[int]) -> bool:
        """Check whether these can be the nodes of a start.

        They are in ascending order with node 0 first. Fewer than all are possible only in jobs that
        restart.
        """
        wanted = self._session.topology.nnodes
        is_ordered = (
            list(nodes) == sorted(set(nodes))
            and nodes[0] == 0
            and nodes[-1] < self._session.num_nodes
        )
        is_enough = len(nodes) == wanted or (
            self._session.restarts is not None and len(nodes) < wanted
        )
        return is_ordered and is_enough

    def _raise_refusal(self, message: Message, *, is_proven: bool) -> None:
        """Raise a ConfigError for a refusal by node 0, or return if it is not believed.

        A refusal without a proof may come from any program. It is believed if it explains why this
        node cannot prove anything, and ends this node alone.
        """
        problems = _problems(message)
        is_believed = any(problem.kind == "token-refused" for problem in problems)
        if is_proven or (is_believed and not self._is_known):
            raise ConfigError(problems)

    def hang_up(self) -> None:
        """Close the connection; another attempt may follow."""
        if self._channel is not None:
            self._channel.close()
        if self._hearing is not None:
            self._hearing.cancel()
        self._channel = None
        self._hearing = None
        self._welcomed_at = None
        self.is_heard = False
        self._waits = _WAITS
        self._heard = asyncio.Queue()

    # Wrong addresses.

    def _note_no_agent(self, lost: ConnectionLost) -> None:
        """Raise a ConfigError once another program has answered for `_NO_AGENT_SECONDS`.

        Silence does not count: it may be that of a node 0 that is busy.
        """
        now = time.monotonic()
        if not isinstance(lost, NoAgent) or self.is_heard:
            self._no_agent_since = math.inf
            return
        self._no_agent_since = min(self._no_agent_since, now)
        if now - self._no_agent_since > _NO_AGENT_SECONDS:
            reason = f"what answers at {self._where}:{self._session.port} is no agent: {self._why}"
            raise _port_error(
                self._session.port, reason, fix="give all nodes another --master_port"
            )

    def _refuse_place(self) -> None:
        """Raise a ConfigError if this node has node 0's address."""
        session = self._session
        # In a pod the name may still mean the last pod of this rank.
        if _OF_A_POD in os.environ:
            doubt_seconds = _DOUBT_SECONDS
        else:
            doubt_seconds = _ELSEWHERE_AFTER_SECONDS
        is_late = time.monotonic() - session.started_at > doubt_seconds
        if self._is_known or not session.topology.node_rank or not is_late:
            return
        if is_loopback(self._where):
            return
        with suppress(PortInUse):
            listener = listen_at(self._where, session.port)
            if listener is not None:
                listener.close()
                raise ConfigError(elsewhere_problem(session))


def _host_name(reported: object) -> str:
    """Return a reported name if a host can have it; else the node is named by its number."""
    if isinstance(reported, str) and is_host(reported):
        return reported
    return ""


async def _call_others(channel: Channel, targets: Sequence[Target], token: str) -> None:
    """Call other nodes, and send the failed calls to node 0."""
    failures = await asyncio.wrap_future(in_background(call_others, targets, token))
    with suppress(ConnectionLost):
        failed = [[number, call.address, call.reason] for number, call in failures.items()]
        channel.send("reached", token=token, failed=failed)


def _port_error(port: int, reason: str, fix: str, *, file: str = "") -> ConfigError:
    return ConfigError.of(
        "port-not-usable", reason, fix, key="--control_port", value=port, file=file
    )


def _problems(message: Message) -> list[Problem]:
    """Return the problems in a refusal; at least one."""
    problems = []
    for record in read_problems(message):
        kind = record.get("kind", "")
        reason = record.get("reason", "")
        fix = record.get("fix", "")
        key = record.get("key", "")
        value = record.get("value", MISSING)
        problems.append(Problem(kind, reason, fix, key, value, record.get("file", "")))
    if problems:
        return problems
    reason = "it refused without a reason"
    return [Problem("node-refused", reason, "read its output", file="node 0")]


def elsewhere_problem(session: Session) -> Problem:
    """Return the problem that master_addr is not node 0's, as seen from node 0 or another node."""
    rank = session.topology.node_rank
    value = session.topology.master_addr
    if rank:
        is_of = f"this is the address of node {rank}, not of node 0"
    else:
        is_of = "node 0 does not have this address"
    fix = "give node rank 0 to the host whose address is master_addr"
    file = f"node {rank} ({session.hello['host']})"
    return Problem("node-rank-swapped", is_of, fix, key="master_addr", value=value, file=file)


async def find_listener(session: Session) -> socket.socket:
    """Listen, on node 0, as soon as master_addr is an address of this machine.

    Until then, call the agent or program that listens there.

    Raises:
        ConfigError: another process has the port or the address.
        RunStopped, PeerLostError: see `Session.look`.
    """
    master = session.topology.master_addr
    caller = Member(session)
    session.begin_wait()
    attempt: asyncio.Future[Start | None] | None = None
    try:
        while True:
            waited = time.monotonic() - session.started_at
            # While another node 0 answers, its messages are read to the end: it may have sent the
            # last one, with its port free already.
            if not caller.is_heard:
                listener = _try_to_listen(session, waited)
                if listener is not None:
                    return listener
            if attempt is None:
                attempt = asyncio.ensure_future(caller.attempt())
            done, _ = await asyncio.wait({attempt}, timeout=LOOK_SECONDS)
            if done:
                attempt.result()
                attempt = None
            session.look(caller._waiting_for)
            if _OF_A_POD in os.environ:
                doubt_seconds = _DOUBT_SECONDS
            else:
                doubt_seconds = _DOUBT_ELSEWHERE_SECONDS
            if waited > doubt_seconds and resolve(master):
                raise ConfigError(elsewhere_problem(session))
    finally:
        if attempt is not None:
            attempt.cancel()
        caller.hang_up()


def _try_to_listen(session: Session, waited: float) -> socket.socket | None:
    """Listen at master_addr if this machine has it, else return None.

    The port may be in use by another node 0, which will refuse this one. If there was no challenge
    for `_PORT_IN_USE_SECONDS`, it is no agent that has the port, and this raises a ConfigError.
    `waited`: seconds since the first try.
    """
    try:
        return listen_at(session.topology.master_addr, session.port)
    except PortInUse as in_use:
        if waited <= _PORT_IN_USE_SECONDS:
            return None
        reason = f"agents cannot meet at {in_use}: another program listens there"
        fix = "give all nodes another --master_port or --control_port"
        raise _port_error(session.port, reason, file="node 0", fix=fix) from None
