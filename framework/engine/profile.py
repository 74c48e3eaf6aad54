"""Profiled steps: a trace of all operations, and on request measurements that have to wait for each
of them.

Nothing here is collective but a barrier, so that no rank waits within a step for one that still
writes: a profile that fails costs itself alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import EngineTimers
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch._C._autograd import DeviceType
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from framework.config.training import Profile
from framework.engine.base_engine import BaseEngine
from framework.engine.phases import Phases
from framework.errors import in_one_line
from framework.system.files import make_own_folder, replace_text
from framework.system.log import warn

# Rows of tables and of a timeline that the report is to hold.
_MOST_OPERATIONS: Final = 15
_MOST_MODULES: Final = 400
_MOST_INTERVALS: Final = 20_000
_STEP: Final = "ProfilerStep#"
_BYTES: Final = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}

Rows = list[dict[str, Any]]


class Profiler:
    """Writes ``profile/rank<N>.json.gz``, a trace for Perfetto, and ``tables<N>.json`` for the
    report.

    Attributes:
        is_over: nothing is left to be profiled.
    """

    def __init__(self, engine: BaseEngine, section: Profile, folder: Path, *, stage: int) -> None:
        """Prepare the steps that `section` of the config names. `folder` is the run folder, `stage`
        this rank's stage of a pipeline.
        """
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes lines for itself
        self._engine = engine
        self._section = section
        self._folder = folder / "profile"
        self._rank = torch.distributed.get_rank()
        self.is_over = False
        self._last_traced = section.last - section.waits
        self._trace: _Trace | None = None
        self._instruments: _Instruments | None = None
        self._has_begun = False
        self._tables: dict[str, Any] = {"rank": self._rank, "stage": stage}
        self._tables["world_size"] = torch.distributed.get_world_size()

    def begin(self, step: int) -> None:
        """Begin what is due before a step. Collective."""
        if not self._has_begun and self._section.first <= step <= self._last_traced:
            self._has_begun = True
            self._guard(self._make_trace, step)
            torch.distributed.barrier()
            self._guard(self._begin_trace)
        elif self._section.waits and step == self._section.last:
            torch.distributed.barrier()
            self._guard(self._begin_instruments)

    def end(self, step: int) -> None:
        """End what is due after a step."""
        if step >= self._section.last:
            self.close()
        elif step == self._last_traced:
            self._guard(self._end_trace)

    def close(self) -> None:
        """Write the profile, also of a run that stops between two profiled steps."""
        if not self.is_over:
            self.is_over = True
            for end in (self._end_trace, self._end_instruments, self._write):
                self._guard(end)

    def _make_trace(self, step: int) -> None:
        make_own_folder(self._folder)
        self._trace = _Trace(
            self._engine.phases, self._folder / f"rank{self._rank}.json.gz", before=step
        )

    def _begin_trace(self) -> None:
        if self._trace is not None:
            self._trace.begin()

    def _begin_instruments(self) -> None:
        self._instruments = _Instruments(self._engine, self._section)

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.end()

    def _end_instruments(self) -> None:
        if self._instruments is not None:
            self._tables |= self._instruments.end()

    def _write(self) -> None:
        if self._trace is not None:
            self._tables |= self._trace.tables(has_operations=self._rank == 0)
        if {"steps", "measured_step"} & self._tables.keys():
            make_own_folder(self._folder)
            replace_text(self._folder / f"tables{self._rank}.json", json.dumps(self._tables))

    def _guard(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function, and warn if it raises: training goes on without a whole profile."""
        try:
            call(*arguments)
        except Exception as error:
            warn(
                f"the profile is not complete ({in_one_line(error)}); training goes on "
                "[profile-failed]"
            )


