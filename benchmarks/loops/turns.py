"""Loops in turn, block by block, and the file of their results, which a later call goes on with."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.loops.cases import ORDER, Case
from benchmarks.loops.recorded import Recorded
from benchmarks.loops.setting import Setting
from benchmarks.loops.sides import SIDES, Side
from benchmarks.records import write
from framework.config.load import config_from_values
from framework.engine.distributed import barrier, from_rank0, rank
from framework.engine.plain_engine import arithmetic_of
from framework.plan.plan import Plan
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import Prepared, prepare

# Different steps whose batches are kept in memory.
_MOST_RECORDED: Final = 10
_OTHERS: Final = ("plain", "bare", "accelerate", "hf")


@dataclass(frozen=True)
class Options:
    """What is the same for all cases of a call.

    Attributes:
        cases: by name.
        folder: for what the loops write.
        out: the file of the results.
        seconds: of this call, after which no other row begins.
        log_every: steps between logged points.
        half: in bf16, else in fp32.
        compiles: the plain loop compiles its model.
        blocks: that are measured; one before them warms up.
    """

    cases: Mapping[str, Case]
    folder: Path
    out: Path
    seconds: float
    log_every: int = 10
    half: bool = True
    compiles: bool = True
    blocks: int = 4

    def steps(self, model: str) -> int:
        """Return the steps that a loop takes in all."""
        return self.cases[model].steps * (self.blocks + 1)


class Results:
    """The file of the results: model -> loop -> figures, or why there are none.

    Attributes:
        values: what is in it.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], *, writes: bool) -> None:
        """Read what an earlier call has left. A row that it did not survive is one that failed.

        `writes`: whether this rank writes the file, after every row.
        """
        self._path = path
        self._writes = writes
        self.values: dict[str, Any] = {**facts, "rows": {}, "seconds": 0.0}
        if path.exists():
            self.values |= json.loads(path.read_text(encoding="utf-8"))
        begun = self.values.pop("begun", None)
        if begun is not None:
            model, side = begun
            self.note(model, side, {"failed": "the process ended within this row"})

    def has(self, model: str, side: str) -> bool:
        """Check whether a row is there."""
        return side in self.values["rows"].get(model, {})

    def has_failed(self, model: str, side: str) -> bool:
        """Check whether a row says why there are no figures."""
        return "failed" in self.values["rows"].get(model, {}).get(side, {})

    def begin(self, model: str, side: str) -> None:
        """Note which row is being measured."""
        self.values["begun"] = [model, side]
        self._write()

    def note(self, model: str, side: str, figures: Mapping[str, Any]) -> None:
        """Write a row."""
        self.values.pop("begun", None)
        self.values["rows"].setdefault(model, {})[side] = dict(figures)
        self._write()

    def forget_begun(self) -> None:
        """Let a later call measure the row again that is being measured."""
        self.values.pop("begun", None)
        self._write()

    def spend(self, seconds: float) -> None:
        """Add the seconds of a call."""
        self.values["seconds"] = round(self.values["seconds"] + seconds, 1)
        self._write()

    def _write(self) -> None:
        if self._writes:
            write(self.values, self._path)


