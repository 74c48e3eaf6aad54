"""Another node than node 0: calls it until it is answered, says what it is, waits for GO, and stays
connected for the life of the job. One that loses node 0 between two starts calls again: what it
knows of the restarts goes with it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar

from framework.errors import (
    EXIT_OK,
    EXIT_PEER_LOST,
    MISSING,
    ConfigError,
    PeerLostError,
    Problem,
    RunStopped,
)
from framework.launch.hosts.hostfile import is_host
from framework.launch.job import print_line
from framework.launch.rendezvous.channel import (
    PROTOCOL,
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
from framework.launch.supervision import JobEnd, is_final, is_state

_DIAL_AGAIN_SECONDS: Final = 1.0
_NO_AGENT_SECONDS: Final = 20.0
_PORT_IN_USE_SECONDS: Final = 5.0
# A name may still mean the last pod of this rank: name servers keep an answer for half a minute,
# some of them behind each other.
_DOUBT_SECONDS: Final = 120.0
_DOUBT_ELSEWHERE_SECONDS: Final = 20.0
_OF_A_POD: Final = "KUBERNETES_SERVICE_HOST"  # the kubelet gives it to every container
_ELSEWHERE_AFTER_SECONDS: Final = 5.0
_ELSEWHERE_SECONDS: Final = 10.0  # in which all that call here hear what is wrong
# Node 0 keeps the deadline and says why, so that nobody else is the first to leave.
_AFTER_DEADLINE_SECONDS: Final = 30.0
_WAITS: Final = "waiting for the others"
_MOST_VISITS: Final = 64
_LONGEST_REPORT: Final = 500
_ROUND: Final = re.compile(r"[0-9a-f]{32}")
_GO: Final = frozenset({"type", "nodes", "resumes", "epoch", "port", "state", "hosts"})
_MOST_STARTS: Final = 1 << 31
_DECISIONS: Final = ("again", "done", "stop", "lost")
_T = TypeVar("_T")
_STATED: Final = ("kind", "reason", "fix", "key", "file")  # of a problem, as texts


class Member:
    """One node. `close` comes last.

    Attributes:
        is_heard: an agent answers.
    """

    def __init__(self, session: Session, *, visited: str = "") -> None:
        """Call node 0; or a host that is `visited` because node 0 may be there, with another idea
        of who that is.
        """
        self._session = session
        self._visited = visited
        self._where = visited or session.topology.master_addr
        self._channel: Channel | None = None
        self._peers: MemberPeers | None = None
        self._noting: asyncio.Future[None] | None = None
        self._heard: asyncio.Queue[Start | Message | ConnectionLost] = asyncio.Queue()
        self._is_known = False  # by a node 0 of this job, which proved what it said
        self._hearing: asyncio.Task[None] | None = None
        self._why = "no answer yet"
        self._welcomed_at: float | None = None
        self._waits = _WAITS
        self._no_agent_since = math.inf
        self.is_heard = False

    # Starts and ends.

    async def begin(self) -> Start:
        """Wait until node 0 says GO.

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
        """Call once, and wait for GO; None where the connection is lost before it."""
        try:
            if self._channel is None:
                self._channel = await self._call()
                await asyncio.wait_for(self._introduce(self._channel), HANDSHAKE_SECONDS)
                self._hearing = asyncio.ensure_future(self._hear(self._channel))
            return await self._wait_for_go(self._channel)
        except asyncio.TimeoutError:
            lost: ConnectionLost = ConnectionLost("connected, but no agent answers there")
        except ConnectionLost as how:
            lost = how
        self._why = str(lost)
        self._note_no_agent(lost)
        if self._session.is_idle:
            self._session.begin_wait()
        self.hang_up()
        await self._refuse_place()
        await asyncio.sleep(_DIAL_AGAIN_SECONDS)
        return None

    async def decide_restart(self, end: JobEnd) -> RestartDecision:
        """Wait for what node 0 decides about another start; one that is gone may come back, and is
        called again. Who was asked to stop here ends as its ranks have ended.
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
                if not isinstance(message, Start) and message["type"] in _DECISIONS:
                    self._waits = reason_of(message.get("why"))
                    return RestartDecision(
                        message["type"] == "again",
                        _code(message) if message["type"] == "done" else EXIT_OK,
                    )
        except ConnectionLost as lost:
            self.hang_up()
            if is_final(end.code) or peers.any_stop or session.requests.asked:
                return RestartDecision(is_again=False)
            print_line(f"node 0 is lost ({lost}); calling it again [rejoining]")
            await asyncio.to_thread(session.restarts.count_lost)
            session.state = session.restarts.state
            return RestartDecision(is_again=True)

    async def close(self) -> None:
        """Leave."""
        self.hang_up()
        self._session.close()

    async def _watched(self, work: Awaitable[_T], *, takes_requests: bool = True) -> _T:
        """Await with the checks of a wait; a request here is one for all."""
        terms: dict[str, Any] = {"deadline": self._deadline, "takes_requests": takes_requests}
        try:
            return await self._session.watch(work, self._waiting_for, **terms)
        except RunStopped:
            if self._channel is not None and self._session.requests.asked:
                with suppress(ConnectionLost):
                    self._channel.send("stop", why=self._session.requests.asked)
                await asyncio.sleep(0)
            raise

    def _deadline(self) -> float | None:
        """Return that of a node which has been let in: node 0 has its own, and says why."""
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
        found = await asyncio.wrap_future(in_background(dial, self._where, self._session.port))
        if isinstance(found, str):
            self._no_agent_since = math.inf  # nothing listens there, so no other program does
            raise ConnectionLost(found)
        found.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_connection(Channel, sock=found)
        channel.name = "node 0"
        return channel

    async def _introduce(self, channel: Channel) -> None:
        session = self._session
        token = self._session.token
        own_nonce = new_nonce()
        session.local_address = channel.local_address
        challenge = await channel.receive()
        if challenge["type"] != "challenge" or not isinstance(challenge.get("nonce"), str):
            raise foreign()
        if bool(challenge.get("token")) != bool(token):
            if self._is_known:  # the address has another owner for a while
                raise ConnectionLost("whoever answers there is none of this job")
            if challenge.get("token"):
                reason = "it asks for a token"
            else:
                reason = "it has no token, and this node has one"
            channel.send("refused", why="token-refused")
            fix = "give every node the same token (--token_file), or none"
            raise ConfigError.of("token-refused", reason, fix, file="node 0")
        self.is_heard = True
        hello = {**session.hello, "clock": time.time(), "state": dict(session.state)}
        if self._visited:
            hello["master_addr"] = session.topology.master_addr
        elif "look" in hello:
            with suppress(OSError):  # no port, no files: then nobody can try
                hello["echo"] = [channel.local_address, session.answer_at(channel.local_address)]
        nonces = (challenge["nonce"], own_nonce)
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
            self._refused(answer, is_proven=is_proof(answer.get("proof"), refusal))
            raise ConnectionLost("whoever answers there refuses, and does not know the token")
        if answer["type"] == "later":
            raise ConnectionLost(reason_of(answer.get("why")))
        signed = proof(token, role="lead", nonces=nonces, content={})
        if answer["type"] != "welcome" or not is_proof(answer.get("proof"), signed):
            raise ConnectionLost("whoever answers there does not know the token")
        channel.sign(token, is_lead=False, nonces=nonces)
        self._welcomed_at = time.monotonic()
        self._no_agent_since = math.inf
        self._is_known = True

    async def _next(self, channel: Channel, *, beat_seconds: float = BEAT_SECONDS) -> Message:
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
        """Hear node 0 until it is lost; what it says of a start reaches that start, and everything
        else is kept.
        """
        try:
            while True:
                beat_seconds = BEAT_SECONDS if self._peers is None else RUNNING_BEAT_SECONDS
                message = await self._next(channel, beat_seconds=beat_seconds)
                if message["type"] == "news":
                    if self._peers is not None:
                        self._peers.hear(message)
                elif message["type"] != "beat":
                    self._heard.put_nowait(
                        self._go(channel, message) if message["type"] == "go" else message
                    )
        except ConnectionLost as lost:
            if self._peers is not None:
                self._peers.lose(lost)
            self._heard.put_nowait(lost)

    async def _take(self) -> Start | Message:
        heard = await self._heard.get()
        if isinstance(heard, ConnectionLost):
            raise heard
        return heard

    async def _wait_for_go(self, channel: Channel) -> Start:
        calls: asyncio.Task[None] | None = None
        try:
            while True:
                message = await self._take()
                if isinstance(message, Start):
                    return message
                if message["type"] == "nogo":
                    self._refused(message, is_proven=True)
                elif message["type"] in ("waiting", "again"):
                    if self._session.is_idle:
                        self._session.begin_wait()
                    self._waits = str(message.get("text", message.get("why")))[:_LONGEST_REPORT]
                elif message["type"] == "idle":
                    self._session.begin_wait(is_idle=True)
                    self._waits = "training, and this node is a spare"
                elif message["type"] == "reach":
                    targets, token = self._round_of(message)
                    if calls is None or calls.done():
                        calls = asyncio.ensure_future(_call_others(channel, targets, token))
                elif message["type"] == "done":
                    raise JobOver(_code(message))
                elif message["type"] in ("stop", "lost"):
                    error = RunStopped if message["type"] == "stop" else PeerLostError
                    raise error(f"node 0: {str(message.get('why'))[:_LONGEST_REPORT]}")
        finally:
            if calls is not None:
                calls.cancel()

    def _round_of(self, message: Message) -> tuple[list[Target], str]:
        """Return the places to call and what is sent to them; NoAgent where no node of this job
        would be there, or nothing was to be called: whoever answers may want us to speak to others.
        """
        topology = self._session.topology
        token = message.get("token")
        if (
            "look" not in self._session.hello
            or not isinstance(token, str)
            or not _ROUND.fullmatch(token)
        ):
            raise foreign()
        nodes = targets_of(message, most=self._session.num_nodes)
        return [*nodes, (topology.master_addr, topology.master_port)], token

    def _go(self, channel: Channel, message: Message) -> Start:
        """Return the start that node 0 describes: who takes part, at which port, and whether it
        goes on. Nothing in it is a setting, a path or an address.
        """
        session = self._session
        own = self._session.topology.node_rank
        if not message.keys() <= _GO:
            raise foreign()
        match message:
            case {
                "nodes": [*nodes],
                "resumes": bool(resumes),
                "epoch": int(epoch),
                "port": int(port),
                "state": dict(state),
            }:
                numbers = {type(epoch), type(port), *map(type, nodes)}  # True is an int as well
                if numbers != {int} or own not in nodes or not is_state(state):
                    raise foreign()
            case _:
                raise foreign()
        if not (
            self._is_place(port, resumes=resumes)
            and self._are_nodes(nodes)
            and 0 < epoch < _MOST_STARTS
        ):
            raise foreign()
        hosts = message.get("hosts", {})
        if not isinstance(hosts, dict):
            raise foreign()
        named = {node: _host_name(hosts.get(str(node))) for node in nodes}
        named[own] = session.hello["host"]
        session.state = state
        if session.restarts is not None:
            session.restarts.restore(state)
            self._noting = asyncio.ensure_future(asyncio.to_thread(session.restarts.begin))
        session.meet_is_over()
        topology = replace(
            session.topology, nnodes=len(nodes), node_rank=nodes.index(own), master_port=port
        )
        self._peers = MemberPeers(own, named, channel, epoch=epoch)
        return Start(self._peers, topology, resumes)

    def _is_place(self, port: int, *, resumes: bool) -> bool:
        """Check whether ranks may meet at this port of node 0: another one than was given is for
        later starts.
        """
        if self._session.restarts is None:
            return port == self._session.topology.master_port and not resumes
        return 0 < port < 1 << 16

    def _are_nodes(self, nodes: Sequence[int]) -> bool:
        """Check whether these can be the nodes of a start: node 0 first, fewer than all only in
        jobs that restart.
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

    def _refused(self, message: Message, *, is_proven: bool) -> None:
        """Without a proof it may be by anybody: believed only because it ends this node alone, and
        says why.
        """
        problems = _problems(message)
        is_believed = any(
            problem.kind in ("token-refused", "node-rank-swapped") for problem in problems
        )
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
        """A while of something that is none of us is a port in use. Silence may be a node 0 that is
        busy.
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

    async def _refuse_place(self) -> None:
        """Say so to whoever calls, and end, where this node, which is not node 0, has its
        address.
        """
        session = self._session
        # In a pod the name may still mean the last pod of this rank.
        if _OF_A_POD in os.environ:
            doubt = _DOUBT_SECONDS
        else:
            doubt = _ELSEWHERE_AFTER_SECONDS
        is_late = time.monotonic() - session.started_at > doubt
        if self._is_known or self._visited or not session.topology.node_rank or not is_late:
            return
        if is_loopback(self._where):
            return
        with suppress(PortInUse):
            listener = listen_at(self._where, session.port)
            if listener is not None:
                await refuse_callers(session, listener, elsewhere_problem(session))


async def refuse_callers(session: Session, listener: socket.socket, problem: Problem) -> NoReturn:
    """Refuse whoever calls at node 0's address for a while, and then end with the same problem. The
    other hosts of a hostfile are asked meanwhile: node 0 may wait at one of them, because its
    hostfile is in another order, and hears then what differs.
    """

    async def refuse(channel: Channel) -> None:
        # No welcome: this node proves nothing, and what it says is taken where no token is asked
        # for.
        with suppress(ConnectionLost):
            channel.send(
                "challenge", protocol=PROTOCOL, nonce=new_nonce(), token=bool(session.token)
            )
            await channel.receive()
            channel.send("nogo", problems=[problem.to_dict()])
            await channel.receive()

    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Channel(lambda channel: tasks.add(loop.create_task(refuse(channel)))), sock=listener
    )
    print_line(f"{problem}; all that call here hear it for {_ELSEWHERE_SECONDS:.0f} s")
    others = [name.rpartition("@")[2] for name in session.names]
    visits = [_visit(session, name) for name in others if name != session.topology.master_addr][
        :_MOST_VISITS
    ]
    try:
        found, _ = await asyncio.gather(asyncio.gather(*visits), asyncio.sleep(_ELSEWHERE_SECONDS))
    finally:
        server.close()
    raise ConfigError([*dict.fromkeys(each for problems in found for each in problems), problem])


async def _visit(session: Session, name: str) -> list[Problem]:
    visitor = Member(session, visited=name)
    try:
        await asyncio.wait_for(visitor.attempt(), _ELSEWHERE_SECONDS)
    except ConfigError as error:
        # Another job may be there; it has nothing to say about this one.
        return [each for each in error.problems if each.kind not in ("token-refused", "other-job")]
    except asyncio.TimeoutError:
        pass
    finally:
        visitor.hang_up()
    return []


def _host_name(reported: object) -> str:
    """The name of a host, where one can have it; else the node is known by its number."""
    if isinstance(reported, str) and is_host(reported):
        return reported
    return ""


def _code(message: Message) -> int:
    code = message.get("code")
    if type(code) is int and 0 <= code < 256:
        return code
    return EXIT_PEER_LOST


async def _call_others(channel: Channel, targets: Sequence[Target], token: str) -> None:
    found = await asyncio.wrap_future(in_background(call_others, targets, token))
    with suppress(ConnectionLost):
        failed = [[number, each.address, each.reason] for number, each in found.items()]
        channel.send("reached", token=token, failed=failed)


def _port_error(port: int, reason: str, fix: str, *, file: str = "") -> ConfigError:
    return ConfigError.of(
        "port-not-usable", reason, fix, key="--control_port", value=port, file=file
    )


def _problems(message: Message) -> list[Problem]:
    found = message.get("problems")
    refused = []
    for item in found[:200] if isinstance(found, list) else ():
        if isinstance(item, dict):
            stated: dict[str, Any] = {name: str(item.get(name, ""))[:300] for name in _STATED}
            value = item.get("value")
            refused.append(
                Problem(**stated, value=value if isinstance(value, (str, int)) else MISSING)
            )
    return refused or [
        Problem("node-refused", "it refused, and said no reason", "read its output", file="node 0")
    ]


def elsewhere_problem(session: Session) -> Problem:
    """Node 0 and master_addr are not on one machine; said by either."""
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
    """Listen, on node 0, as soon as master_addr is an address of this machine; until then ask who
    listens there.

    Raises:
        ConfigError: somebody else has the port or the address, and says so, or does not answer.
    """
    master = session.topology.master_addr
    caller = Member(session)
    session.begin_wait()
    attempt: asyncio.Future[Start | None] | None = None
    try:
        while True:
            waited = time.monotonic() - session.started_at
            try:
                # Who speaks with another node 0 hears it out: its last word lies there, perhaps,
                # and its port is free already.
                if caller.is_heard:
                    listener = None
                else:
                    listener = listen_at(master, session.port)
                if listener is not None:
                    return listener
            except PortInUse as in_use:
                # Perhaps by another node 0, which will say so; not by an agent, if nobody has asked
                # who we are by now.
                if not caller.is_heard and waited > _PORT_IN_USE_SECONDS:
                    reason = f"agents cannot meet at {in_use}: another program listens there"
                    fix = "give all nodes another --master_port or --control_port"
                    raise _port_error(session.port, reason, file="node 0", fix=fix) from None
            attempt = attempt or asyncio.ensure_future(caller.attempt())
            if (await asyncio.wait({attempt}, timeout=LOOK_SECONDS))[0]:
                attempt.result()
                attempt = None
            session.look(caller._waiting_for)
            if _OF_A_POD in os.environ:
                doubt = _DOUBT_SECONDS
            else:
                doubt = _DOUBT_ELSEWHERE_SECONDS
            if waited > doubt and resolve(master):
                raise ConfigError(elsewhere_problem(session))
    finally:
        if attempt is not None:
            attempt.cancel()
        caller.hang_up()