class _Trace:
    """Torch's profiler over some steps, with a range for each of them and for each of its
    phases.
    """

    def __init__(self, phases: Phases, path: Path, *, before: int) -> None:
        self._phases = phases
        self._path = path
        self._step = before - 1
        self._steps = list[int]()
        self._ranges = list[Any]()
        self._sent: Mapping[str, list[int]] = {}
        self._spans: list[tuple[float, float]] = []  # Unix times of the steps
        self._marks: list[tuple[int, str, Any]] = []  # step, phase that begins, moment
        activities = [torch.profiler.ProfilerActivity.CPU]
        if get_accelerator()._name == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.prepare_trace()

    def begin(self) -> None:
        """Begin with the next step."""
        self._profiler.start_trace()
        get_accelerator().synchronize()
        self._began = time.time()
        self._base = self._phases.moment()
        self._phases.watch(self._note)

    def _note(self, phase: str) -> None:
        """Note that a phase begins, or the step ends where it is empty; end the range of the phase
        before, and begin the next one.
        """
        if self._marks and self._marks[-1][1]:
            self._close_range()
        else:
            self._step += 1
            self._open_range(f"{_STEP}{self._step}")
            self._spans.append((time.time(), math.inf))
        self._marks.append((self._step, phase, self._phases.moment()))
        if phase:
            self._open_range(phase)
        else:
            self._close_range()
            self._spans[-1] = (self._spans[-1][0], time.time())
            self._steps.append(self._step)

    def _open_range(self, name: str) -> None:
        self._ranges.append(torch.profiler.record_function(name))
        self._ranges[-1].__enter__()

    def _close_range(self) -> None:
        self._ranges.pop().__exit__(None, None, None)

    def end(self) -> None:
        """Write the trace, whole or not at all; once."""
        if not self._path.name:  # written already
            return
        path = self._path
        self._path = Path()
        self._phases.unwatch()
        while self._ranges:  # of a step that has failed
            self._close_range()
        get_accelerator().synchronize()
        self._sent = _sizes_sent(self._spans)
        self._profiler.stop_trace()
        aside = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            self._profiler.export_chrome_trace(str(aside))
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def tables(self, *, has_operations: bool) -> dict[str, Any]:
        """Return what the report shows of the steps that were taken; operations and collectives
        only if `has_operations`.
        """
        if not self._steps:
            return {}
        timeline = [interval for interval in self._timeline() if interval["step"] in self._steps]
        tables: dict[str, Any] = {
            "steps": self._steps,
            "began_seconds": self._began,
            "timeline": timeline[-_MOST_INTERVALS:],
        }
        if has_operations:
            # The profiler's own `events()` takes seconds where these take milliseconds.
            profiler: Any = self._profiler.profiler
            events = profiler.kineto_results.events()
            phases = {phase for _, phase, _ in self._marks}
            num_steps = len(self._steps)
            tables["operations"] = operations_of(events, phases, num_steps=num_steps)
            tables["collectives"] = collectives_of(events, self._sent, num_steps=num_steps)
        return tables

    def _timeline(self) -> Iterator[dict[str, Any]]:
        """Yield step, phase, micro-batch, begin and length of each phase that was entered."""
        counts: dict[tuple[int, str], int] = defaultdict(int)
        before = ["", ""]  # the two phases before
        for (step, phase, begin), (_, _, end) in pairwise(self._marks):
            if phase:
                # The end of a backward pass, after the sums that it waits for, is a part of it.
                is_continued = before == [phase, "communication"]
                if not is_continued:
                    counts[step, phase] += 1
                at = self._phases.between(self._base, begin)
                length = self._phases.between(begin, end)
                yield {
                    "step": step,
                    "phase": phase,
                    "micro_batch": counts[step, phase] - 1,
                    "at_ms": round(1000 * at, 4),
                    "ms": round(1000 * length, 4),
                }
            before = [before[1], phase]


