"""`batch.micro_size: measured`: the largest micro-batch that fits, found by real steps before the
run.

The steps are of an engine of their own, with weights that are drawn, on the first samples of the
data, or on the longest ones where their lengths are known. Nothing of it is left in the run: a run
with the same number written takes the same steps.

A rank that runs out of memory within a collective would leave the others waiting. So a size is
tried only if the peaks of smaller ones, which grow in a line, let it fit; and where ranks do not
meet within a pass, each runs the pass by itself first, and all agree before the step.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.base import Object
from framework.config.training import MEASURED, Batch
from framework.data.from_dataloader import TakenSet
from framework.data.lengths import lengths_of
from framework.data.loaders import is_stream
from framework.data.splits import Splits
from framework.engine.compile_probe import ranks_meet_in_passes
from framework.engine.distributed import device, gather, rank
from framework.engine.known_failures import lack_of_memory
from framework.engine.plain_engine import PlainEngine
from framework.errors import ConfigError
from framework.plan.alternatives import size_text
from framework.plan.plan import Plan
from framework.plan.render import render
from framework.setup.assemble import assemble_engine
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import Prepared
from framework.system.limits import ranks_on_host, room
from framework.system.log import print_line
from framework.system.waiting import waiting

Around = Callable[[torch.nn.Module], AbstractContextManager[None]]
"""The model of a run -> a context in which it computes as in the run."""

KEY: Final = "batch.micro_size"
# Of a step: gradients of the first are there while the second is computed.
_MICRO_BATCHES: Final = 2
_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc(5): the peak of the resident set becomes its present size


@dataclass
class Search:
    """Search for the largest size that fits.

    Attributes:
        sizes: to choose from, ascending from 1.
        peak_of: takes steps of a size, and returns the peak in bytes on the fullest rank; None if
            some rank has no memory for it.
        limit: bytes that a rank may use, once steps were taken; None where it is not known.
        peaks: of the sizes that were tried.
    """

    sizes: Sequence[int]
    peak_of: Callable[[int], int | None]
    limit: Callable[[], int | None]
    peaks: dict[int, int | None] = field(default_factory=dict)

    def largest(self) -> int | None:
        """Return the largest size that fits, None if the smallest does not.

        Sizes are doubled, also to some that are none to choose from, so that each is close to
        sizes with known peaks; then those between the last two are halved.
        """
        fitting, too_large = self._bounds()
        between = [size for size in self.sizes if fitting < size < too_large]
        while between:
            middle = len(between) // 2
            if self._fits(between[middle]):
                fitting = between[middle]
                between = between[middle + 1 :]
            else:
                between = between[:middle]
        return max((size for size in self.sizes if size <= fitting), default=None)

    def _bounds(self) -> tuple[int, int]:
        """Double sizes; return the last that fits, 0 if none does, and the first that does not."""
        fitting = 0
        too_large = self.sizes[-1] + 1
        size = 1
        while fitting < size < too_large:
            if self._fits(size):
                fitting = size
                size = min(2 * size, self.sizes[-1])
            else:
                too_large = size
        return fitting, too_large

    def _fits(self, size: int) -> bool:
        expected = self.expected(size)
        if expected is not None and self._exceeds(expected):
            return False
        self.peaks[size] = self.peak_of(size)
        peak = self.peaks[size]
        return peak is not None and not self._exceeds(peak)

    def _exceeds(self, num_bytes: int) -> bool:
        limit = self.limit()
        return limit is not None and num_bytes > limit

    def expected(self, size: int) -> int | None:
        """Return the peak of a size, on the line through the peaks of the two largest smaller ones;
        None with fewer than two.
        """
        smaller = [(tried, peak) for tried, peak in self.peaks.items() if tried < size and peak]
        if len(smaller) < 2:
            return None
        (one, peak_of_one), (other, peak_of_other) = sorted(smaller)[-2:]
        slope = max(peak_of_other - peak_of_one, 0) / (other - one)
        return int(peak_of_other + slope * (size - other))


def measured(prepared: Prepared, start: SavedCheckpoint | None, *, around: Around) -> Prepared:
    """Return the run with the largest micro-batch that fits. A run that goes on from a checkpoint
    on as many ranks keeps its micro-batch. Collective.

    Raises:
        ConfigError: kind ``micro-size-measured``: one sample does not fit.
    """
    plan = prepared.plan
    saved = _saved_size(plan, start)
    if saved is not None:
        if rank() == 0:
            print_line(f"{KEY}: measured: {saved}, as in the checkpoint")
        return _with_size(prepared, saved)
    share = plan.layout.global_size // plan.layout.data_parallel_size
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    began = time.monotonic()
    with waiting(f"steps that find the largest micro-batch ({KEY})"):
        trial = _Trial(prepared, around=around)
        try:
            search = Search(sizes, trial.peak_of, trial.limit)
            size = search.largest()
            limit = trial.limit()
        finally:
            trial.close()
    if size is None:
        raise _too_large(limit)
    facts = {
        "micro_size": size,
        "peak_bytes": dict(sorted(search.peaks.items())),
        "limit_bytes": limit,
        "took_seconds": round(time.monotonic() - began, 3),
    }
    if rank() == 0:
        print_line(_described(facts, share=share))
    return replace(_with_size(prepared, size), measured=facts)


def _too_large(limit: int | None) -> ConfigError:
    reason = "not even one sample fits in a step"
    if limit is not None:
        reason += f" within {size_text(limit)}"
    fix = "raise zero.stage, set zero.offload_optimizer, or lower run.memory_margin"
    return ConfigError.of("micro-size-measured", reason, fix, KEY, MEASURED)


def _described(facts: Mapping[str, Any], *, share: int) -> str:
    size = facts["micro_size"]
    text = f"{KEY}: measured: {size} of the {share} samples of a rank's step"
    peak = facts["peak_bytes"].get(size)  # none if a larger size was tried in its place
    if peak and facts["limit_bytes"] is not None:
        text += f", {size_text(peak)} of {size_text(facts['limit_bytes'])}"
    tried = ", ".join(str(tried) for tried in facts["peak_bytes"])
    return f"{text}; tried in {facts['took_seconds']:.1f} s: {tried}"


def _saved_size(plan: Plan, start: SavedCheckpoint | None) -> int | None:
    """Return the size in a checkpoint's layout, if it can be that of the run."""
    if start is None:
        return None
    layout = start.manifest["layout"]
    size: int = layout["micro_size"]
    share, rest = divmod(plan.layout.global_size, plan.layout.data_parallel_size)
    if layout["world_size"] != plan.layout.world_size or rest or share % size:
        return None
    return size


