"""A job on one node: the ranks are started, watched beside the other nodes, and ended together.

a rank fails, or a node is lost  -> every node: SIGTERM to all its ranks, 2 s, SIGKILL
an agent is requested to stop    -> every node: SIGTERM to all its ranks; they save, end with 75
a rank is requested to stop      -> the ranks agree on it; the agents know, and there is no restart
an agent loses its launcher      -> every node: as at a request; to the others the node is lost
SIGKILL does not end a rank      -> its node reports it after a minute, and is lost to the job
every rank of every node ended   -> the agents exchange their codes and leave; 0 only if all are 0
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from framework.errors import (
    EXIT_CONFIG,
    EXIT_NO_PROGRESS,
    EXIT_OK,
    EXIT_PEER_LOST,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TRAINING,
    counted,
)
from framework.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.options import KILL_SECONDS
from framework.launch.ranks import OomKills, RankEnd, Ranks
from framework.launch.rendezvous.peers import Failure, FailureKind, Peers
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import JobEnd

_LOOK_SECONDS: Final = 0.1
# Between SIGTERM and SIGKILL after a failure: the job is over within 20 s, of which a lost peer may
# have been silent for 15.
_ENDING_SECONDS: Final = 2.0
# A node that has ended after a failure waits this long for the others to end.
_CONFIRM_SECONDS: Final = 20.0
# Ranks have this time to save once the launcher is gone.
_CUT_OFF_SECONDS: Final = 15.0
_MEANING: Final = {
    EXIT_TRAINING: "training failed",
    EXIT_STORAGE: "storage failed",
    EXIT_PEER_LOST: "it lost another rank",
    EXIT_NO_PROGRESS: "no progress",
    EXIT_CONFIG: "configuration refused",
}
_OF_NATIVE_CODE: Final = ", in native code: /dev/shm too small (df /dev/shm), or a library"
_HINTS: Final[Mapping[int, str]] = {
    signal.SIGKILL: ", out of memory?",
    signal.SIGSEGV: _OF_NATIVE_CODE,
    signal.SIGBUS: _OF_NATIVE_CODE,
}
_LESS_MEMORY: Final = (
    "reduce data.num_workers, data.prefetch_batches, batch.micro_size or the offload to the CPU, "
    "or give the job more memory"
)


async def run_attempt(
    ranks: Ranks, peers: Peers, requests: StopRequests, *, grace_seconds: float
) -> tuple[int, JobEnd]:
    """Start the ranks, and watch them until they have ended.

    No process of theirs is left afterwards, except those in `Ranks.not_killed`. With such a process
    this node has not ended, and does not report that it has.

    Args:
        ranks: of this node.
        peers: state of this start on all nodes.
        requests: to stop.
        grace_seconds: to save in after a request to stop.

    Returns:
        This node's exit code, and the end of the job, whose cause may be another node's.
    """
    attempt = _NodeAttempt(ranks, peers, requests, grace_seconds)
    try:
        attempt.start()
        await attempt.watch()
    finally:
        # in a thread: it may take seconds, and messages of the other nodes are read meanwhile
        await asyncio.to_thread(ranks.clear)
    left = ranks.not_killed
    if left:
        where = f"{peers.own_name} {first_few(left)}"
        how = f"{where}: not ended {KILL_SECONDS:.0f} s after SIGKILL: it waits in the kernel"
        fix = (
            "bring back the mount or device that it waits for, or restart this host: it may "
            "hold its GPU until then"
        )
        return attempt.result(EXIT_PEER_LOST, f"{how}; {fix} [rank-not-killed]")
    return await attempt.conclude()


@dataclass
class _NodeAttempt:
    """One start of the job on this node.

    Attributes:
        codes: exit codes of the ranks that have ended here.
        stop_sent, cut_sent, asked_sent, kill_sent: this node has sent that report to all nodes.
        stopping: the ranks here have got a request to stop, and may save.
        kill_at: `time.monotonic()` at which stopping ranks are killed.
        ending_since: `time.monotonic()` of the SIGTERM after a failure; ranks may not save.
        begun_to_end: `time.monotonic()` of the first of both, for the log; 0 before.
    """

    ranks: Ranks
    peers: Peers
    requests: StopRequests
    grace_seconds: float
    codes: list[int] = field(default_factory=list)
    stop_sent: bool = False
    cut_sent: bool = False
    asked_sent: bool = False
    kill_sent: bool = False
    stopping: bool = False
    kill_at: float = math.inf
    ending_since: float = math.inf
    begun_to_end: float = 0.0
    oom_kills: OomKills = field(default_factory=OomKills)

    def start(self) -> None:
        """Start all ranks; if one cannot be started, end the job on all nodes."""
        try:
            self.ranks.start()
        except OSError as error:
            # no more processes, no memory for one, an environment that is too large
            self.codes.append(EXIT_TRAINING)
            self._fail(f": a rank could not be started ({error.strerror})", EXIT_TRAINING)
            self._end_ranks()

    async def watch(self) -> None:
        """Watch the ranks and the requests to stop until no rank runs here."""
        while self.ranks.num_running and not self.ranks.are_given_up:
            await self.peers.wait(_LOOK_SECONDS)
            # Sort PEER_LOST last: the lost peer's own failure is the root cause.
            ended = sorted(self.ranks.poll(), key=lambda end: end.code == EXIT_PEER_LOST)
            self._report_rank_stop()
            for end in ended:
                self._handle_end(end)
            self._ask()
            self._act_on_reports()

    async def conclude(self) -> tuple[int, JobEnd]:
        """Report this node's end, and wait for the ends of the others; see `run_attempt`."""
        code = self._own_code()
        self.peers.send("ended", code=code)
        confirm_until = math.inf
        while (
            not self.peers.all_ended
            and not self.peers.is_cut_off
            and time.monotonic() < confirm_until
        ):
            await self.peers.wait(_LOOK_SECONDS)
            self._ask()
            if self.peers.failures or self.peers.killed:
                confirm_until = min(confirm_until, time.monotonic() + _CONFIRM_SECONDS)
        await self.peers.flush()
        stopped = f"{counted(len(self.peers.ended), 'node')} stopped"
        if self.begun_to_end:
            stopped += f" in {time.monotonic() - self.begun_to_end:.1f} s"
        if self.peers.missing and self.peers.failures:
            stopped += f", {first_few(self.peers.missing)} did not answer"
        return self.result(code, stopped)

    def _handle_end(self, end: RankEnd) -> None:
        """Note the end of a rank; if it has failed, end the job on all nodes."""
        # A rank that got the signal before it handled it had nothing to save.
        if self.stopping and end.code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            code = EXIT_STOPPED
        else:
            code = end.code
        self.codes.append(code)
        if code == EXIT_OK or self.ending_since < math.inf:
            return
        if code == EXIT_STOPPED:
            if not self.peers.stop and not self.stopping:
                self.peers.send("stop", why=f"rank {end.rank} stopped")
            return
        self.begun_to_end = self.begun_to_end or time.monotonic()
        lacked_memory = code == 128 + signal.SIGKILL and self.oom_kills.have_risen()
        how = how_ended(code, lacked_memory=lacked_memory)
        if end.reason:
            how += f": {end.reason}"
        kind = FailureKind.FOLDER_LOST if end.is_folder_lost else FailureKind.RANK
        self._fail(f" rank {end.rank}: {how}", code, kind)
        self._end_ranks()

    def _report_rank_stop(self) -> None:
        """Report to all nodes, once, a request to stop that only a rank has received."""
        if self.ranks.asked and not self.asked_sent:
            self.asked_sent = True
            # else the signal came from this agent
            if not self.stopping and self.ending_since == math.inf:
                self.peers.send("asked", why=self.ranks.asked)

    def _fail(self, what: str, code: int, kind: FailureKind = FailureKind.RANK) -> None:
        """Report a failure to all nodes; `what` follows this node's name."""
        self.peers.send_failure(f"{self.peers.own_name}{what}", code=code, kind=kind)

    def _ask(self) -> None:
        """Pass on requests to stop that came to this agent."""
        self.requests.look()
        if self.requests.is_meant and not self.stop_sent:
            self.stop_sent = True
            self.peers.send("stop", why=self.requests.asked)
        if self.requests.cut_off and not (self.cut_sent or self.stop_sent):
            self.cut_sent = True
            self.peers.send("cut", why=self.requests.asked)
        if self.requests.insists and not self.kill_sent:
            self.kill_sent = True
            self.peers.send("kill")

    def _act_on_reports(self) -> None:
        """End, stop or kill the ranks here, by the failures and requests of all nodes."""
        now = time.monotonic()
        if self.peers.failures:
            self._end_ranks()
        # A signal that has come since `_ask` is left to the next round.
        elif self.peers.stop or self.peers.cut or self.stop_sent or self.cut_sent:
            self._stop_ranks(now)
            if self.peers.killed or self.kill_sent:
                self._kill_ranks("killed at the second request to stop")
                print_line("second request to stop: all ranks are killed")
            elif now > self.kill_at:
                self._kill_ranks(
                    f"did not stop within {self._save_seconds():.0f} s, and was killed"
                )
        if now - self.ending_since > _ENDING_SECONDS:
            self.ranks.signal(signal.SIGKILL)

    def _stop_ranks(self, now: float) -> None:
        """Send the ranks a request to stop, once; without the launcher they have less time."""
        if self.requests.cut_off:
            self.kill_at = min(self.kill_at, now + _CUT_OFF_SECONDS)
        if self.stopping:
            return
        self.stopping = True
        self.begun_to_end = now
        self.kill_at = now + self._save_seconds()
        why = self.peers.stop or self.peers.cut or self.requests.asked
        # Ranks name in their last line the signal that they got, so Ctrl-C here is SIGINT for them
        # as well. Where SIGINT is ignored, agent and ranks both ignore it.
        if self.requests.asked == signal.SIGINT.name:
            self.ranks.interrupt()
        else:
            self.ranks.signal(signal.SIGTERM)
        action = f"asking {self.ranks.num_running} ranks to stop"
        print_line(
            f"{why}: {action}, with {self._save_seconds():.0f} s to save; once more kills them"
        )

    def _kill_ranks(self, what: str) -> None:
        """Report a failure of this node, and kill its ranks; `what` follows the node's name."""
        self._fail(f": {what}", 128 + signal.SIGKILL)
        # As if SIGTERM had come before: ranks that are left get SIGKILL in the next round.
        self.ending_since = time.monotonic() - _ENDING_SECONDS
        self.ranks.signal(signal.SIGKILL)

    def _end_ranks(self) -> None:
        """Send SIGTERM to all ranks, once; `_act_on_reports` sends SIGKILL later."""
        if self.ending_since == math.inf:
            self.ending_since = time.monotonic()
            self.begun_to_end = self.begun_to_end or self.ending_since
            self.ranks.signal(signal.SIGTERM)

    def _save_seconds(self) -> float:
        if self.requests.cut_off:
            return min(self.grace_seconds, _CUT_OFF_SECONDS)
        return self.grace_seconds

    def _own_code(self) -> int:
        """Return the code of a failed rank, else of a stopped one, else 0."""
        order = {EXIT_STOPPED: 1, EXIT_OK: 2}
        return min(self.codes, key=lambda code: order.get(code, 0), default=EXIT_OK)

    def result(self, code: int, stopped: str) -> tuple[int, JobEnd]:
        """Return the end of the job, as far as it is known here, as `run_attempt` does.

        Args:
            code: exit code of this node's ranks.
            stopped: describes which nodes have stopped.
        """
        failure = first_failure(self.peers.failures)
        if failure is not None:
            line = f"{failure.what} at {failure.at}; {stopped}"
            if self.peers.any_stop:
                line += f"; a stop was asked for ({self.peers.any_stop}) [stop-asked]"
            # Two nodes may meet the same error by themselves: each ends with its own code.
            own_failure = self.peers.own_failure
            own_code = own_failure.code if own_failure else EXIT_PEER_LOST
            is_folder_lost = failure.kind is FailureKind.FOLDER_LOST
            end = JobEnd(failure.code, line, cause=failure.what, is_folder_lost=is_folder_lost)
            return own_code, end
        if code == EXIT_OK and not any(self.peers.ended.values()):
            line = f"finished: {counted(len(self.peers.ended), 'node')}, every rank ended with 0"
            return EXIT_OK, JobEnd(EXIT_OK, line)
        saved = "the ranks' lines above name what was saved, if anything was"
        why = self.peers.stop or self.peers.cut or "a rank"
        line = f"stopped on request ({why}): {stopped}; {saved}"
        if self.peers.cut and not self.peers.any_stop:
            return EXIT_STOPPED, JobEnd(EXIT_PEER_LOST, line)
        return EXIT_STOPPED, JobEnd(EXIT_STOPPED, line)


def first_failure(failures: list[Failure]) -> Failure | None:
    """Return the first failure that is a cause, or else the first one; None without any.

    The loss of a node comes after causes, and the loss of another rank after both.
    """

    def distance_from_cause(failure: Failure) -> int:
        if failure.code != EXIT_PEER_LOST:
            return 0
        if failure.kind is FailureKind.NODE_LOST:
            return 1
        return 2

    return min(failures, key=distance_from_cause, default=None)


def how_ended(code: int, *, lacked_memory: bool = False) -> str:
    """Describe an exit code; `lacked_memory`: the kernel has counted a kill for lack of memory."""
    if lacked_memory:
        return (
            f"killed by the kernel for lack of host memory ({code}); {_LESS_MEMORY} "
            "[out-of-host-memory]"
        )
    if code > 128 and code - 128 in set(signal.Signals):
        hint = _HINTS.get(code - 128, "")
        return f"killed by {signal.Signals(code - 128).name} ({code}{hint})"
    meaning = _MEANING.get(code)
    if meaning:
        return f"ended with {code} ({meaning})"
    return f"ended with {code}"
