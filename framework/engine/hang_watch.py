"""Reports what a run waits for when it makes no progress: which rank did not enter which
collective, and where it is.

While steps come, a step costs one store of two numbers. A thread of each rank notices when they
have stopped: for ten seconds, and three times what 99 of 100 gaps took in the same phase (steps, an
evaluation, saves, each callback). Then every rank writes its stacks to ``logs/hang-rank<N>.txt``
and posts to the process group's store where its main thread is and which collectives it has begun
(torch's flight recorder). One rank compares these states and reports them in a sentence. A rank
that posts nothing is stopped, or holds Python's lock: it is named as well. After
`supervision.hang_seconds` all ranks end, so that they can be started again; at once if a stop is
requested meanwhile. A run that goes on by itself was slow, and did not hang. While a rank is in a
debugger, no rank is watched.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import torch.distributed
from torch.distributed.distributed_c10d import Store

from framework.engine.distributed import own_store
from framework.engine.rank_states import (
    COMPILE_SECONDS,
    HANG,
    IN_FIRST_STEPS,
    SHORT_PHASES,
    SLOW,
    State,
    collectives,
    compiles,
    describe_stall,
    is_compiling,
    kind_of,
    place_of,
    sentence,
)
from framework.engine_protocol import EVALUATING, SAVING, STARTING, STEPS
from framework.errors import EXIT_NO_PROGRESS, EXIT_TRAINING
from framework.system.frames import current_frames
from framework.system.frames import is_at_prompt as is_at_prompt_of
from framework.system.log import report_event
from framework.system.parent_watch import record_failure, report_end
from framework.system.stopping import Decision, announce

_LOOK_SECONDS: Final = 0.5
_LEAST_SECONDS: Final = 10.0
_TIMES_USUAL: Final = 3.0
_USUAL: Final = 0.99  # of the gaps of a phase
_GAPS_OF_LATE: Final = 500
# Kernels are compiled in these: they do not show how long later ones take.
_FIRST_STEPS: Final = 2
_NUM_FIRST_GAPS: Final = {EVALUATING: 2}  # the first one ends before the first batch
# Only short phases end after `supervision.hang_seconds`. Others may rightly take as long as ranks
# wait for each other in a save.
_LONG_SECONDS: Final = 7200.0
_SETTLE_SECONDS: Final = 2.0  # in which every rank has noticed the stall, and posted
# A phase that may be slow, other than a save, is ended this long after a stop was requested.
_STOP_SECONDS: Final = 60.0
_MOST_COMPARING: Final = 8  # ranks that may compare: it takes two requests for each rank
_AT_PROMPT: Final = "at-prompt"


@contextmanager
def watching(
    *,
    logs: Path,
    end_seconds: float,
    least_seconds: float = _LEAST_SECONDS,
    stop_request: Callable[[], str] = str,
) -> Iterator[HangWatch]:
    """Watch this rank from its start to its end.

    Args:
        logs: folder for the stacks.
        end_seconds: without a sign of life after which this process ends; 0 for never.
        least_seconds: without one before ranks are looked at.
        stop_request: returns the request to stop this process, empty without one. Called in a
            thread.
    """
    world_size = torch.distributed.get_world_size()
    store: Store | None = None
    if world_size > 1:
        store = own_store("hang")
    watch = HangWatch(
        store,
        rank=torch.distributed.get_rank(),
        world_size=world_size,
        logs=logs,
        end_seconds=end_seconds,
        least=least_seconds,
        stop_request=stop_request,
    )
    watch.start()

    try:
        yield watch
    finally:
        watch.close()


class Watched:
    """A callable that a loop calls before every step and between the batches of an evaluation:
    passes the call on to `ask`, and takes it as a sign of life.
    """

    def __init__(self, watch: HangWatch, ask: Callable[[int], Decision]) -> None:
        self._watch = watch
        self._ask = ask
        self._last: int | None = None
        self.enter = watch.enter
        self.during = watch.during

    def __call__(self, step: int) -> Decision:
        if self._last is None:
            self._watch.begin(step)
        self._last = step
        self._watch.beat(step)
        return self._ask(step)

    def live(self) -> None:
        """Give a sign of life, once the loop has made its first call: before, steps are not
        watched.
        """
        if self._last is not None:
            self._watch.beat(self._last)


class Gaps:
    """Seconds between the latest signs of life, by the phase of the run."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_GAPS_OF_LATE))
        self._compiling: dict[str, list[float]] = defaultdict(list)

    def noted(self, phase: str) -> Callable[[float], None]:
        """Return the function that notes a gap of a phase, in seconds."""
        return self._latest[phase].append

    def noted_first(self, phase: str, seconds: float) -> bool:
        """Note a gap apart if it is one of the first of a phase, in which kernels are compiled.
        Return whether it is.
        """
        compiling = self._compiling[phase]
        is_first = len(compiling) < _NUM_FIRST_GAPS.get(phase, 0)
        if is_first:
            compiling.append(seconds)
        return is_first

    def excused(self, phase: str, seconds: float) -> None:
        """Note a gap in which something was compiled: the shortest of them counts until there is
        another gap.
        """
        self._compiling[phase].append(seconds)

    def limit(self, phase: str, *, least: float) -> float:
        """Return the seconds without a sign of life after which a phase is looked at."""
        gaps = sorted(self._latest[phase].copy())
        if not gaps and phase == STEPS:
            gaps = sorted(self._compiling[phase])[:1]
        if not gaps:
            return max(least, COMPILE_SECONDS)
        usual = gaps[math.ceil(_USUAL * len(gaps)) - 1]
        return max(least, _TIMES_USUAL * usual)


