"""A trace of torch's profiler, grouped into the parts of a step.

On a GPU the kernels and copies of the device are counted, each by the operation that started it; on
a processor the operations themselves, each without those within it.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.budget.least import (
    ATTENTION,
    COMMUNICATION,
    ELEMENTWISE,
    HOST,
    INPUT,
    LOSS,
    OPTIMIZER,
    PASSES,
    PRODUCTS,
)

_STEP: Final = "ProfilerStep#"
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST: Final = frozenset({"cpu_op", "user_annotation", "python_function"})
_LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver"})
# The ranges of a step that `framework.engine.profile` writes.
PHASES: Final = frozenset(
    {"data", "copy", "forward", "backward", "communication", "bubble", "optimizer", "other"}
)


def _names(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_IS_COMMUNICATION: Final = _names(r"nccl|^gloo:|^c10d::")
_IS_ADAM: Final = _names(r"adam|optimizer\.step#|multi_tensor_apply.*(adam|lion|sgd)")
_IS_LOSS: Final = _names(
    r"sumoftiles|cross_entropy|crossentropy|nll_?loss|log_?softmax|linear_cross"
)
_IS_ATTENTION: Final = _names(
    r"flash|fmha|scaled_dot_product|scaleddotproduct|sdpa|_attention_|flex_attention|varlen_attn"
    r"|softmax|aten::(bmm|baddbmm)"  # of attention in steps, as processors have it with dropout
)
_IS_PRODUCT: Final = _names(
    r"gemm|cutlass|nvjet|xmma|cublas|wgrad|dgrad|convolution|conv2d|mkldnn_linear|triton_.*_mm"
    r"|^aten::_?(int_|scaled_)?(mm|addmm)_?$"
)


@dataclass
class Found:
    """Time of a group of equal kernels in all traced steps."""

    count: int = 0
    microseconds: float = 0.0


@dataclass
class Profile:
    """Time of a step, as means of the traced steps.

    Attributes:
        num_steps: that were traced.
        seconds: part -> seconds of a step.
        kernels: part -> name of a kernel -> its time in all steps.
        step_seconds: of a whole step.
        is_device: whether kernels of a device were counted, or operations of the processor.
    """

    num_steps: int
    seconds: dict[str, float]
    kernels: dict[str, dict[str, Found]]
    step_seconds: float
    is_device: bool

    def longest(self, part: str, count: int = 3) -> list[tuple[str, float, float]]:
        """Return name, number in a step and milliseconds of a step of a part's longest kernels."""
        found = sorted(self.kernels.get(part, {}).items(), key=lambda pair: -pair[1].microseconds)
        rows = []
        for name, of in found[:count]:
            each = of.count / self.num_steps
            rows.append((name, each, of.microseconds / 1000 / self.num_steps))
        return rows


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace: a file of torch's profiler, gzipped or not, or a run folder or
    its `profile` folder, of which rank 0's is read.

    Raises:
        ValueError: there is no trace.
    """
    for inner in ("profile/rank0.json.gz", "rank0.json.gz"):
        if (path / inner).is_file():
            path = path / inner
    if not path.is_file():
        raise ValueError(f"{path}: no trace, nor a run with profile/rank0.json.gz")
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def profile_of(events: Sequence[Mapping[str, Any]], *, num_steps: int = 0) -> Profile:
    """Group a trace into parts of a step.

    Args:
        events: complete events of a Chrome trace, with times in microseconds.
        num_steps: how many steps it has; 0: as its ranges `ProfilerStep#` show.

    Raises:
        ValueError: it has no such range, and `num_steps` is 0; or nothing was computed.
    """
    steps = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event["name"].startswith(_STEP) and event.get("cat") == "user_annotation"
    )
    num_steps = num_steps or len(steps)
    if not num_steps:
        raise ValueError(f"the trace has no range {_STEP}: give the number of its steps")
    pieces = list(_device_pieces(events))
    is_device = bool(pieces)
    if not is_device:
        pieces = list(_host_pieces(events))
    if steps:
        pieces = [piece for piece in pieces if _is_within(piece.started, steps)]
    if not pieces:
        raise ValueError("the trace has no operation within its steps")
    kernels: dict[str, dict[str, Found]] = defaultdict(lambda: defaultdict(Found))
    seconds: dict[str, float] = defaultdict(float)
    for piece in pieces:
        part = piece.part()
        seconds[part] += piece.microseconds / 1e6 / num_steps
        found = kernels[part][piece.name]
        found.count += 1
        found.microseconds += piece.microseconds
    if is_device or not steps:
        begin = min(piece.at for piece in pieces)
        end = max(piece.at + piece.microseconds for piece in pieces)
        whole = end - begin
    else:
        whole = sum(end - begin for begin, end in steps)
    busy = _length_of_union(pieces)
    seconds[HOST] = max(whole - busy, 0.0) / 1e6 / num_steps
    return Profile(
        num_steps,
        dict(seconds),
        {part: dict(found) for part, found in kernels.items()},
        whole / 1e6 / num_steps,
        is_device,
    )


@dataclass(frozen=True)
class Piece:
    """A kernel, or an operation of the processor without those within it.

    Attributes:
        name: of the kernel or operation.
        at: when it began, in microseconds.
        microseconds: how long it took.
        started: when the host began it.
        path: names of the operations and ranges around it, outermost first.
        phase: the range of a step in which it was started; empty: none.
        span: its own and what is within it, in microseconds.
    """

    name: str
    at: float
    microseconds: float
    started: float
    path: tuple[str, ...] = ()
    phase: str = ""
    span: float = 0.0

    def part(self) -> str:
        """Return the part of a step that it belongs to."""
        around = " ".join((*self.path, self.name))
        if _IS_COMMUNICATION.search(self.name):
            return COMMUNICATION
        if _IS_LOSS.search(around):
            return LOSS
        if _IS_ADAM.search(around):
            return OPTIMIZER
        if self.phase in ("optimizer", "communication"):
            return PASSES
        if self.phase in ("data", "copy") or "HtoD" in self.name:
            return INPUT
        if _IS_ATTENTION.search(around):
            return ATTENTION
        if _IS_PRODUCT.search(self.name):
            return PRODUCTS
        if "AccumulateGrad" in around:  # copies into buckets, by hooks of the engine
            return PASSES
        return ELEMENTWISE


def _device_pieces(events: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yield the kernels and copies of the device, each with the operations that started it."""
    kernels = []
    launches: dict[int, Mapping[str, Any]] = {}
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in _DEVICE:
            kernels.append(event)
        elif event.get("cat") in _LAUNCHES and correlation is not None:
            launches[correlation] = event
    if not kernels:
        return
    started: list[tuple[Any, float]] = []
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"), kernel)
        started.append((launch.get("tid"), float(launch["ts"])))
    paths = _paths(events, started)
    phases = _Phases(events)
    for kernel, (_, moment), path in zip(kernels, started, paths, strict=True):
        yield Piece(
            kernel["name"],
            float(kernel["ts"]),
            float(kernel["dur"]),
            moment,
            path,
            phases.at(moment),
            float(kernel["dur"]),
        )


