"""The only batch arithmetic: global_size = micro_size x accumulation_steps x data_parallel_size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from framework.config.training import MEASURED, Batch
from framework.errors import Problem, counted

DEFAULT_MICRO_SIZE: Final = 32
_MOST_STAGES: Final = 4  # that are written out


@dataclass(frozen=True)
class Layout:
    """Distribution of the samples of one optimizer step.

    Attributes:
        world_size: ranks.
        data_parallel_size: ranks that see different samples.
        global_size: samples per optimizer step.
        micro_size: samples per forward pass of a rank.
        accumulation_steps: forward passes of a rank per optimizer step; with a pipeline its
            micro-batches per step.
        pipe_size: pipeline stages.
        tensor_size: ranks that share every split weight of one stage, and see the same samples.
        sequence_size: ranks that share the positions of the same samples.
        expert_size: data-parallel ranks, one after the other, that share the experts of mixtures.
    """

    world_size: int
    data_parallel_size: int
    global_size: int
    micro_size: int
    accumulation_steps: int
    pipe_size: int = 1
    tensor_size: int = 1
    sequence_size: int = 1
    expert_size: int = 1

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same weights and sum gradients of different samples or positions."""
        return self.data_parallel_size * self.sequence_size

    def data_parallel_rank(self, rank: int) -> int:
        """Return the data-parallel rank, which decides the samples that a rank sees.

        Ranks are ordered (stage, data, sequence, tensor), as in DeepSpeed's
        PipeModelDataParallelTopology: ranks that communicate most are closest.
        """
        return rank // (self.sequence_size * self.tensor_size) % self.data_parallel_size

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage that a rank runs."""
        return rank // (self.world_size // self.pipe_size)

    def sequence_rank(self, rank: int) -> int:
        """Return the number of the part of every sequence that a rank sees."""
        return rank // self.tensor_size % self.sequence_size

    def tensor_rank(self, rank: int) -> int:
        """Return the number of the part of every split weight that a rank holds."""
        return rank % self.tensor_size

    def places(self) -> str:
        """Describe which ranks run each stage, and which of them share tensors; empty where a model
        is not divided both ways.
        """
        if self.pipe_size == 1 or self.tensor_size == 1:
            return ""
        ranks = self.world_size // self.pipe_size
        stages = []
        for stage in range(self.pipe_size):
            stages.append(f"stage {stage} on {stage * ranks} to {(stage + 1) * ranks - 1}")
        if len(stages) > _MOST_STAGES:
            stages[_MOST_STAGES - 1 : -1] = ["..."]
        size = self.tensor_size
        groups = f"0 to {size - 1}, {size} to {2 * size - 1}"
        if self.world_size > 2 * size:
            groups += ", ..."
        return f"{', '.join(stages)}; tensor groups side by side: {groups}"

    def __str__(self) -> str:
        text = (
            f"{self.global_size} samples per step = {self.micro_size} x {self.accumulation_steps} "
            f"accumulation x {self.data_parallel_size} data-parallel"
        )
        for size, kind in (
            (self.pipe_size, "pipeline stages"),
            (self.tensor_size, "tensor-parallel"),
            (self.sequence_size, "sequence-parallel"),
            (self.expert_size, "expert-parallel"),
        ):
            if size > 1:
                text += f", {size} {kind}"
        return text


def implied_data_parallel_size(batch: Batch) -> int | None:
    """Return the data-parallel size that follows from the three numbers of a batch; None if one of
    them is not set, or they do not divide.
    """
    micro = batch.fixed_micro_size
    if batch.global_size is None or micro is None or batch.accumulation_steps is None:
        return None
    size, remainder = divmod(batch.global_size, micro * batch.accumulation_steps)
    if size and not remainder:
        return size
    return None


def largest_global_size(batch: Batch, *, parallel: int, at_most: int) -> int:
    """Return the largest global size up to a limit that fits the batch's other numbers on
    `parallel` data-parallel ranks; 0 if no size does.
    """
    unit = _unit(batch, parallel)
    return at_most // unit * unit


def make_layout(
    batch: Batch,
    *,
    world_size: int,
    pipe_size: int = 1,
    tensor_size: int = 1,
    sequence_size: int = 1,
) -> Layout | Problem:
    """Fill in the numbers of a batch that were left out, or return the problem if the devices or
    the samples do not divide.
    """
    together = pipe_size * tensor_size * sequence_size  # ranks that train on the same samples
    parallel, remainder = divmod(world_size, together)
    sizes = {"pipe_size": pipe_size, "tensor_size": tensor_size, "sequence_size": sequence_size}
    if remainder:
        return _devices_do_not_divide(world_size, sizes)
    if batch.global_size is None:
        micro = batch.fixed_micro_size or DEFAULT_MICRO_SIZE
        accumulation = batch.accumulation_steps or 1
        global_size = micro * accumulation * parallel
        return Layout(world_size, parallel, global_size, micro, accumulation, **sizes)
    divided = _divided(batch, batch.global_size, parallel)
    if isinstance(divided, Problem):
        return divided
    micro, accumulation = divided
    return Layout(world_size, parallel, batch.global_size, micro, accumulation, **sizes)


def _divided(batch: Batch, global_size: int, parallel: int) -> tuple[int, int] | Problem:
    """Return micro-batch and accumulation steps of a global size on `parallel` data-parallel ranks,
    or the problem if they do not divide.
    """
    micro = batch.fixed_micro_size
    accumulation = batch.accumulation_steps
    if batch.micro_size == MEASURED and accumulation is None:
        micro = 1  # until it is measured
    samples = counted(global_size, "sample")
    devices = counted(parallel, "device")
    if global_size % parallel:
        return _does_not_divide(batch, parallel, f"{samples} cannot be split evenly over {devices}")
    if micro is None:
        accumulation = accumulation or 1
        micro, remainder = divmod(global_size, parallel * accumulation)
        reason = (
            f"{samples} cannot be split over {devices} x "
            f"{counted(accumulation, 'accumulation step')}"
        )
    elif accumulation is None:
        accumulation, remainder = divmod(global_size, parallel * micro)
        reason = f"{samples} cannot be split over {devices} x micro-batches of {micro}"
    else:
        remainder = global_size - micro * accumulation * parallel
        reason = (
            f"{global_size} is not micro_size {micro} x accumulation_steps {accumulation} x "
            f"{devices}"
        )
    if remainder or not micro or not accumulation:
        return _does_not_divide(batch, parallel, reason)
    return micro, accumulation


def _devices_do_not_divide(world_size: int, sizes: Mapping[str, int]) -> Problem:
    together = prod(sizes.values())
    below = world_size // together * together
    if below:
        counts = f"{below} or {below + together}"
    else:
        counts = str(together)
    pipe, tensor, sequence = sizes.values()
    factors = []
    if tensor > 1:
        factors.append(f"{tensor} tensor-parallel")
    if sequence > 1:
        factors.append(f"{sequence} sequence-parallel")
    parts = "groups"
    if pipe > 1:
        parts = f"pipelines of {counted(pipe, 'stage')}"
    if factors:
        parts += f" of {' x '.join(factors)} ranks"
    reason = f"{counted(world_size, 'device')} cannot be split into {parts}"
    if not factors:
        return Problem(
            "pipe-not-divisible",
            reason,
            f"use {counts} devices, or other stages",
            "parallel.pipe",
            pipe,
        )
    key = "parallel.sequence"
    size = sequence
    if tensor > 1:
        key = "parallel.tensor"
        size = tensor
    fix = f"use {counts} devices, or smaller groups"
    return Problem("parallel-not-divisible", reason, fix, key, size)


def _does_not_divide(batch: Batch, parallel: int, reason: str) -> Problem:
    assert batch.global_size is not None
    unit = _unit(batch, parallel)
    key = "batch.global_size"
    below = largest_global_size(batch, parallel=parallel, at_most=batch.global_size)
    if batch.fixed_micro_size is not None and batch.accumulation_steps is not None:
        fix = f"set {key}: {unit}, or leave one of the three out"
        devices = implied_data_parallel_size(batch)
        if devices:
            fix += f", or use {counted(devices, 'device')}"
    elif below:
        fix = f"set {key}: {below} or {below + unit}"
    else:
        fix = f"set {key}: {unit}"
    return Problem("batch-not-divisible", reason, fix, key, batch.global_size)


def _unit(batch: Batch, parallel: int) -> int:
    """Return the smallest step between global sizes that fit the batch's other numbers."""
    micro_size = batch.fixed_micro_size or 1
    accumulation_steps = batch.accumulation_steps or 1
    return parallel * micro_size * accumulation_steps
