"""Names what a run waits for when it does not get on: which rank did not enter which collective,
and where it is.

While steps come, a step costs one store of two numbers. A thread of each rank sees when they have
stopped: for ten seconds, and three times what 99 of 100 gaps took in the same phase (steps, an
evaluation, saves, each callback). Then every rank writes its stacks to ``logs/hang-rank<N>.txt``
and posts to the process group's store where its main thread is and which collectives it has begun
(torch's flight recorder); one of them compares, and says it in a sentence. A rank that posts
nothing is stopped, or holds Python's lock: it is named as well. After `supervision.hang_seconds`
all ranks end, so that they can be started again; at once where a stop is asked for meanwhile. What
goes on by itself was slow, and no hang. While a rank is in a debugger, nothing is watched on any of
them.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from framework.engine.protocol import EVALUATING, SAVING, STARTING, STEPS
from framework.errors import EXIT_NO_PROGRESS, EXIT_TRAINING, counted
from framework.system.debugger import is_at_prompt as is_at_prompt_of
from framework.system.frames import current_frames
from framework.system.log import report_event
from framework.system.parent_watch import report_end
from framework.system.stopping import announce

_LOOK_SECONDS: Final = 0.5
_LEAST_SECONDS: Final = 10.0
_TIMES_USUAL: Final = 3.0
_USUAL: Final = 0.99  # of the gaps of a phase
_GAPS_OF_LATE: Final = 500
# Where nothing is known of a phase yet. Operators and kernels are compiled in the first steps, as
# in an evaluation.
_UNKNOWN_SECONDS: Final = 600.0
# in whose gaps kernels are compiled, which tell nothing of those that follow
_STEPS_TO_KNOW: Final = 2
_GAPS_TO_KNOW: Final = {EVALUATING: 2}  # the same, of which the first one is no batch's
# What may rightly take as long as ranks wait for each other in a save: only steps and evaluations
# end before.
_SHORT: Final = (STEPS, EVALUATING)
_LONG_SECONDS: Final = 7200.0
_SETTLE_SECONDS: Final = 2.0  # in which every rank has seen it, and posted
# What nothing is saved from may be ended so long after a stop was asked for, if it was named
# before.
_STOP_SECONDS: Final = 60.0
# Functions of torch in which a graph or an extension is compiled, by module; a graph's backward in
# a thread of its own.
_COMPILERS: Final = (
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
)
_SPEAKERS: Final = 8  # ranks that may compare: it takes two requests for each rank
_LIBRARIES: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])
_OWN: Final = str(Path(__file__).resolve().parents[1])
_RECORDERS: Final = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_FIRST_STEPS: Final = "the first steps"
_AT_PROMPT: Final = "at-prompt"
_HANG: Final = "hang"
_SLOW: Final = "slow"
_numbers = itertools.count()

State = Mapping[str, Any]
"""What a rank posts: seconds without a sign of life, phase, step, place of its main thread, last
collective of each group.
"""


@contextmanager
def watching(
    *,
    logs: Path,
    end_seconds: float,
    least_seconds: float = _LEAST_SECONDS,
    asked: Callable[[], str] = str,
) -> Iterator[HangWatch]:
    """Watch this rank from its start to its end.

    Args:
        logs: folder for the stacks.
        end_seconds: without a sign of life after which this process ends; 0 for never.
        least_seconds: without one before ranks are looked at.
        asked: returns the request to stop this process, if there was one, whatever the main thread
            waits for.
    """
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    if world_size > 1:
        store: Store | None = _get_default_store()
    else:
        store = None
    if store is None:
        own = None
    else:
        own = PrefixStore(f"hang/{next(_numbers)}", store).clone()
    watch = HangWatch(
        own,
        rank=rank,
        world_size=world_size,
        logs=logs,
        end_seconds=end_seconds,
        least=least_seconds,
        asked=asked,
    )
    watch.start()

    try:
        yield watch
    finally:
        watch.close()


class Watched:
    """Question of a loop before every step and between the batches of an evaluation: each is a sign
    of life.
    """

    def __init__(self, watch: HangWatch, ask: Callable[[int], str]) -> None:
        self._watch = watch
        self._ask = ask
        self._last: int | None = None
        self.enter = watch.enter
        self.during = watch.during

    def __call__(self, step: int) -> str:
        if self._last is None:
            self._watch.begin(step)
        self._last = step
        self._watch.beat(step)
        return self._ask(step)

    def live(self) -> None:
        """Give a sign of life, where questions have been asked: without any nothing is watched."""
        if self._last is not None:
            self._watch.beat(self._last)


class Gaps:
    """Seconds between the signs of life of late, by the phase of the run."""

    def __init__(self) -> None:
        self._of: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_GAPS_OF_LATE))
        self._first: dict[str, list[float]] = defaultdict(list)

    def noted(self, phase: str) -> Callable[[float], None]:
        """Return what notes a gap of a phase."""
        return self._of[phase].append

    def noted_first(self, phase: str, seconds: float) -> bool:
        """Note one of the first gaps of a phase, in which kernels are compiled, apart; false where
        it is later.
        """
        first = self._first[phase]
        is_first = len(first) < _GAPS_TO_KNOW.get(phase, 0)
        if is_first:
            first.append(seconds)
        return is_first

    def excused(self, phase: str, seconds: float) -> None:
        """Note a gap in which something was compiled: the shortest of those counts until there is
        another one.
        """
        self._first[phase].append(seconds)

    def limit(self, phase: str, *, least: float) -> float:
        """Seconds without a sign of life after which a phase is looked at."""
        gaps = sorted(self._of[phase].copy())
        if not gaps and phase == STEPS:
            gaps = sorted(self._first[phase])[:1]
        if not gaps:
            return max(least, _UNKNOWN_SECONDS)
        return max(least, _TIMES_USUAL * gaps[math.ceil(_USUAL * len(gaps)) - 1])


class HangWatch:
    """One rank's part."""

    def __init__(
        self,
        store: Store | None,
        *,
        rank: int,
        world_size: int,
        logs: Path,
        end_seconds: float,
        least: float,
        asked: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._logs = logs
        self._end_seconds = end_seconds
        self._least = least
        self._asked = asked
        self._asked_at = math.inf
        self._num_compiled = 0
        self._is_at_prompt = self._was_paused = False
        self._step = 0
        self._at = time.monotonic()
        self._first: int | None = None  # of the steps
        self._gaps = Gaps()
        self.phase = STARTING
        self._note = self._gaps.noted(STARTING)
        self._main = 0  # thread that runs the loop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._stacks: IO[str] | None = None
        # since when, in which phase, after which step
        self._stalled: tuple[float, str, int] | None = None
        self._is_reported = False
        self._kind = ""  # of the stall that this rank has described
        self._named_at = 0
        self._posts: list[int] = []  # of every rank, when this one first looked
        self._settle = _SETTLE_SECONDS / 2

    def start(self) -> None:
        """Begin to look."""
        self._main = threading.get_ident()
        self._thread.start()

    def begin(self, step: int) -> None:
        """The first question of a loop, which may be one of one's own and ask late, if ever."""
        self._first = self._step = step
        if not self.phase:
            self.enter(STEPS)

    def beat(self, step: int) -> None:
        """Note that the loop goes on."""
        now = time.monotonic()
        self._note_gap(now - self._at)
        self._step = step
        self._at = now

    def enter(self, phase: str) -> str:
        """Begin a phase, and return the one that ends by it, to go back to it; in an empty one
        nothing is watched.
        """
        before = self.phase
        now = time.monotonic()
        self._note_gap(now - self._at)
        self._at = now
        self.phase, self._note = phase, self._gaps.noted(phase)
        return before

    def _note_gap(self, seconds: float) -> None:
        """Note a gap of the phase that it is of, unless something was compiled in it."""
        num_compiled = _num_compiled()
        if self._is_first(self.phase) or num_compiled != self._num_compiled or self._was_paused:
            self._num_compiled = num_compiled
            self._was_paused = False
            self._gaps.excused(self.phase, seconds)
        elif self.phase not in _GAPS_TO_KNOW or not self._gaps.noted_first(self.phase, seconds):
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
        """Look no more."""
        self._closing.set()
        self._thread.join(_SETTLE_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is not None:
            self._stacks.close()
            with suppress(OSError):
                if not (path := Path(self._stacks.name)).stat().st_size:
                    path.unlink()

    def _is_first(self, phase: str) -> bool:
        """Check whether a loop is in its first steps, whose kernels are compiled."""
        return phase == STEPS and (self._first is None or self._step - self._first < _STEPS_TO_KNOW)

    def _limit(self, phase: str) -> float:
        limit = self._gaps.limit(phase, least=self._least)
        if self._is_first(phase):
            limit = max(limit, _UNKNOWN_SECONDS)
        else:
            limit = limit
        if self._end_seconds:
            return min(limit, self._end_seconds / 2)
        return limit

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            if self._waits_for_people():
                faulthandler.cancel_dump_traceback_later()
                self._at = time.monotonic()
                self._was_paused = True
                self._stalled = None
                self._go_on()
                continue
            phase = self.phase  # before the time, which is stored before it
            seconds = time.monotonic() - self._at
            limit = self._limit(phase)
            if not phase:
                faulthandler.cancel_dump_traceback_later()
                self._go_on()
                continue
            if seconds < limit:
                self._go_on()
                self._guard(limit - seconds)
                continue
            if self._stalled is None:
                self._stalled = self._at, phase, self._step
                self._write_stacks()
            self._compare(seconds, limit)
            self._end_if_asked(seconds, phase)
            if self._end_seconds and seconds > max(
                self._end_seconds, 0.0 if phase in _SHORT else _LONG_SECONDS
            ):
                self._end(seconds)

    def _waits_for_people(self) -> bool:
        """Check whether a rank is in a debugger: whoever types there is left alone, and so are the
        ranks that wait.
        """
        is_at_prompt = is_at_prompt_of(self._main)
        if self._store is None:
            return is_at_prompt
        with suppress(RuntimeError):  # the store has gone with rank 0
            if is_at_prompt != self._is_at_prompt:
                self._store.add(_AT_PROMPT, 1 if is_at_prompt else -1)
                self._is_at_prompt = is_at_prompt
            # Asked of the store only where it matters: when this rank is about to say that nothing
            # goes on.
            if not is_at_prompt and time.monotonic() - self._at >= self._limit(self.phase):
                return self._store.add(_AT_PROMPT, 0) > 0
        return is_at_prompt

    def _end_if_asked(self, seconds: float, phase: str) -> None:
        """End this process where a stop is asked for and nothing goes on: it would wait for a step
        that does not come, until its grace period is over.
        """
        asked = self._asked()
        if not asked:
            return
        now = time.monotonic()
        self._asked_at = min(self._asked_at, now)
        kind = self._kind_of_stall()
        if kind == _HANG or (
            kind == _SLOW and phase != SAVING and now - self._asked_at > _STOP_SECONDS
        ):
            line = (
                f"{asked}: {_begin(phase, seconds)}, so no step comes after which to save; the "
                "end [hang]"
            )
            self._note_stall("hang", until=now)
            report_end(line)
            announce(f"rank {self._rank}: {line}")
            os._exit(EXIT_NO_PROGRESS)

    def _kind_of_stall(self) -> str:
        """What the rank that compares has said of this stall: a hang, or what may be slow; empty
        before.
        """
        if self._store is None:
            return self._kind
        with suppress(RuntimeError):
            for step in (self._step, self._step - 1, self._step + 1):
                key = _verdict_key(step)
                if self._store.check([key]):
                    return self._store.get(key).decode()
            return ""
        return self._kind or _HANG  # the store has gone with rank 0, which has ended

    def _guard(self, seconds: float) -> None:
        """Have the stacks written by a thread of C, should this one not come to run again: where
        code holds Python's lock.
        """
        with suppress(OSError, ValueError):
            if self._stacks is None:
                self._logs.mkdir(parents=True, exist_ok=True)
                self._stacks = (self._logs / f"hang-rank{self._rank}.txt").open(
                    "w", encoding="utf-8"
                )
            faulthandler.dump_traceback_later(seconds + 4 * _LOOK_SECONDS, file=self._stacks)

    def _write_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError, ValueError):
            if self._stacks is not None:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
                self._stacks.flush()

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._note_stall("slow", until=self._at)
        if self._kind and self._store is not None:
            with suppress(RuntimeError):
                self._store.delete_key(_verdict_key(self._named_at))
        self._stalled = None
        self._is_reported = False
        self._kind = ""
        self._posts = []
        self._settle = _SETTLE_SECONDS / 2

    def _note_stall(self, kind: str, *, until: float) -> None:
        assert self._stalled is not None
        since, phase, step = self._stalled
        report_event(kind, step=step, seconds=round(until - since, 1), phase=phase)

    def _state(self, seconds: float) -> dict[str, Any]:
        place = place_of(current_frames().get(self._main))
        return {
            "seconds": round(seconds, 1),
            "phase": _FIRST_STEPS if self._is_first(self.phase) else self.phase,
            "step": self._step,
            "place": place,
            "calls": collectives(),
            "compiles": is_compiling(),
        }

    def _compare(self, seconds: float, limit: float) -> None:
        """Post this rank's state; the lowest rank that still posts reads all of them, and says what
        they come to.
        """
        own = self._state(seconds)
        if self._store is None:
            self._report({self._rank: own})
            return
        ranks = range(self._world_size)
        try:
            self._store.set(f"state/{self._rank}", json.dumps(own))
            self._store.add(f"posts/{self._rank}", 1)
            if self._is_reported or self._rank >= _SPEAKERS or seconds < limit + self._settle:
                return
            if not self._posts:
                self._posts = [self._store.add(f"posts/{rank}", 0) for rank in ranks]
                self._settle += _SETTLE_SECONDS
                return
            answering = [
                rank for rank in ranks if self._store.add(f"posts/{rank}", 0) > self._posts[rank]
            ]
            if self._rank != min(answering):
                self._is_reported = True
                return
            states = {rank: json.loads(self._store.get(f"state/{rank}")) for rank in answering}
        except RuntimeError:  # the store is in rank 0's process
            if os.environ.get("LOCAL_RANK", "0") != "0":
                return
            states = {self._rank: own}
        self._report(states)

    def _report(self, states: Mapping[int, State]) -> None:
        if self._is_reported or _compiles(states):
            return
        self._is_reported = True
        self._kind = kind_of(states, world_size=self._world_size)
        self._named_at = self._step
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_verdict_key(self._step), self._kind)
        announce(
            f"warning: {sentence(states, world_size=self._world_size)}; stacks in {self._logs} "
            f"[{self._kind}]"
        )

    def _end(self, seconds: float) -> None:
        line = (
            f"{_begin(self.phase, seconds)} (supervision.hang_seconds); the warning before "
            "says where [hang]"
        )
        self._note_stall("hang", until=time.monotonic())
        report_end(line)
        announce(f"rank {self._rank}: {line}")
        os._exit(EXIT_TRAINING)