def _paths(
    events: Iterable[Mapping[str, Any]], moments: Sequence[tuple[Any, float]]
) -> list[tuple[str, ...]]:
    """Return for each thread and moment the names of the operations that ran then, outermost
    first.
    """
    threads: dict[Any, list[tuple[float, float, str, int]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _HOST:
            begin = float(event["ts"])
            threads[event["tid"]].append((begin, -(begin + float(event["dur"])), event["name"], -1))
    for number, (thread, moment) in enumerate(moments):
        threads[thread].append((moment, 0.0, "", number))
    paths: list[tuple[str, ...]] = [() for _ in moments]
    for spans in threads.values():
        stack: list[tuple[float, str]] = []
        for begin, negative_end, name, number in sorted(spans):
            while stack and stack[-1][0] < begin:
                stack.pop()
            if number >= 0:
                paths[number] = tuple(outer for _, outer in stack)
            else:
                stack.append((-negative_end, name))
    return paths


class _Phases:
    """The ranges that divide the steps; the backward pass runs in another thread than they."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._ranges = sorted(
            (float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])
            for event in events
            if event["name"] in PHASES and event.get("cat") == "user_annotation"
        )
        self._begins = [begin for begin, _, _ in self._ranges]

    def at(self, moment: float) -> str:
        """Return the phase at a moment, or an empty text."""
        number = bisect_right(self._begins, moment) - 1
        if number < 0 or self._ranges[number][1] < moment:
            return ""
        return str(self._ranges[number][2])


@dataclass
class _Open:
    """An operation that runs, with the time of those within it."""

    event: Mapping[str, Any]
    path: tuple[str, ...]
    end: float
    within: float = field(default=0.0)


def _host_pieces(events: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yield the operations of the processor, each without those within it."""
    phases = _Phases(events)
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _HOST:
            threads[event["tid"]].append(event)
    for of_thread in threads.values():
        of_thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        running: list[_Open] = []
        for event in of_thread:
            begin = float(event["ts"])
            while running and running[-1].end <= begin:
                yield from _closed(running.pop(), phases)
            path: tuple[str, ...] = ()
            if running:
                outer = running[-1]
                outer.within += min(begin + float(event["dur"]), outer.end) - begin
                path = (*outer.path, outer.event["name"])
            running.append(_Open(event, path, begin + float(event["dur"])))
        while running:
            yield from _closed(running.pop(), phases)


def _closed(ended: _Open, phases: _Phases) -> Iterator[Piece]:
    """Yield an operation that has ended; ranges compute nothing."""
    event = ended.event
    if event["cat"] != "cpu_op":
        return
    begin = float(event["ts"])
    own = max(float(event["dur"]) - ended.within, 0.0)
    name = event["name"]
    yield Piece(name, begin, own, begin, ended.path, phases.at(begin), float(event["dur"]))


def _is_within(moment: float, spans: Sequence[tuple[float, float]]) -> bool:
    number = bisect_right(spans, (moment, float("inf"))) - 1
    return number >= 0 and moment <= spans[number][1]


def _length_of_union(pieces: Iterable[Piece]) -> float:
    """Return the microseconds in which at least one of them ran."""
    spans = sorted((piece.at, piece.at + piece.span) for piece in pieces)
    total = 0.0
    reached = float("-inf")
    for begin, end in spans:
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
