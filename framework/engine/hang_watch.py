"""Names what a run waits for when its steps stop coming: which rank did not enter which collective, and where it is.

While steps come, a step costs one store of two numbers. A thread of each rank sees when they have stopped: for ten
seconds, and three times the longest gap of late. Then every rank writes its stacks to ``logs/hang-rank<N>.txt`` and
posts to the process group's store where its main thread is and which collectives it has begun (torch's flight
recorder); one of them compares, and says it in a sentence. A rank that posts nothing is stopped, or holds Python's
lock: it is named as well. After `supervision.hang_seconds` all ranks end, so that they can be started again.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from framework.errors import EXIT_TRAINING, counted
from framework.system.parent_watch import report_end
from framework.system.stopping import announce

_LOOK_SECONDS: Final = 0.5
_LEAST_SECONDS: Final = 10.0
_TIMES_LONGEST: Final = 3.0
_BEFORE_THE_FIRST_SECONDS: Final = 600.0  # operators and kernels are compiled in the first step
_SETTLE_SECONDS: Final = 2.0  # in which every rank has seen it, and posted
_SPEAKERS: Final = 8  # ranks that may compare: it takes two requests for each rank
_BEATS_OF_LATE: Final = 500
_LIBRARIES: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])
_OWN: Final = str(Path(__file__).resolve().parents[1])
_RECORDERS: Final = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_numbers = itertools.count()

State = Mapping[str, Any]
"""What a rank posts: seconds without a step, step, place of its main thread, last collective of each group."""


@contextmanager
def watching(
    ask: Callable[[int], str], *, logs: Path, end_seconds: float, least_seconds: float = _LEAST_SECONDS
) -> Iterator[Watched]:
    """Watch a loop that asks something before every step and between the batches of an evaluation.

    Args:
        ask: takes the last step taken.
        logs: folder for the stacks.
        end_seconds: without a sign of life after which this process ends; 0 for never.
        least_seconds: without one before ranks are looked at.

    Yields:
        What is called in its place.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store: Store | None = _get_default_store() if world_size > 1 else None
    own = None if store is None else PrefixStore(f"hang/{next(_numbers)}", store).clone()
    watch = HangWatch(own, rank=rank, world_size=world_size, logs=logs, end_seconds=end_seconds, least=least_seconds)
    watch.start()

    try:
        yield Watched(watch, ask)
    finally:
        watch.close()


class Watched:
    """What a loop asks; every question is a sign of life."""

    def __init__(self, watch: HangWatch, ask: Callable[[int], str]) -> None:
        self._watch, self._ask = watch, ask
        self._last: int | None = None

    def __call__(self, step: int) -> str:
        self._last = step
        self._watch.beat(step)
        return self._ask(step)

    def live(self) -> None:
        """Give a sign of life, where questions have been asked: without any nothing is watched."""
        if self._last is not None:
            self._watch.beat(self._last)