def _with_size(prepared: Prepared, size: int) -> Prepared:
    """Return the run with a micro-batch, and the accumulation steps that keep the global batch."""
    plan = prepared.plan
    batch = plan.config.batch.model_copy(update={"micro_size": size})
    config = plan.config.model_copy(update={"batch": batch}).noting_auto([KEY])
    steps = plan.layout.global_size // plan.layout.data_parallel_size // size
    layout = replace(plan.layout, micro_size=size, accumulation_steps=steps)
    plan = replace(plan, config=config, layout=layout)
    return replace(prepared, plan=plan, ds_config=render(plan))


class _Trial:
    """An engine that the run does not keep, for steps of micro-batches of any size."""

    def __init__(self, prepared: Prepared, *, around: Around) -> None:
        """Build the engine. Collective."""
        self._plan = prepared.plan
        self._splits = longest_first(prepared.parts.splits, prepared.plan)
        self._meets = ranks_meet_in_passes(prepared.plan)
        self._is_warm = False
        engine = assemble_engine(_for_trial(prepared))
        assert isinstance(engine, PlainEngine), "rules refuse pipelines"
        self._engine = engine
        engine.skip_no_steps()  # a skipped one allocates no states of the optimizer
        self._open = ExitStack()
        self._open.enter_context(around(engine.module))

    def peak_of(self, size: int) -> int | None:
        """Take steps of a size; as `Search.peak_of`. Collective."""
        batch = first_batch(self._plan, self._splits, size, rank=rank())
        if not self._meets and not self._fits_in_pass(batch):
            return None
        if not self._is_warm:  # the first step allocates the states of the optimizer
            self._step(batch)
            self._is_warm = True
        _free()
        _reset_peak()
        self._step(batch)
        peak: int = max(gather(_peak()))
        return peak

    def limit(self) -> int | None:
        """Return the bytes that the rank with the least memory may use. Collective."""
        margin = self._plan.config.run.memory_margin
        usable = [each for each in gather(_usable()) if each is not None]
        if len(usable) < self._plan.layout.world_size:
            return None
        return int(min(usable) * (1 - margin))

    def close(self) -> None:
        """Free the engine, and forget its peak."""
        self._open.close()
        self._engine.close()
        del self._engine
        _free()
        _reset_peak()

    def _fits_in_pass(self, batch: Any) -> bool:
        """Check whether no rank runs out of memory in a pass of its own. Collective."""
        lacks_memory = False
        try:
            self._engine.try_pass(batch)
        except Exception as error:
            if not lack_of_memory(error):
                raise
            lacks_memory = True
        _free()
        return not any(gather(lacks_memory))

    def _step(self, batch: Any) -> None:
        self._engine.train_step(repeat(batch, _MICRO_BATCHES)).read()