def operations_of(events: Iterable[Any], phases: Set[str], *, num_steps: int) -> Rows:
    """Add up the own time of operations on the host and of kernels on the device, as means of a
    step.

    Args:
        events: kineto's, with times in ns.
        phases: names of the ranges that divide a step.
        num_steps: how many steps were traced.

    Returns:
        the 15 longest of each place. The time of a phase is what none of its operations took:
        Python, and waiting.
    """
    threads: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    on_device: dict[str, _Sum] = defaultdict(_Sum)
    for event in events:
        start = event.start_ns()
        end = event.end_ns()
        name = event.name()
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():
                on_device[name].add(1, end - start)
        elif not event.is_async() and event.start_thread_id() == event.end_thread_id():
            # sorted, an operation comes before those within it that begin at the same time
            threads[event.start_thread_id()].append((start, -end, name))
    on_host: dict[str, _Sum] = defaultdict(_Sum)
    for spans in threads.values():
        _add_own_times(on_host, sorted(spans))
    rows: Rows = []
    for place, sums in (("host", on_host), ("device", on_device)):
        for name, total in _longest(sums):
            label = name
            if name in phases:
                label = f"{name}: Python and waiting"
            rows.append(
                {
                    "name": label,
                    "place": place,
                    "count": total.count / num_steps,
                    "ms": total.time_ns / 1e6 / num_steps,
                }
            )
    return rows


@dataclass
class _Sum:
    """How often something was done, and how long it took in all."""

    count: float = 0.0
    time_ns: float = 0.0

    def add(self, count: float, time_ns: float) -> None:
        self.count += count
        self.time_ns += time_ns


def _longest(sums: Mapping[str, _Sum]) -> list[tuple[str, _Sum]]:
    """List the longest operations, without the ranges of whole steps."""
    operations = [pair for pair in sums.items() if not pair[0].startswith(_STEP)]
    operations.sort(key=lambda pair: -pair[1].time_ns)
    return operations[:_MOST_OPERATIONS]


def _add_own_times(sums: dict[str, _Sum], spans: Iterable[tuple[int, int, str]]) -> None:
    """Add the times of one thread's operations, each without those within it.

    `spans` are (start, -end, name), in order.
    """
    stack: list[tuple[int, str]] = []  # end and name of the operations that are not over
    for start, negative_end, name in spans:
        end = -negative_end
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack:
            outer_end, outer_name = stack[-1]
            # negative: the outer operation's own time is without this one
            sums[outer_name].add(0, start - min(end, outer_end))
        sums[name].add(1, end - start)
        stack.append((end, name))


def collectives_of(
    events: Iterable[Any], sizes: Mapping[str, list[int]], *, num_steps: int
) -> Rows:
    """Add up collectives by kind, as means of a step. Each lasts from the call to its end.

    Args:
        events: kineto's, with times in ns.
        sizes: bytes of every collective, by its name in torch's flight recorder.
        num_steps: how many steps were traced.
    """
    sums = _times_of_collectives(list(events))
    rows = []
    for (name, on_host), total in sums.items():
        if on_host and (name, False) in sums:  # the device's own times are the true ones
            continue
        count = total.count / num_steps
        num_bytes = None
        if sizes.get(name):
            num_bytes = mean(sizes[name]) * count
        kind = name.partition(":")[2]
        rows.append(_traffic_row(kind, count, num_bytes, total.time_ns / 1e6 / num_steps))
    return sorted(rows, key=lambda row: -row["ms"])


def _times_of_collectives(events: Sequence[Any]) -> Mapping[tuple[str, bool], _Sum]:
    """Add up the times of collectives in steps, by name and whether on the host."""
    sums: dict[tuple[str, bool], _Sum] = defaultdict(_Sum)
    steps: list[tuple[int, int]] = []
    for event in events:
        if event.name().startswith(_STEP):
            steps.append((event.start_ns(), event.end_ns()))
    for event in events:
        # a save has collectives as well
        is_in_step = any(start <= event.start_ns() < end for start, end in steps)
        if is_in_step and event.name().startswith(("gloo:", "nccl:", "hccl:", "xccl:")):
            on_host = event.device_type() == DeviceType.CPU
            sums[event.name(), on_host].add(1, event.end_ns() - event.start_ns())
    return sums


def _traffic_row(
    name: str, count: float, num_bytes: float | None, milliseconds: float
) -> dict[str, Any]:
    if num_bytes and milliseconds:
        rate = 1000 * num_bytes / milliseconds
    else:
        rate = None
    return {
        "name": name,
        "count": count,
        "bytes": num_bytes,
        "ms": milliseconds,
        "bytes_per_second": rate,
    }


