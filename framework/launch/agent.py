"""A job on one node: starts the ranks, watches them and the other nodes, and ends all of it as one.

rank fails / launcher or peer lost  -> every node: SIGTERM to all its ranks, 2 s, SIGKILL
stop requested anywhere             -> every node: SIGTERM to all its ranks at once; they save, and end with 75
stop requested of a rank alone      -> the ranks agree on it; the agents know, and nothing is started again
a rank that SIGKILL does not end    -> its node says so after a minute, and is lost to the job
every rank of every node ended      -> the agents tell each other, then leave; 0 only if all ended with 0
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
from framework.launch.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.options import KILL_SECONDS
from framework.launch.ranks import OomKills, RankEnd, Ranks
from framework.launch.rendezvous.peers import Failure, Peers
from framework.launch.stop_requests import StopRequests

_LOOK_SECONDS: Final = 0.1
# With a silent peer (15 s) before it everything is over within 20 s.
_ENDING_SECONDS: Final = 2.0
_CONFIRM_SECONDS: Final = 20.0
# The one who started us is gone: whoever is quick may still save.
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
) -> tuple[int, str, int]:
    """Start the ranks and see them end; no process of theirs is left afterwards but what
    `Ranks.not_killed` names: the others are not told that this node has ended, because it has not.

    Args:
        grace_seconds: to save in after a request to stop.

    Returns:
        This node's exit code, a line that says what happened, and the exit code of what happened,
        wherever that was.
    """
    attempt = _NodeAttempt(ranks, peers, requests, grace_seconds)
    try:
        attempt.start()
        await attempt.watch()
    finally:
        # for seconds, perhaps, in which the other nodes are still heard
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
    ranks: Ranks
    peers: Peers
    requests: StopRequests
    grace_seconds: float
    codes: list[int] = field(default_factory=list)
    stop_sent: bool = False
    asked_sent: bool = False
    kill_sent: bool = False
    stopping: bool = False
    kill_at: float = math.inf
    ending_since: float = math.inf
    begun_to_end: float = 0.0
    oom_kills: OomKills = field(default_factory=OomKills)

    def start(self) -> None:
        """All ranks, or the end of all nodes."""
        try:
            self.ranks.start()
        except (
            OSError
        ) as error:  # no more processes, no memory for one, an environment that is too large
            self.codes.append(EXIT_TRAINING)
            self._fail(f": a rank could not be started ({error.strerror})", EXIT_TRAINING)
            self._end_ranks()

    async def watch(self) -> None:
        """Until no rank runs here."""
        while self.ranks.num_running and not self.ranks.are_given_up:
            await self.peers.wait(_LOOK_SECONDS)
            # Who only lost somebody comes last: that somebody is what happened.
            ended = sorted(self.ranks.poll(), key=lambda end: end.code == EXIT_PEER_LOST)
            self._note_asked()
            for end in ended:
                self._ended(end)
            self._ask()
            self._take_request()

    async def conclude(self) -> tuple[int, str, int]:
        """Tell the others, and wait for how they ended."""
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
        stopped += f" in {time.monotonic() - self.begun_to_end:.1f} s" if self.begun_to_end else ""
        if self.peers.missing and self.peers.failures:
            stopped += f", {first_few(self.peers.missing)} did not answer"
        return self.result(code, stopped)

    def _ended(self, end: RankEnd) -> None:
        # Asked before it listened, a rank had nothing to save.
        if self.stopping and end.code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            code = EXIT_STOPPED
        else:
            code = end.code
        self.codes.append(code)
        if code == EXIT_OK or self.ending_since < math.inf:
            return
        if code == EXIT_STOPPED:
            if not self.peers.stop:
                self.peers.send("stop", why=f"rank {end.rank} stopped")
            return
        self.begun_to_end = self.begun_to_end or time.monotonic()
        how = how_ended(
            code, lacked_memory=code == 128 + signal.SIGKILL and self.oom_kills.have_risen()
        )
        how += f": {end.reason}" if end.reason else ""
        self._fail(f" rank {end.rank}: {how}", code)
        self._end_ranks()

    def _note_asked(self) -> None:
        if self.ranks.asked and not self.asked_sent:
            self.asked_sent = True
            if not self.stopping and self.ending_since == math.inf:  # else by us
                self.peers.send("asked", why=self.ranks.asked)

    def _fail(self, what: str, code: int) -> None:
        self.peers.send_failure(f"{self.peers.own_name}{what}", code=code)

    def _ask(self) -> None:
        self.requests.look()
        if self.requests.asked and not self.stop_sent:
            self.stop_sent = True
            self.peers.send("stop", why=self.requests.asked)
        if self.requests.insists and not self.kill_sent:
            self.kill_sent = True
            self.peers.send("kill")

    def _take_request(self) -> None:
        now = time.monotonic()
        if self.peers.failures:
            self._end_ranks()
        elif (
            self.peers.stop or self.stop_sent
        ):  # a signal that has come since `_ask` is for the next look
            self._stop_ranks(now)
            if self.peers.killed or self.kill_sent:
                self._give_up("killed at the second request to stop")
                print_line("second request to stop: all ranks are killed")
            elif now > self.kill_at:
                self._give_up(f"did not stop within {self._grace():.0f} s, and was killed")
        if now - self.ending_since > _ENDING_SECONDS:
            self.ranks.signal(signal.SIGKILL)

    def _stop_ranks(self, now: float) -> None:
        if self.requests.cut_off:
            self.kill_at = min(self.kill_at, now + _CUT_OFF_SECONDS)
        if self.stopping:
            return
        self.stopping, self.begun_to_end, self.kill_at = True, now, now + self._grace()
        why = self.peers.stop or self.requests.asked
        # Ranks name at their end what they got: Ctrl-C here is theirs, too. Where it is ignored, it
        # is ignored by both.
        self.ranks.signal(
            signal.SIGINT if self.requests.asked == signal.SIGINT.name else signal.SIGTERM
        )
        asked = f"asking {self.ranks.num_running} ranks to stop, with {self._grace():.0f} s to save"
        print_line(f"{why}: {asked}; once more kills them")

    def _give_up(self, what: str) -> None:
        self._fail(f": {what}", 128 + signal.SIGKILL)
        self.ending_since = time.monotonic() - _ENDING_SECONDS
        self.ranks.signal(signal.SIGKILL)

    def _end_ranks(self) -> None:
        if self.ending_since == math.inf:
            self.ending_since = time.monotonic()
            self.begun_to_end = self.begun_to_end or self.ending_since
            self.ranks.signal(signal.SIGTERM)

    def _grace(self) -> float:
        if self.requests.cut_off:
            return min(self.grace_seconds, _CUT_OFF_SECONDS)
        return self.grace_seconds

    def _own_code(self) -> int:
        order = {EXIT_STOPPED: 1, EXIT_OK: 2}
        return min(self.codes, key=lambda code: order.get(code, 0), default=EXIT_OK)

    def result(self, code: int, stopped: str) -> tuple[int, str, int]:
        """Say how the job ended, as far as it is known here; `stopped`: whether everything has, in
        words.
        """
        failure = first_failure(self.peers.failures)
        if failure is not None:
            # Two nodes may meet the same error by themselves: each ends with its own code.
            mine = self.peers.own_failure
            if self.peers.any_stop:
                asked = f"; a stop was asked for ({self.peers.any_stop}) [stop-asked]"
            else:
                asked = ""
            line = f"{failure.what} at {failure.at}; {stopped}{asked}"
            return mine.code if mine else EXIT_PEER_LOST, line, failure.code
        if {*self.peers.ended.values(), code} == {EXIT_OK}:
            return (
                EXIT_OK,
                f"finished: {counted(len(self.peers.ended), 'node')}, every rank ended with 0",
                EXIT_OK,
            )
        saved = "what was saved, if anything, the ranks said above"
        line = f"stopped on request ({self.peers.stop or 'a rank'}): {stopped}; {saved}"
        return EXIT_STOPPED, line, EXIT_STOPPED


def first_failure(failures: list[Failure]) -> Failure | None:
    """Return the failure that came first; one that is only the loss of another rank or node is
    chosen last.
    """
    return min(
        failures,
        key=lambda each: (each.code == EXIT_PEER_LOST) * (2 - (": lost: " in each.what)),
        default=None,
    )


def how_ended(code: int, *, lacked_memory: bool = False) -> str:
    """Put an exit code into words; `lacked_memory`: the kernel has counted a kill for it."""
    if lacked_memory:
        return (
            f"killed by the kernel for lack of host memory ({code}); {_LESS_MEMORY} "
            "[out-of-host-memory]"
        )
    if code > 128 and code - 128 in set(signal.Signals):
        hint = _HINTS.get(code - 128, "")
        return f"killed by {signal.Signals(code - 128).name} ({code}{hint})"
    meaning = _MEANING.get(code)
    return f"ended with {code}" + (f" ({meaning})" if meaning else "")