def place_of(frame: FrameType | None) -> str:
    """Find where a thread is: the innermost line of the user's code, and the function that it is in
    now.
    """
    innermost = frame
    own = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, "<")) and not any(part in name for part in _LIBRARIES):
            own = frame
            break
        frame = frame.f_back
    frame = own or innermost
    if frame is None:
        return "an unknown place"
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    if innermost in (own, None):
        return line
    return f"{line} ({innermost.f_code.co_name} of {innermost.f_globals.get('__name__', '?')})"


def is_compiling() -> bool:
    """Check whether torch compiles a graph or an extension, in any thread."""
    for frame in current_frames().values():
        of_thread: FrameType | None = frame
        while of_thread is not None:
            if of_thread.f_globals.get("__name__") in _COMPILERS:
                return True
            of_thread = of_thread.f_back
    return False


def _num_compiled() -> int:
    """Frames that torch.compile has looked at in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(dynamo.counters["frames"]["total"])


def _verdict_key(step: int) -> str:
    return f"verdict/{step}"


def _compiles(states: Mapping[int, State]) -> bool:
    """Check whether one that the others wait for compiles something, and not for too long."""
    return any(
        state.get("compiles") and state["seconds"] < _UNKNOWN_SECONDS for state in states.values()
    )


def kind_of(states: Mapping[int, State], *, world_size: int) -> str:
    """Return whether ranks that wait are to be called a hang: where one does not answer, or is in a
    step. A save or a callback may rightly take long.
    """
    outside = [state for state in states.values() if _waits_in(state) is None]
    if len(states) < world_size or not outside:
        return _HANG
    if all(state["phase"] in (*_SHORT, _FIRST_STEPS) for state in outside):
        return _HANG
    return _SLOW


def collectives() -> dict[str, dict[str, Any]]:
    """The last collective that this rank began in each process group, from torch's flight
    recorder.
    """
    from torch._C import _distributed_c10d as c10d

    found: dict[str, dict[str, Any]] = {}
    for backend in _RECORDERS:
        with suppress(Exception):  # a recorder of another release, or none
            dump: Callable[[], str] = getattr(c10d, _RECORDERS[backend])
            for entry in json.loads(dump()).get("entries", ()):
                sizes = entry.get("input_sizes") or [[]]
                found[f"{backend} {entry['process_group'][0]}"] = {
                    "number": entry["collective_seq_id"],
                    "name": str(entry["profiling_name"]).rpartition(":")[2],
                    "elements": sum(_product(size) for size in sizes),
                    "waits": not entry.get("retired") and entry.get("state") != "completed",
                }
    return found


def _product(size: list[int]) -> int:
    result = 1
    for length in size:
        result *= length
    return result


def sentence(states: Mapping[int, State], *, world_size: int) -> str:
    """Say who keeps the others waiting.

    Args:
        states: by rank, of the ranks that answered.
        world_size: of the run.
    """
    silent = [rank for rank in range(world_size) if rank not in states]
    seconds = max(state["seconds"] for state in states.values())
    waiting = {rank: call for rank, state in states.items() if (call := _waits_in(state))}
    outside = {rank: state for rank, state in states.items() if rank not in waiting}
    phase = states[next(iter(outside or states))]["phase"]
    begin = (
        f"{_begin(phase, seconds)} after step {max(state['step'] for state in states.values())}: "
    )
    if silent:
        who = (
            f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer (stopped, or "
            "Python's lock is held)"
        )
        return begin + who + _where(waiting, states)
    if outside:
        first = next(iter(outside))
        if len(outside) == 1:
            is_in = "is"
        else:
            is_in = "are"
        who = f"{_ranks(outside)} {is_in} at {outside[first]['place']}"
        if waiting:
            entered = _shown(next(iter(waiting.values())))
            who = (
                f"{_ranks(outside)} did not enter {entered}, and {is_in} at "
                f"{outside[first]['place']}"
            )
        return begin + who + _where(waiting, states)
    calls = {rank: _shown(call) for rank, call in waiting.items()}
    if len(set(calls.values())) > 1:
        return begin + "; ".join(
            f"rank {rank} waits in {call} at {states[rank]['place']}"
            for rank, call in calls.items()
        )
    return (
        begin + f"all ranks are in {next(iter(calls.values()))} at {states[min(states)]['place']}"
    )


def _begin(phase: str, seconds: float) -> str:
    if phase == STEPS:
        return f"no step for {seconds:.0f} s"
    return f"no progress in {phase} for {seconds:.0f} s"


def _waits_in(state: State) -> dict[str, Any] | None:
    return next((call for call in state["calls"].values() if call["waits"]), None)


def _shown(call: Mapping[str, Any]) -> str:
    return f"{call['name']} #{call['number']} of {call['elements']:,} elements"


def _where(waiting: Mapping[int, Mapping[str, Any]], states: Mapping[int, State]) -> str:
    if not waiting:
        return ""
    first = next(iter(waiting))
    others = counted(len(waiting), "other")
    return (
        f"; {others} {'waits' if len(waiting) == 1 else 'wait'} in {_shown(waiting[first])} at "
        f"{states[first]['place']}"
    )


def _ranks(ranks: Any) -> str:
    named = sorted(ranks)
    text = ", ".join(map(str, named[:4])) + (
        f" and {len(named) - 4} more" if len(named) > 4 else ""
    )
    if len(named) == 1:
        return f"rank {text}"
    return f"ranks {text}"