def _for_trial(prepared: Prepared) -> Prepared:
    """Return the run with drawn weights, two micro-batches of a sample, and nothing beside its
    steps.
    """
    plan = prepared.plan
    config = plan.config
    batch = Batch(
        global_size=_MICRO_BATCHES * plan.layout.data_parallel_size,
        micro_size=1,
        accumulation_steps=_MICRO_BATCHES,
    )
    training = config.training.model_copy(update={"compile": None, "bad_steps": None})
    trained = config.model_copy(update={"batch": batch, "training": training})
    layout = replace(
        plan.layout,
        global_size=batch.global_size or 0,
        micro_size=1,
        accumulation_steps=_MICRO_BATCHES,
    )
    plan = replace(plan, config=trained, layout=layout)
    parts = prepared.parts
    with suppress(Exception):  # a task may hold what cannot be copied; mostly it has no state
        parts = replace(parts, task=copy.deepcopy(parts.task))
    if isinstance(config.model, Object):  # the run trains what was handed over
        build_model = parts.build_model
        parts = replace(parts, build_model=lambda: copy.deepcopy(build_model()))
    drawn = prepared.without_weights().without_adapter()
    return replace(drawn, plan=plan, ds_config=render(plan), parts=parts)


def first_batch(plan: Plan, splits: Splits, size: int, *, rank: int) -> Any:
    """Read the first micro-batch of a rank in the order of the data, which may have the longest
    samples first.
    """
    layout = replace(
        plan.layout,
        micro_size=size,
        accumulation_steps=1,
        global_size=size * plan.layout.data_parallel_size,
    )
    # A curriculum would begin with the shortest samples, and a small step has fewer lanes.
    changes: dict[str, Any] = {"bucket_steps": 0, "curriculum_steps": 0}
    if getattr(plan.config.data, "lanes", None) is not None:
        changes["lanes"] = None
    data = plan.config.data.model_copy(update=changes)
    config = plan.config.model_copy(update={"data": data})
    plan = replace(plan, layout=layout, config=config)
    loader = make_train_loader(plan, splits, rank=rank, num_workers=0)
    with closing(loader.stream()) as batches:
        return next(batches)


def longest_first(splits: Splits, plan: Plan) -> Splits:
    """Return the data with as many of its longest samples as a step has first, where it knows their
    lengths.
    """
    train = splits.train
    if is_stream(train):
        return splits
    try:
        lengths = lengths_of(train, KEY)
    except ConfigError:
        return splits
    order = np.argsort(-lengths, kind="stable")[: plan.layout.global_size].tolist()
    longest = TakenSet(train, getattr(train, "collate_fn", None), order)
    return replace(splits, train=longest)


def _free() -> None:
    """Return memory that nothing holds to the device, or to the host."""
    gc.collect()
    if device().type == "cpu":
        with suppress(OSError, AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
    else:
        torch.get_device_module(device()).empty_cache()


def _reset_peak() -> None:
    if device().type == "cpu":
        with suppress(OSError):
            _RESET.write_text(_RESET_PEAK, encoding="ascii")
    else:
        torch.get_device_module(device()).reset_peak_memory_stats()


def _peak() -> int:
    """Return the most bytes in use since `_reset_peak`; 0 where the system does not count."""
    if device().type == "cpu":
        return _of_process("VmHWM")
    return int(torch.get_device_module(device()).max_memory_allocated())


def _usable() -> int | None:
    """Return the bytes that this rank may have in use, those that it has included; None where they
    are not known.
    """
    if device().type == "cpu":
        free = room()
        if free is None:
            return None
        return _of_process("VmRSS") + free.num_bytes // ranks_on_host()
    module = torch.get_device_module(device())
    free_bytes, _ = module.mem_get_info()
    return int(free_bytes + module.memory_reserved())


def _of_process(name: str) -> int:
    """Return bytes of a line of Linux's description of this process; 0 on other systems."""
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    return 0