def _sizes_sent(spans: Sequence[tuple[float, float]]) -> Mapping[str, list[int]]:
    """List the bytes of the collectives that began within some Unix times, by name. As in
    nccl-tests, the larger one of input and output counts.
    """
    dump = torch._C._distributed_c10d._dump_fr_trace_json
    sizes = defaultdict[str, list[int]](list)
    for entry in json.loads(dump(backend=torch.distributed.get_backend())).get("entries", []):
        if any(begin <= entry["time_created_ns"] / 1e9 <= end for begin, end in spans):
            num_bytes = max(_side_bytes(entry, "input"), _side_bytes(entry, "output"))
            sizes[entry["profiling_name"]].append(num_bytes)
    return sizes


def _side_bytes(entry: Mapping[str, Any], side: str) -> int:
    tensors = zip(entry[f"{side}_dtypes"], entry[f"{side}_sizes"], strict=False)
    return sum(_BYTES.get(dtype, 1) * torch.Size(size).numel() for dtype, size in tensors)


class _Instruments:
    """Measurements of one step that wait for each operation."""

    def __init__(self, engine: BaseEngine, section: Profile) -> None:
        self._undo = ExitStack()
        self._tables = dict[str, Any](measured_step=section.last)
        self._reads: list[tuple[str, Callable[[], Any]]] = []
        try:
            if section.deepspeed_timers:
                self._use_timers(engine.engine)
            if section.communication:
                self._log_communication()
            if section.modules:
                self._watch_modules(engine)
        except BaseException:
            self._undo.close()
            raise

    def end(self) -> Mapping[str, Any]:
        """Put everything back, and return what was measured."""
        with self._undo:
            for name, read in self._reads:
                self._tables[name] = read()
            return self._tables

    def _replace_attributes(self, owner: Any, **values: Any) -> None:
        """Replace attributes of an object until the step has ended."""
        attributes = vars(owner)
        for name, value in values.items():
            if name in attributes:
                self._undo.callback(attributes.__setitem__, name, attributes[name])
            else:
                self._undo.callback(attributes.pop, name)
            attributes[name] = value

    def _use_timers(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Let DeepSpeed's timers measure."""
        timers = _SilentTimers()
        engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=True)
        if isinstance(engine, deepspeed.PipelineEngine):
            self._replace_attributes(engine._config, wall_clock_breakdown=True)
            # Stages before the last one start these in their own code; no timer may start twice.
            if not engine.is_last_stage():
                engine_timers.backward_timers = []
                engine_timers.backward_inner_timers = []
                engine_timers.backward_reduce_timers = []
        self._replace_attributes(engine, timers=timers, engine_timers=engine_timers)
        # instead of the empty functions of engine/workarounds/idle_measurements.py
        for name in ("_start_timers", "_stop_timers"):
            self._replace_attributes(engine, **{name: partial(getattr(type(engine), name), engine)})
        if hasattr(engine.optimizer, "timers"):
            self._replace_attributes(engine.optimizer, timers=timers)

        def read() -> dict[str, float]:
            return {name: timer.elapsed(reset=False) for name, timer in timers.get_timers().items()}

        self._reads.append(("timers", read))

    def _log_communication(self) -> None:
        """Let DeepSpeed's communication logger measure."""
        comm = deepspeed.comm.comm
        # by name: count, bytes and milliseconds
        sums = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])

        def append(raw_name: str, name: str, milliseconds: float, num_bytes: int) -> None:
            """Stand in for DeepSpeed's, which ends the process at an operation that it does not
            know, and adds the time of each operation to that of the next one of its kind (0.19.8,
            `timed_op`).
            """
            comm.timers(name).reset()
            of_name = sums[raw_name]
            of_name[0] += 1
            of_name[1] += num_bytes
            of_name[2] += milliseconds

        def read() -> Rows:
            rows = []
            for name, (count, num_bytes, milliseconds) in sums.items():
                rows.append(_traffic_row(name, count, num_bytes, milliseconds))
            return rows

        self._replace_attributes(
            comm.comms_logger,
            enabled=True,
            prof_all=True,
            verbose=False,
            debug=False,
            append=append,
        )
        self._reads.append(("communication", read))

    def _watch_modules(self, engine: BaseEngine) -> None:
        watch = self._undo.enter_context(ModuleWatch(engine.module, engine.phases))
        self._reads.append(("modules", lambda: watch.rows(engine.name_module)))


