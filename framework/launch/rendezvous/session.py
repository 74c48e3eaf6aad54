"""State that both sides of a rendezvous have: this node's HELLO, and the checks of every wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from framework.doctor.node.links import Echo
from framework.errors import EXIT_OK, PeerLostError, Problem, RunStopped
from framework.hosts.topology import HostTopology
from framework.launch.job import print_line
from framework.launch.rendezvous.peers import Peers
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import JobEnd, NextStart, Restarts

HANDSHAKE_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.2
BEAT_SECONDS: Final = 2.0  # while nodes meet
RUNNING_BEAT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 15.0
_REPORT_SECONDS: Final = 15.0
_FIRST_REPORT_SECONDS: Final = 3.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Start:
    """One start of the job on this node.

    Attributes:
        topology: with the rank that node 0 gave this node.
        resumes: it goes on from what the job has saved, even if the run config names another
            checkpoint.
    """

    peers: Peers
    topology: HostTopology
    resumes: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """Decision after a start: another one, or the end of the job.

    Attributes:
        code: exit code of every node, if the job is given up; else each has its own.
    """

    is_again: bool
    code: int = EXIT_OK


class JobOver(Exception):  # noqa: N818 - no error, but a regular end
    """The job has ended, with this exit code, while this node waited for its turn."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the job has ended with {code}; this node was not needed")
        self.code = code


@dataclass
class Session:
    """One node's part in a job.

    Attributes:
        port: of the agents.
        hello: facts of this node, as they are sent to node 0 in a `messages.Hello`.
        names: of the hosts, if there is a hostfile.
        problems: returns what keeps node 0 from training at this moment; it is reported to all.
        restarts: decides about further starts, on node 0; None: there are none here.
        spares: nodes beyond those that train, which take the place of one that is lost.
        fits: whether the job can train on a number of nodes, fewer than it began with.
        state: of the restarts, as node 0 sent it last.
        is_idle: the others train, and this node waits for its turn.
        started_at: `time.monotonic()` at which the wait began.
        local_address: on which this node and the others reach each other, once they have met.
    """

    topology: HostTopology
    hello: Mapping[str, Any]
    requests: StopRequests
    port: int = 0
    token: str = ""
    deadline_seconds: float = 1800.0
    names: Sequence[str] = ()
    problems: Callable[[], Sequence[Problem]] = tuple
    restarts: Restarts | None = None
    spares: int = 0
    fits: Callable[[int], bool] = lambda count: False
    state: Mapping[str, Any] = field(default_factory=dict, init=False)
    is_idle: bool = field(default=False, init=False)
    local_address: str = field(default="", init=False)
    _echoes: dict[tuple[str, int], Echo] = field(default_factory=dict, init=False)
    started_at: float = field(default_factory=time.monotonic, init=False)
    _reported_at: float = field(default=0.0, init=False)

    @property
    def num_nodes(self) -> int:
        """Nodes that may take part, spares included."""
        return self.topology.nnodes + self.spares

    def begin_wait(self, *, is_idle: bool = False) -> None:
        """Begin a wait; one that `is_idle` has no deadline, and is logged once."""
        self.is_idle = is_idle
        self.started_at = time.monotonic()
        self._reported_at = 0.0

    def look(
        self,
        waiting_for: Callable[[], str],
        *,
        deadline: float | None = None,
        takes_requests: bool = True,
    ) -> None:
        """Run the checks of every wait: take requests, keep the deadline, log every 15 s.

        Args:
            waiting_for: returns what is missing, in words.
            deadline: `time.monotonic()` at which the wait is over, if not after `deadline_seconds`.
            takes_requests: whether a request to stop ends the wait.

        Raises:
            RunStopped, PeerLostError: the wait is over.
        """
        if takes_requests:
            self.requests.refuse_start()
        if takes_requests and self.requests.lost:
            raise PeerLostError(
                f"another host has ended before all nodes were there; {waiting_for()} [peer-lost]"
            )
        now = time.monotonic()
        if deadline is None:
            deadline = self.started_at + self.deadline_seconds
        if now > deadline:
            raise PeerLostError(
                f"not all nodes came within {self.deadline_seconds:.0f} s; {waiting_for()} "
                "[rendezvous-timeout]"
            )
        if now - self._reported_at <= _REPORT_SECONDS:
            return
        if not self._reported_at:
            self._reported_at = now - _REPORT_SECONDS + _FIRST_REPORT_SECONDS
        elif self.is_idle:
            print_line(waiting_for())
            self._reported_at = math.inf
        else:
            since = f"since {now - self.started_at:.0f} s, at most {self.deadline_seconds:.0f}"
            print_line(f"{waiting_for()}; {since}")
            self._reported_at = now

    async def watch(
        self,
        work: Awaitable[_T],
        waiting_for: Callable[[], str],
        *,
        deadline: Callable[[], float | None],
        takes_requests: bool = True,
    ) -> _T:
        """Await `work` while the checks of every wait go on, with their errors."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.look(waiting_for, deadline=deadline(), takes_requests=takes_requests)
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
            return task.result()
        finally:
            task.cancel()

    async def pause(self, seconds: float, peers: Peers) -> None:
        """Wait before a start; raises RunStopped on request, at this node or another one."""
        until = time.monotonic() + seconds
        while True:
            self.requests.refuse_start()
            if peers.stop:
                raise RunStopped(
                    f"stopped on request ({peers.stop}) between two starts [stopped-early]"
                )
            left = until - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(LOOK_SECONDS, left))

    @property
    def resumes(self) -> bool:
        """True if this node decides that the next start goes on from what the job has saved."""
        return self.restarts is not None and self.restarts.resumes

    async def begin_start(self) -> None:
        """Note that a start begins, if this node decides about starts."""
        if self.restarts is not None:
            # in a thread: storage may be slow, and messages are read meanwhile
            await asyncio.to_thread(self.restarts.begin)

    async def decide(self, end: JobEnd, peers: Peers) -> NextStart | None:
        """Decide about another start; None if there is none."""
        if self.restarts is None:
            return None
        is_asked = bool(peers.any_stop or self.requests.asked)  # by the loss of the launcher, too
        return await asyncio.to_thread(self.restarts.after, end, is_asked=is_asked)

    def decision(self, again: NextStart | None) -> RestartDecision:
        """Return the decision that a node acts on, with the exit code of the job."""
        code = EXIT_OK if self.restarts is None else self.restarts.code
        return RestartDecision(again is not None, code)

    def answer_at(self, address: str, port: int = 0) -> int:
        """Answer at a port until `close`, so that other nodes can test whether they reach this one.

        Returns:
            The port, which the system chooses for 0.
        """
        if (address, port) not in self._echoes:
            self._echoes[address, port] = Echo(port, address=address)
        return self._echoes[address, port].port

    def meet_is_over(self) -> None:
        """Close the echo ports, and drop the preflight result, which is stale for later starts."""
        self.close()
        self.hello = {name: value for name, value in self.hello.items() if name != "look"}

    def close(self) -> None:
        """Close the echo ports."""
        for echo in self._echoes.values():
            echo.close()
        self._echoes.clear()
