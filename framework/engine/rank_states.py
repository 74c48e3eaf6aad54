"""States of ranks in a stall: what each rank posts of itself, and what the states show together."""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from framework.engine_protocol import EVALUATING, STEPS
from framework.errors import counted
from framework.system.frames import current_frames

HANG: Final = "hang"
SLOW: Final = "slow"
IN_FIRST_STEPS: Final = "the first steps"
SHORT_PHASES: Final = (STEPS, EVALUATING)
"""Phases that may not rightly take long."""
COMPILE_SECONDS: Final = 600.0
"""Time that compiling may take: operators and kernels in the first steps, and in an evaluation."""
# Functions of torch in which a graph or an extension is compiled, by module; a graph's backward in
# a thread of its own.
_COMPILERS: Final = (
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
)
_LIBRARIES: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])
_PACKAGE: Final = str(Path(__file__).resolve().parents[1])
_RECORDERS: Final = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_MOST_NAMED: Final = 4

State = Mapping[str, Any]
"""What a rank posts: seconds without a sign of life, phase, step, place of its main thread, last
collective of each group, whether it compiles.
"""


def place_of(frame: FrameType | None) -> str:
    """Describe where a thread is: the innermost line of the user's code, and the function that it
    is in now.
    """
    if frame is None:
        return "an unknown place"
    user_frame = _innermost_of_user(frame)
    shown = user_frame or frame
    line = f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}"
    if frame is user_frame:
        return line
    return f"{line} ({frame.f_code.co_name} of {frame.f_globals.get('__name__', '?')})"


def _innermost_of_user(innermost: FrameType) -> FrameType | None:
    frame: FrameType | None = innermost
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = any(folder in file for folder in _LIBRARIES)
        if not is_library and not file.startswith((_PACKAGE, "<")):
            return frame
        frame = frame.f_back
    return None


def is_compiling() -> bool:
    """Check whether torch compiles a graph or an extension, in any thread."""
    for innermost in current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_globals.get("__name__") in _COMPILERS:
                return True
            frame = frame.f_back
    return False


def compiles(states: Mapping[int, State]) -> bool:
    """Check whether any rank compiles, less than `COMPILE_SECONDS` after its last sign of life."""
    return any(
        state.get("compiles") and state["seconds"] < COMPILE_SECONDS for state in states.values()
    )


def kind_of(states: Mapping[int, State], *, world_size: int) -> str:
    """Return the kind of a stall: `HANG` if a rank does not answer, all ranks wait in collectives,
    or those that do not are in a step or an evaluation; else `SLOW`, as a save or a callback may
    rightly be.
    """
    outside = [state for state in states.values() if _waits_in(state) is None]
    if len(states) < world_size or not outside:
        return HANG
    if all(state["phase"] in (*SHORT_PHASES, IN_FIRST_STEPS) for state in outside):
        return HANG
    return SLOW


def collectives() -> dict[str, dict[str, Any]]:
    """Return the last collective that this rank began in each process group, from torch's flight
    recorder: number, name, number of elements, and whether the rank waits in it.
    """
    from torch._C import _distributed_c10d as c10d

    calls: dict[str, dict[str, Any]] = {}
    for backend in _RECORDERS:
        with suppress(Exception):  # a recorder of another release, or none
            dump: Callable[[], str] = getattr(c10d, _RECORDERS[backend])
            for entry in json.loads(dump()).get("entries", ()):
                sizes = entry.get("input_sizes") or [[]]
                calls[f"{backend} {entry['process_group'][0]}"] = {
                    "number": entry["collective_seq_id"],
                    "name": str(entry["profiling_name"]).rpartition(":")[2],
                    "elements": sum(math.prod(size) for size in sizes),
                    "waits": not entry.get("retired") and entry.get("state") != "completed",
                }
    return calls


def sentence(states: Mapping[int, State], *, world_size: int) -> str:
    """Describe which ranks keep the others waiting.

    Args:
        states: the states of the ranks that answered, by rank.
        world_size: the number of ranks of the run.
    """
    silent = [rank for rank in range(world_size) if rank not in states]
    waiting: dict[int, Mapping[str, Any]] = {}
    outside: dict[int, State] = {}
    for rank, state in states.items():
        call = _waits_in(state)
        if call:
            waiting[rank] = call
        else:
            outside[rank] = state
    phase = states[next(iter(outside or states))]["phase"]
    seconds = max(state["seconds"] for state in states.values())
    step = max(state["step"] for state in states.values())
    begin = f"{describe_stall(phase, seconds)} after step {step}: "
    if silent:
        do = "does" if len(silent) == 1 else "do"
        reason = "(stopped, or Python's lock is held)"
        return (
            f"{begin}{_ranks(silent)} {do} not answer {reason}{_describe_waiting(waiting, states)}"
        )
    if outside:
        return f"{begin}{_describe_outside(outside, waiting)}{_describe_waiting(waiting, states)}"
    return begin + _describe_all_waiting(waiting, states)


def _describe_all_waiting(
    waiting: Mapping[int, Mapping[str, Any]], states: Mapping[int, State]
) -> str:
    """Describe the calls of ranks that all wait in a collective."""
    calls = {rank: _describe_call(call) for rank, call in waiting.items()}
    if len(set(calls.values())) == 1:
        place = states[min(states)]["place"]
        return f"all ranks are in {next(iter(calls.values()))} at {place}"
    parts = []
    for rank, shown_call in calls.items():
        parts.append(f"rank {rank} waits in {shown_call} at {states[rank]['place']}")
    return "; ".join(parts)


def _describe_outside(
    outside: Mapping[int, State], waiting: Mapping[int, Mapping[str, Any]]
) -> str:
    """Describe the ranks that do not wait in a collective."""
    ranks = _ranks(outside)
    be = "is" if len(outside) == 1 else "are"
    place = next(iter(outside.values()))["place"]
    if not waiting:
        return f"{ranks} {be} at {place}"
    call = _describe_call(next(iter(waiting.values())))
    return f"{ranks} did not enter {call}, and {be} at {place}"


def describe_stall(phase: str, seconds: float) -> str:
    if phase == STEPS:
        return f"no step for {seconds:.0f} s"
    return f"no progress in {phase} for {seconds:.0f} s"


def _waits_in(state: State) -> dict[str, Any] | None:
    return next((call for call in state["calls"].values() if call["waits"]), None)


def _describe_call(call: Mapping[str, Any]) -> str:
    return f"{call['name']} #{call['number']} of {call['elements']:,} elements"


def _describe_waiting(waiting: Mapping[int, Mapping[str, Any]], states: Mapping[int, State]) -> str:
    if not waiting:
        return ""
    rank = next(iter(waiting))
    others = counted(len(waiting), "other")
    wait = "waits" if len(waiting) == 1 else "wait"
    return f"; {others} {wait} in {_describe_call(waiting[rank])} at {states[rank]['place']}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    text = ", ".join(map(str, numbers[:_MOST_NAMED]))
    if len(numbers) > _MOST_NAMED:
        text += f" and {len(numbers) - _MOST_NAMED} more"
    if len(numbers) == 1:
        return f"rank {text}"
    return f"ranks {text}"