class _SilentTimers(SynchronizedWallClockTimer):  # type: ignore[misc]
    def log(self, *names: Any, **options: Any) -> None: ...


class ModuleWatch:
    """Times, FLOPs and kept activations of the modules of a model, by hooks.

    FLOPs, two for each multiplication with an addition, are counted by torch's formulas as
    operations arrive: DeepSpeed's flops profiler (0.19.8) misses a function that was imported by
    its name, and counts products of stage 3 twice. Kept activations are what autograd saves,
    without weights, and each piece of memory once. Both take time. They are measured in a step's
    first forward pass; the times of that pass count only if it is the only one.
    """

    def __init__(self, module: Module, phases: Phases) -> None:
        self._module = module
        self._phases = phases
        self._undo = ExitStack()
        self._first = ExitStack()  # forward pass
        self._flops = _Flops()  # type: ignore[no-untyped-call]
        self._seen = set[int]()  # addresses of weights and of what was counted
        # Modules that are running: module, start and FLOPs before.
        self._running: list[tuple[Module, float, int]] = []
        self._seconds: list[dict[Module, float]] = []  # of each pass
        self._counted = Counter[Module]()  # FLOPs
        self._kept = Counter[Module]()  # bytes

    def __enter__(self) -> ModuleWatch:
        for module in self._module.modules():
            self._undo.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
            self._undo.callback(module.register_forward_hook(self._leave).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._first.close()
        self._undo.close()

    def _enter(self, module: Module, inputs: Any) -> None:
        """Begin to measure a module that is called: its time, and in the first forward pass FLOPs
        and kept activations.
        """
        if self._phases.current != "forward":  # it runs again, for the backward pass
            return
        if not self._seconds:
            self._seen = _addresses(self._module.parameters())
            self._first.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            )
            self._first.enter_context(self._flops)
        if not self._running:
            self._seconds.append(defaultdict(float))
        get_accelerator().synchronize()
        self._running.append((module, time.perf_counter(), self._flops.total))

    def _leave(self, module: Module, inputs: Any, output: Any) -> None:
        """Add time and FLOPs to a module that returns, the last one that was entered."""
        if self._phases.current != "forward":
            return
        get_accelerator().synchronize()
        _, began, flops = self._running.pop()
        self._seconds[-1][module] += time.perf_counter() - began
        self._counted[module] += self._flops.total - flops
        if not self._running:
            self._first.close()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the memory of a tensor that autograd saves for all running modules, once, and not
        that of weights.
        """
        storage = tensor.untyped_storage()
        modules = [module for module, _, _ in self._running]
        gathered = _addresses(modules[-1].parameters(recurse=False))
        if storage.data_ptr() not in self._seen | gathered:
            self._seen.add(storage.data_ptr())
            self._kept.update(dict.fromkeys(modules, storage.nbytes()))
        return tensor

    def rows(self, name_module: Callable[[str], str]) -> Rows:
        """Return a row for each module that was called, with all that is in it: milliseconds, FLOPs
        and kept bytes of a forward pass, and parameters.
        """
        rows = []
        for name, module in self._module.named_modules():
            times = [1000 * seconds[module] for seconds in self._seconds if module in seconds]
            if not times:
                continue
            depth = 0
            if name:
                depth = name.count(".") + 1
            num_weights = sum(
                getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters()
            )
            rows.append(
                {
                    "name": name_module(name),
                    "kind": type(module).__name__,
                    "depth": depth,
                    "ms": mean(times[1:] or times),
                    "flops": self._counted[module],
                    "kept_bytes": self._kept[module],
                    "params": num_weights,
                }
            )
        return rows[:_MOST_MODULES]


def _addresses(weights: Iterable[torch.Tensor]) -> set[int]:
    return {weight.untyped_storage().data_ptr() for weight in weights}


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of all operations that are called while it is entered."""

    total = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = call(*args, **kwargs)
        count = flop_registry.get(call.overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=result)
        return result