class HangWatch:
    """One rank's part."""

    def __init__(
        self, store: Store | None, *, rank: int, world_size: int, logs: Path, end_seconds: float, least: float
    ) -> None:
        self._store, self._rank, self._world_size, self._logs = store, rank, world_size, logs
        self._end_seconds, self._least = end_seconds, least
        self._step, self._at, self._beats = 0, time.monotonic(), 0
        self._longest = self._longest_before = 0.0
        self._main = 0  # thread that runs the loop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._stacks: IO[str] | None = None
        self._is_stalled = self._is_reported = False
        self._posts: list[int] = []  # of every rank, when this one first looked
        self._settle = _SETTLE_SECONDS / 2

    def start(self) -> None:
        """Begin to look."""
        self._main = threading.get_ident()
        self._thread.start()

    def beat(self, step: int) -> None:
        """Note that the loop goes on."""
        now = time.monotonic()
        gap = now - self._at
        self._step, self._at = step, now
        if self._beats and gap > self._longest:
            self._longest = gap
        self._beats += 1
        if self._beats % _BEATS_OF_LATE == 0:
            self._longest_before, self._longest = self._longest, 0.0

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

    def _limit(self) -> float:
        if self._beats < 3:
            limit = _BEFORE_THE_FIRST_SECONDS
        else:
            limit = max(self._least, _TIMES_LONGEST * max(self._longest, self._longest_before))
        return min(limit, self._end_seconds / 2) if self._end_seconds else limit

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            seconds = time.monotonic() - self._at
            if not self._beats:  # a loop of the user's own need not ask
                continue
            if seconds < self._limit():
                self._go_on()
                self._guard(self._limit() - seconds)
                continue
            if not self._is_stalled:
                self._is_stalled = True
                self._write_stacks()
            self._compare(seconds)
            if self._end_seconds and seconds > self._end_seconds:
                self._end(seconds)

    def _guard(self, seconds: float) -> None:
        """Have the stacks written by a thread of C, should this one not come to run again: where code holds Python's
        lock.
        """
        with suppress(OSError, ValueError):
            if self._stacks is None:
                self._logs.mkdir(parents=True, exist_ok=True)
                self._stacks = (self._logs / f"hang-rank{self._rank}.txt").open("w", encoding="utf-8")
            faulthandler.dump_traceback_later(seconds + 4 * _LOOK_SECONDS, file=self._stacks)

    def _write_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError, ValueError):
            if self._stacks is not None:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
                self._stacks.flush()

    def _go_on(self) -> None:
        self._is_stalled = self._is_reported = False
        self._posts, self._settle = [], _SETTLE_SECONDS / 2

    def _state(self, seconds: float) -> dict[str, Any]:
        place = place_of(sys._current_frames().get(self._main))
        return {"seconds": round(seconds, 1), "step": self._step, "place": place, "calls": collectives()}

    def _compare(self, seconds: float) -> None:
        """Post this rank's state; the lowest rank that still posts reads all of them, and says what they come to."""
        own = self._state(seconds)
        if self._store is None:
            self._report({self._rank: own})
            return
        ranks = range(self._world_size)
        try:
            self._store.set(f"state/{self._rank}", json.dumps(own))
            self._store.add(f"posts/{self._rank}", 1)
            if self._is_reported or self._rank >= _SPEAKERS or seconds < self._limit() + self._settle:
                return
            if not self._posts:
                self._posts = [self._store.add(f"posts/{rank}", 0) for rank in ranks]
                self._settle += _SETTLE_SECONDS
                return
            answering = [rank for rank in ranks if self._store.add(f"posts/{rank}", 0) > self._posts[rank]]
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
        if not self._is_reported:
            self._is_reported = True
            announce(f"warning: {sentence(states, world_size=self._world_size)}; stacks in {self._logs} [hang]")

    def _end(self, seconds: float) -> None:
        line = f"no step for {seconds:.0f} s (supervision.hang_seconds); the warning before says where [hang]"
        report_end(line)
        announce(f"rank {self._rank}: {line}")
        os._exit(EXIT_TRAINING)


def place_of(frame: FrameType | None) -> str:
    """Where a thread is: the innermost line of the user's code, and the function that it is in now."""
    innermost, own = frame, None
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
    return (
        line
        if innermost in (own, None)
        else f"{line} ({innermost.f_code.co_name} of {innermost.f_globals.get('__name__', '?')})"
    )


def collectives() -> dict[str, dict[str, Any]]:
    """The last collective that this rank began in each process group, from torch's flight recorder."""
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
    begin = f"no step for {seconds:.0f} s after step {max(state['step'] for state in states.values())}: "
    if silent:
        who = f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer (stopped, or Python's lock is held)"
        return begin + who + _where(waiting, states)
    if outside:
        first = next(iter(outside))
        is_in = "is" if len(outside) == 1 else "are"
        who = f"{_ranks(outside)} {is_in} at {outside[first]['place']}"
        if waiting:
            entered = _shown(next(iter(waiting.values())))
            who = f"{_ranks(outside)} did not enter {entered}, and {is_in} at {outside[first]['place']}"
        return begin + who + _where(waiting, states)
    calls = {rank: _shown(call) for rank, call in waiting.items()}
    if len(set(calls.values())) > 1:
        return begin + "; ".join(
            f"rank {rank} waits in {call} at {states[rank]['place']}" for rank, call in calls.items()
        )
    return begin + f"all ranks are in {next(iter(calls.values()))} at {states[min(states)]['place']}"


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
        f"; {others} {'waits' if len(waiting) == 1 else 'wait'} in {_shown(waiting[first])} at {states[first]['place']}"
    )


def _ranks(ranks: Any) -> str:
    named = sorted(ranks)
    text = ", ".join(map(str, named[:4])) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
    return f"rank {text}" if len(named) == 1 else f"ranks {text}"