class HangWatch:
    """The watch of one rank."""

    def __init__(
        self,
        store: Store | None,
        *,
        rank: int,
        world_size: int,
        logs: Path,
        end_seconds: float,
        least: float,
        stop_request: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._logs = logs
        self._end_seconds = end_seconds
        self._least = least
        self._stop_request = stop_request
        self._requested_at = math.inf
        self._num_compiled = 0
        self._is_at_prompt = False
        self._was_paused = False
        self._step = 0
        self._at = time.monotonic()
        self._first_step: int | None = None
        self._gaps = Gaps()
        self.phase = STARTING
        self._note = self._gaps.noted(STARTING)
        self._main = 0  # thread that runs the loop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._stacks: IO[str] | None = None
        # time of the last sign of life, phase and step
        self._stalled: tuple[float, str, int] | None = None
        self._is_reported = False
        self._kind = ""  # of the stall that this rank has reported
        self._reported_step = 0
        self._posts: list[int] = []  # numbers of posts of every rank, when this one first looked
        self._settle = _SETTLE_SECONDS / 2

    def start(self) -> None:
        """Begin to look."""
        self._main = threading.get_ident()
        self._thread.start()

    def begin(self, step: int) -> None:
        """Note the first call of a loop. A loop of the user's own may make it late, or never."""
        self._first_step = step
        self._step = step
        if not self.phase:
            self.enter(STEPS)

    def beat(self, step: int) -> None:
        """Note that the loop goes on."""
        now = time.monotonic()
        self._note_gap(now - self._at)
        self._step = step
        self._at = now

    def enter(self, phase: str) -> str:
        """Begin a phase, and return the one that ends by it, to go back to it. In a phase with an
        empty name nothing is watched.
        """
        before = self.phase
        now = time.monotonic()
        self._note_gap(now - self._at)
        self._at = now
        note = self._gaps.noted(phase)
        self.phase = phase
        self._note = note
        return before

    def _note_gap(self, seconds: float) -> None:
        """Note a gap of the current phase; apart if something was compiled in it."""
        num_compiled = _num_compiled()
        if (
            self._is_in_first_steps(self.phase)
            or num_compiled != self._num_compiled
            or self._was_paused
        ):
            self._num_compiled = num_compiled
            self._was_paused = False
            self._gaps.excused(self.phase, seconds)
        elif self.phase not in _NUM_FIRST_GAPS or not self._gaps.noted_first(self.phase, seconds):
            self._note(seconds)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase for the time of the block."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def close(self) -> None:
        """End the watch, and remove the file of stacks if it is empty."""
        self._closing.set()
        self._thread.join(_SETTLE_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is not None:
            self._stacks.close()
            with suppress(OSError):
                path = Path(self._stacks.name)
                if path.stat().st_size == 0:
                    path.unlink()

    def _is_in_first_steps(self, phase: str) -> bool:
        """Check whether a loop is in its first steps, in which kernels are compiled."""
        if phase != STEPS:
            return False
        return self._first_step is None or self._step - self._first_step < _FIRST_STEPS

    def _limit(self, phase: str) -> float:
        """Return the seconds without a sign of life after which ranks are compared: at most half of
        those after which they end.
        """
        limit = self._gaps.limit(phase, least=self._least)
        if self._is_in_first_steps(phase):
            limit = max(limit, COMPILE_SECONDS)
        if self._end_seconds:
            limit = min(limit, self._end_seconds / 2)
        return limit

    def _watch(self) -> None:
        """Look every half second, in the thread: of a stalled loop write the stacks, compare the
        ranks, and end this process if it is time.
        """
        while not self._closing.wait(_LOOK_SECONDS):
            if self._is_debugged():
                faulthandler.cancel_dump_traceback_later()
                self._at = time.monotonic()
                self._was_paused = True
                self._stalled = None
                self._end_stall()
                continue
            # Read before `_at`, which `enter` stores first: the time is never older than the phase.
            phase = self.phase
            seconds = time.monotonic() - self._at
            limit = self._limit(phase)
            if not phase:
                faulthandler.cancel_dump_traceback_later()
                self._end_stall()
                continue
            if seconds < limit:
                self._end_stall()
                self._guard(limit - seconds)
                continue
            if self._stalled is None:
                self._stalled = self._at, phase, self._step
                self._write_stacks()
            self._compare(seconds, limit)
            self._end_if_requested(seconds, phase)
            self._end_if_too_long(seconds, phase)

    def _is_debugged(self) -> bool:
        """Check whether this rank is in a debugger, or waits while another one is. Post to the
        store if this rank enters or leaves one.
        """
        is_at_prompt = is_at_prompt_of(self._main)
        if self._store is None:
            return is_at_prompt
        with suppress(RuntimeError):  # the store has gone with rank 0
            if is_at_prompt != self._is_at_prompt:
                self._store.add(_AT_PROMPT, 1 if is_at_prompt else -1)
                self._is_at_prompt = is_at_prompt
            # A request to the store only where it matters: when this rank is about to report.
            if not is_at_prompt and time.monotonic() - self._at >= self._limit(self.phase):
                return self._store.add(_AT_PROMPT, 0) > 0
        return is_at_prompt

    def _end_if_requested(self, seconds: float, phase: str) -> None:
        """End this process if a stop is requested in a hang: the process would wait until its grace
        period is over for a step that does not come.
        """
        request = self._stop_request()
        if not request:
            return
        now = time.monotonic()
        self._requested_at = min(self._requested_at, now)
        kind = self._reported_kind()
        is_too_slow = kind == SLOW and phase != SAVING and now - self._requested_at > _STOP_SECONDS
        if kind == HANG or is_too_slow:
            line = (
                f"{request}: {describe_stall(phase, seconds)}, so no step comes after which to "
                "save; the end [hang]"
            )
            self._end(line, EXIT_NO_PROGRESS, until=now)

    def _end_if_too_long(self, seconds: float, phase: str) -> None:
        """End this process if it has stalled longer than `supervision.hang_seconds`; in a phase
        that may rightly be long, only after `_LONG_SECONDS` as well.
        """
        if not self._end_seconds or seconds <= self._end_seconds:
            return
        if phase in SHORT_PHASES or seconds > _LONG_SECONDS:
            line = (
                f"{describe_stall(phase, seconds)} (supervision.hang_seconds); the warning "
                "before says where [hang]"
            )
            self._end(line, EXIT_TRAINING, until=time.monotonic())

    def _end(self, line: str, exit_code: int, *, until: float) -> None:
        """Report a line and end this process at once, without cleaning up. The stall is logged with
        `until` (`time.monotonic`) as its end.
        """
        self._note_stall("hang", until=until)
        report_end(line)
        record_failure(f"rank {self._rank}: {line}")
        announce(f"rank {self._rank}: {line}")
        os._exit(exit_code)

    def _reported_kind(self) -> str:
        """Return what the rank that compares has reported of this stall: `HANG`, `SLOW`, or
        nothing yet.
        """
        if self._store is None:
            return self._kind
        with suppress(RuntimeError):
            # the rank that compares may be a step behind or ahead
            for step in (self._step, self._step - 1, self._step + 1):
                key = _kind_key(step)
                if self._store.check([key]):
                    return self._store.get(key).decode()
            return ""
        return self._kind or HANG  # the store has gone with rank 0, which has ended

    def _guard(self, seconds: float) -> None:
        """Have a thread of C write the stacks after these seconds and four looks, in case this
        thread cannot run again because some code holds Python's lock.
        """
        with suppress(OSError, ValueError):
            if self._stacks is None:
                # and no parents: a run folder that was removed is not made anew
                self._logs.mkdir(exist_ok=True)
                path = self._logs / f"hang-rank{self._rank}.txt"
                self._stacks = path.open("w", encoding="utf-8")
            faulthandler.dump_traceback_later(seconds + 4 * _LOOK_SECONDS, file=self._stacks)

    def _write_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError, ValueError):
            if self._stacks is not None:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
                self._stacks.flush()

    def _end_stall(self) -> None:
        """Log the stall that is over, if there was one, and forget it and its report."""
        if self._stalled is not None:
            self._note_stall("slow", until=self._at)
        if self._kind and self._store is not None:
            with suppress(RuntimeError):
                self._store.delete_key(_kind_key(self._reported_step))
        self._stalled = None
        self._is_reported = False
        self._kind = ""
        self._posts = []
        self._settle = _SETTLE_SECONDS / 2

    def _note_stall(self, kind: str, *, until: float) -> None:
        """Log the current stall, and its seconds until a time of `time.monotonic`."""
        assert self._stalled is not None
        since, phase, step = self._stalled
        report_event(kind, step=step, seconds=round(until - since, 1), phase=phase)

    def _state(self, seconds: float) -> dict[str, Any]:
        """Return what this rank posts, `seconds` after its last sign of life."""
        place = place_of(current_frames().get(self._main))
        phase = self.phase
        if self._is_in_first_steps(phase):
            phase = IN_FIRST_STEPS
        return {
            "seconds": round(seconds, 1),
            "phase": phase,
            "step": self._step,
            "place": place,
            "calls": collectives(),
            "compiles": is_compiling(),
        }

    def _compare(self, seconds: float, limit: float) -> None:
        """Post this rank's state, `seconds` after its last sign of life. The lowest rank that still
        posts reads all states, once `limit` has passed long enough, and reports what they show.
        """
        state = self._state(seconds)
        states: dict[int, State] | None = {self._rank: state}
        if self._store is not None:
            try:
                self._store.set(f"state/{self._rank}", json.dumps(state))
                self._store.add(f"posts/{self._rank}", 1)
                is_settled = seconds >= limit + self._settle
                if self._is_reported or self._rank >= _MOST_COMPARING or not is_settled:
                    return
                states = self._states_of_all(self._store)
            except RuntimeError:
                # The store has gone with rank 0: one rank of each host reports its own state.
                if os.environ.get("LOCAL_RANK", "0") != "0":
                    return
        if states is not None:
            self._report(states)

    def _states_of_all(self, store: Store) -> dict[int, State] | None:
        """Return the states of the ranks that have posted since this one first looked; None at the
        first look, and on a rank that does not report.
        """
        num_posts = [store.add(f"posts/{rank}", 0) for rank in range(self._world_size)]
        if not self._posts:
            self._posts = num_posts
            self._settle += _SETTLE_SECONDS
            return None
        pairs = enumerate(zip(num_posts, self._posts, strict=True))
        answering = [rank for rank, (now, before) in pairs if now > before]
        if self._rank != min(answering):
            self._is_reported = True
            return None
        return {rank: json.loads(store.get(f"state/{rank}")) for rank in answering}

    def _report(self, states: Mapping[int, State]) -> None:
        """Report a stall once, unless a rank compiles, and post its kind for all ranks."""
        if self._is_reported or compiles(states):
            return
        self._is_reported = True
        self._kind = kind_of(states, world_size=self._world_size)
        self._reported_step = self._step
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_kind_key(self._step), self._kind)
        announce(
            f"warning: {sentence(states, world_size=self._world_size)}; stacks in {self._logs} "
            f"[{self._kind}]"
        )


def _num_compiled() -> int:
    """Count the frames that torch.compile has looked at in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(dynamo.counters["frames"]["total"])


def _kind_key(step: int) -> str:
    return f"verdict/{step}"