def measure_all(options: Options, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all rows that the results lack, the most important ones first, until the time is
    over; return the results. Collective.
    """
    began = time.monotonic()
    deadline = began + options.seconds
    results = Results(options.out, from_rank0(dict(facts)), writes=rank() == 0)
    barrier()  # nothing is written before all have read
    for model, sides in ORDER:
        missing = [side for side in sides if not results.has(model, side)]
        if model not in options.cases or not missing:
            continue
        if options.cases[model].together:
            # their ratios need all of them in one turn
            groups = [[side for side in sides if not results.has_failed(model, side)]]
        else:
            groups = [[side] for side in missing]
        for group in groups:
            if _is_over(deadline):
                break
            _measure_group(options, results, model, group, deadline)
    results.spend(time.monotonic() - began)
    return results.values


def _is_over(deadline: float) -> bool:
    """Check whether rank 0's time is over. Collective."""
    is_over: bool = from_rank0(time.monotonic() > deadline)
    return is_over


def _measure_group(
    options: Options, results: Results, model: str, names: Sequence[str], deadline: float
) -> None:
    """Build the loops of one model, let them run in turn, and write their rows. Collective."""
    prepared = prepare(config_from_values(_config(options, model)))
    setting = _setting(options, prepared, model)
    group = _Group(results, model, setting)
    with arithmetic_of(prepared.plan):
        for name in names:
            group.build(name)
        for block in range(options.blocks + 1):
            # Two measured blocks of each at least, or a row has no spread.
            if block > 2 and _is_over(deadline):
                break
            group.run(block, options.cases[model].steps)
        group.finish(together=options.cases[model].together)
    _free(compiled=options.compiles)


class _Group:
    """The loops of one model that are in memory at once."""

    def __init__(self, results: Results, model: str, setting: Setting) -> None:
        self._results = results
        self._model = model
        self._setting = setting
        self._sides: dict[str, Side] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._num_steps = 0

    def build(self, name: str) -> None:
        """Build a loop."""
        row: dict[str, Any] = {"blocks_ms": [], "bytes_before": _memory()}
        self._rows[name] = row
        started = time.perf_counter()

        def make() -> None:
            self._sides[name] = SIDES[name](self._setting)

        self._try(name, make)
        row["build_seconds"] = round(time.perf_counter() - started, 2)

    def run(self, block: int, steps: int) -> None:
        """Run a block of each loop."""
        self._num_steps = (block + 1) * steps
        for name in list(self._sides):
            side = self._sides[name]
            self._try(name, partial(_run_block, side, self._rows[name], block, steps))

    def finish(self, *, together: bool) -> None:
        """Write the rows of all loops that are left, and let go of them. Collective."""
        plan = self._setting.prepared.plan
        every = plan.config.training.log_every
        for name, side in self._sides.items():
            row = self._rows[name]
            losses = {step: side.loss(step) for step in range(every, self._num_steps + 1, every)}
            figures = _speeds(plan, row) | row | {"losses": losses, "together": together}
            self._results.note(self._model, name, figures)
            side.end()
        self._sides.clear()

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Call a function; if it raises, the row says why, and the loop is left out.

        On several ranks a failure of one of them would leave the others waiting: there it is
        raised, but for a missing package. A row that a signal ends has not failed.
        """
        self._results.begin(self._model, name)
        try:
            call()
            return
        except ImportError as error:
            reason = f"not installed: {error}"
        except KeyboardInterrupt:
            self._results.forget_begun()
            raise
        except Exception as error:
            if torch.distributed.get_world_size() > 1:
                raise
            reason = f"{type(error).__name__}: {error}"[:1000]
        failed = self._sides.pop(name, None)
        if failed is not None:
            failed.end()
        self._results.note(self._model, name, {"failed": reason})
        _free(compiled=False)


def _config(options: Options, model: str) -> dict[str, Any]:
    case = options.cases[model]
    sections = case.sections
    return {
        "run": {"name": model, "output_dir": str(options.folder)},
        "precision": {"dtype": "bf16" if options.half else "fp32"},
        "zero": {"stage": 1 if options.half else 0},
        "optimizer": case.optimizer,
        "evaluation": {"at_end": False},
        "checkpoint": {"at_end": False},
        **sections,
        "training": {
            **sections.get("training", {}),
            "max_steps": options.steps(model),
            "log_every": options.log_every,
        },
        "monitors": {"progress": "off"},
    }


def _setting(options: Options, prepared: Prepared, model: str) -> Setting:
    recorded = Recorded(
        make_train_loader(prepared.plan, prepared.parts.splits, rank=rank()),
        min(_MOST_RECORDED, options.steps(model)),
        micro_size=prepared.plan.layout.micro_size,
        rank=rank(),
        num_ranks=torch.distributed.get_world_size(),
    )
    return Setting(
        prepared,
        options.folder,
        log_every=options.log_every,
        recorded=recorded,
        half=options.half,
        compiles=options.compiles,
    )


def _run_block(side: Side, row: dict[str, Any], block: int, steps: int) -> None:
    """Run a block of a loop, and add its time to its row; the first one is its warm-up."""
    accelerator = get_accelerator()
    accelerator.reset_peak_memory_stats()
    side.ready(block * steps)
    accelerator.synchronize()
    barrier()
    started = time.perf_counter()
    side.run(block * steps, (block + 1) * steps)
    accelerator.synchronize()
    barrier()
    seconds = time.perf_counter() - max(started, side.began)
    if block == 0:
        row["warm_up_seconds"] = round(seconds, 2)
    else:
        row["blocks_ms"].append(round(1000 * seconds / steps, 3))
    row["peak_bytes"] = accelerator.max_memory_allocated()


def _speeds(plan: Plan, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a step and what is trained in a second, of the median block."""
    step_ms = statistics.median(row["blocks_ms"])
    samples = plan.layout.global_size
    speeds = {"ms_per_step": step_ms, "samples_per_second": round(1000 * samples / step_ms, 1)}
    length = getattr(plan.config.data, "sequence_length", None)
    if length:
        speeds["tokens_per_second"] = round(1000 * samples * length / step_ms)
    return speeds


def _memory() -> int:
    allocated: int = get_accelerator().memory_allocated()
    return allocated


def _free(*, compiled: bool) -> None:
    """Give memory back; `compiled`: that of compiled models too."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    get_accelerator().empty_cache()


def ratios(rows: Mapping[str, Mapping[str, Any]], other: str) -> tuple[float, float, float] | None:
    """Return the median, smallest and largest ratio of our blocks to another loop's; None where
    one of them is missing.

    Blocks that took turns are compared one by one, others each with each.
    """
    ours = rows.get("ours", {}).get("blocks_ms")
    others = rows.get(other, {}).get("blocks_ms")
    if not ours or not others:
        return None
    if rows["ours"]["together"]:
        values = [one / two for one, two in zip(ours, others, strict=True)]
    else:
        values = [one / two for one in ours for two in others]
    return statistics.median(values), min(values), max(values)


def table(results: Mapping[str, Any], cases: Mapping[str, Case]) -> Iterator[str]:
    """Yield a table in Markdown: a row for each model, and why rows are missing."""
    heads = ["model", "ours, ms a step", "a second", *(f"over {other}" for other in _OTHERS)]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    missing = []
    for model in cases:
        rows = results["rows"].get(model, {})
        cells = [model, *_own_cells(rows.get("ours"))]
        for other in _OTHERS:
            found = ratios(rows, other)
            if found is None:
                cells.append("not measured")
            else:
                cells.append("{:.3f} ({:.3f} - {:.3f})".format(*found))
        yield "| " + " | ".join(cells) + " |"
        for side, row in rows.items():
            if "failed" in row:
                missing.append(f"{model}, {side}: {row['failed']}")
    if missing:
        yield ""
        yield from missing


def _own_cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None or "failed" in row:
        return ["not measured", ""]
    if "tokens_per_second" in row:
        speed = f"{row['tokens_per_second']:,} tokens"
    else:
        speed = f"{row['samples_per_second']:,.0f} samples"
    return [f"{row['ms_per_step']:.2f}", speed]
