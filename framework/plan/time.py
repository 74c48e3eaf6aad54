"""Time of an optimizer step by component: estimated from a model's work, its distribution and a
machine, without torch.

What is sent, and when, was read in DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`,
`runtime/engine.py`, `runtime/pipe/engine.py`) and our `engine/gradient_sums.py`; sizes of messages
come from `framework.plan.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import ceil, prod
from typing import Any

from framework.plan import messages
from framework.plan.collectives import needed
from framework.plan.devices import Machine
from framework.plan.fitted_rates import OF_PROCESSORS, RATES, Rates
from framework.plan.flat_sums import DDP_BUCKET
from framework.plan.muon import flops_of_rank, muon_matrices, sent_numbers
from framework.plan.operations import Shape
from framework.plan.parallelism import Parallelism
from framework.plan.plan import Plan
from framework.plan.rank_memory import EXPERTS
from framework.plan.time_of_passes import PassTimes
from framework.plan.work import ModelWork


@dataclass(frozen=True)
class StepTime:
    """Estimated time of an optimizer step.

    Attributes:
        seconds: component -> seconds on the critical path; what runs beside something else is not
            in it.
        num_samples: of the step, on all devices.
        num_tokens: of the step; None for models that know none.
        num_devices: that work at it.
        model_flops: of forward and backward pass without what is computed again, on all devices.
        peak_flops_per_second: of one device.
    """

    seconds: Mapping[str, float]
    num_samples: int
    num_tokens: int | None
    num_devices: int
    model_flops: float
    peak_flops_per_second: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    @property
    def samples_per_second(self) -> float:
        """Samples of all devices."""
        return self.num_samples / self.total

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """Tokens of one device."""
        if self.num_tokens is None:
            return None
        return self.num_tokens / self.total / self.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the peak that the model itself needs (Chowdhery et
        al. 2022, B).
        """
        return self.model_flops / self.total / self.num_devices / self.peak_flops_per_second

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values, as written to ``plan.json``."""
        return {
            "is_estimate": True,
            "step_seconds": self.total,
            "seconds": dict(self.seconds),
            "samples_per_second": self.samples_per_second,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
        }


def estimate_time(plan: Plan, work: ModelWork, machine: Machine) -> StepTime:
    """Estimate the time of a plan's optimizer step.

    Args:
        plan: what will happen.
        work: of the plan's model, for a micro-batch of any size.
        machine: what it runs on.

    Raises:
        NotEstimatedError: the machine lacks a figure that this plan needs.
    """
    return step_time(work, Parallelism.from_plan(plan), machine)


def step_time(
    work: ModelWork, parallelism: Parallelism, machine: Machine, rates: Rates | None = None
) -> StepTime:
    """Estimate the time of an optimizer step.

    Args:
        work: of the model undivided, for a micro-batch of any size: all but its weights grows with
            the samples.
        parallelism: how it is distributed.
        machine: what it runs on.
        rates: constants; left out: the fitted ones, or the ones of CPUs.

    Raises:
        NotEstimatedError: the machine lacks a figure that is needed.
    """
    usual = OF_PROCESSORS if machine.engine_seconds else RATES
    return _Step(work, parallelism, machine, rates or usual).time()


@dataclass(frozen=True)
class _Group:
    """Weights that the same ranks hold.

    Attributes:
        own: elements of each trained weight, in the model's order, of all pipeline stages.
        frozen: the same of those that are not trained.
        ranks: how many ranks hold the same ones.
        stride: how many ranks lie between two of them.
    """

    own: list[int]
    frozen: list[int]
    ranks: int
    stride: int


class _Step:
    """Seconds of an optimizer step, component by component; `forward` and `backward` are those of
    the passes of one micro-batch.
    """

    def __init__(
        self, work: ModelWork, parallelism: Parallelism, machine: Machine, rates: Rates
    ) -> None:
        self.passes = PassTimes(work, parallelism, machine, rates)
        self.work = work
        self.by = parallelism
        self.machine = machine
        self.rates = rates
        self.collectives = self.passes.collectives
        self.ranks = self.passes.ranks
        self.bandwidth = self.passes.bandwidth
        self.fastest = self.passes.fastest
        self.num_own = sum(sum(group.own) for group in self.groups)
        self.num_held = self.num_own + sum(sum(group.frozen) for group in self.groups)
        self.stage_params = self.num_own / parallelism.pipe
        self.held_params = self.num_held / parallelism.pipe

    def time(self) -> StepTime:
        """Return all components of the step, those that take no time left out."""
        by = self.by
        forward_parts, backward_parts = self.passes.slowest_stage()
        forward = sum(forward_parts.values())
        backward = sum(backward_parts.values())
        seconds = {
            name: by.accumulation * (forward_parts[name] + backward_parts[name])
            for name in forward_parts
        }
        seconds["host work of stage 3"] = by.accumulation * self.host_work(forward, backward)
        seconds["pipeline bubble"] = (forward + backward) * (by.pipe - 1) / by.interleaving
        seconds["gradient sums"] = self.gradient_sums(backward)
        seconds["copies"] = self.copies()
        seconds["weight gathers"] = self.weight_gathers(forward, backward)
        seconds["offload transfers"] = self.offload_transfers(backward)
        seconds["optimizer"] = self.optimizer()
        seconds["orthogonal matrices"] = self.orthogonal_matrices()
        seconds["matrix exchange"] = self.matrix_exchange()
        seconds["step overhead"] = self.overhead()
        micro_batches = by.accumulation * by.data
        num_tokens = None
        if self.work.num_tokens is not None:
            num_tokens = round(self.work.num_tokens * self.passes.samples * micro_batches)
        flops = self.passes.samples * self.work.trained_flops
        return StepTime(
            seconds={name: value for name, value in seconds.items() if value},
            num_samples=by.micro_size * micro_batches,
            num_tokens=num_tokens,
            num_devices=by.num_devices,
            model_flops=flops * micro_batches,
            peak_flops_per_second=self.passes.peak,
        )

    def overhead(self) -> float:
        """Return the engine's seconds in a step; a stage is taken to have the first weights."""
        by = self.by
        weights = self.work.weights.values()
        sizes = [prod(shape) for shape in weights][: ceil(len(weights) / by.pipe)]
        return self.machine.overhead_seconds(
            by.zero_stage, sizes=sizes, micro_batches=by.accumulation, persistent=by.persistent
        )

    # What a step has beside its passes.

    @cached_property
    def groups(self) -> list[_Group]:
        """The weights of a rank by the ranks that hold the same ones: experts are on fewer."""
        by = self.by
        own = self.sizes_of(self.work.weights)
        if not self.work.weights:
            for part in self.work.parts:
                own[False] += repeat(part.num_params // by.tensor, part.count)
        frozen = self.sizes_of(self.work.frozen)
        groups = [_Group(own[False], frozen[False], self.ranks, by.tensor)]
        if own[True] or frozen[True]:
            ranks = max(self.ranks // by.expert, 1)
            groups.append(_Group(own[True], frozen[True], ranks, by.tensor * by.expert))
        return groups

    def sizes_of(self, weights: Mapping[str, Shape]) -> dict[bool, list[int]]:
        """Return the elements of the weights that a rank holds, of those that are no expert's and
        of those that are; a part of each matrix with tensor parallelism.
        """
        by = self.by
        sizes: dict[bool, list[int]] = {False: [], True: []}
        for name, shape in weights.items():
            is_expert = by.expert > 1 and EXPERTS in name
            size = prod(shape) // by.tensor
            if is_expert and len(shape) > 2:  # all experts of a layer in one
                size //= by.expert
            sizes[is_expert].append(size)
        if any(len(shape) > 2 for name, shape in weights.items() if EXPERTS in name):
            return sizes
        sizes[True] = sizes[True][: len(sizes[True]) // by.expert]
        return sizes

    def gradient_sums(self, backward: float) -> float:
        """Return the seconds of the sums of gradients over the data-parallel ranks, without what
        hides behind the backward pass.

        DeepSpeed's buckets wait for each other: one is sent while the next one fills, and the last
        one in the open.
        """
        by = self.by
        seconds = 0.0
        for group in self.groups:
            if group.ranks == 1 or not group.own:
                continue
            send = self.collectives.all_reduce
            if by.scatters:
                send = self.collectives.scatter
            beside = 0.0
            if by.overlaps:
                beside = self.rates.overlap * backward * sum(group.own) / self.num_own
            sums = self.sums(group.own)
            seconds += self.in_the_open(sums, by.gradient_bytes, send, group, beside)
        num_sums = 1
        if by.zero_stage > 1 and not by.coalesces:
            num_sums = by.accumulation
        return num_sums * seconds

    def sums(self, sizes: Sequence[int]) -> list[int]:
        """Return the messages in which gradients of these weights are summed, the last ones of the
        model first.
        """
        by = self.by
        backwards = sizes[::-1]
        if by.zero_stage in (1, 2) and by.scatters:
            return messages.flat(sum(sizes), by.bucket)
        if by.zero_stage:
            return messages.bounded(backwards, by.bucket)
        if by.pipe > 1:
            return messages.filled(sizes, messages.PIPELINE_BUCKET)
        return messages.bounded(backwards, DDP_BUCKET)

    def in_the_open(
        self,
        sizes: Sequence[int],
        width: int,
        send: Callable[[float, int, int], float],
        group: _Group,
        beside: float,
    ) -> float:
        """Return the seconds of messages that nothing hides.

        Args:
            sizes: elements of each, of the whole model: a pipeline stage has its part of them.
            width: bytes of an element.
            send: of `Collectives`.
            group: who takes part.
            beside: seconds of computation that hide what is sent beside it: all but one message,
                which nothing is beside.
        """
        if not sizes:
            return 0.0
        num = max(len(sizes) / self.by.pipe, 1.0)
        size = width * sum(sizes) / self.by.pipe / num
        each = send(size, group.ranks, group.stride)
        return num * each - (num - 1) * min(each, beside / num)

    def weight_gathers(self, forward: float, backward: float) -> float:
        """Return the seconds of the gathers of weights: once a step at stages 1 and 2; at stage 3
        for each pass, ahead of their use, and of small weights once a step.
        """
        by = self.by
        if not by.zero_stage:
            return 0.0
        seconds = 0.0
        for group in self.groups:
            if group.ranks == 1:
                continue
            if by.zero_stage < 3:
                once = messages.whole(group.own)
                seconds += self.gather(once, group, 0.0)
                continue
            held = group.own + group.frozen
            once = messages.small(held, by.persistent)
            seconds += self.gather(once, group, 0.0)
            spread = messages.ahead(
                held, prefetch=by.prefetch, live=by.live, persistent=by.persistent
            )
            ahead = self.rates.overlap if by.prefetch else 0.0
            ahead *= sum(held) / self.num_held
            passes = self.gather(spread, group, ahead * forward)
            passes += (self.gathers - 1) * self.gather(spread, group, ahead * backward)
            seconds += by.accumulation * passes
        return seconds

    def gather(self, sizes: Sequence[int], group: _Group, beside: float) -> float:
        """Return the seconds of gathers of weights, as `in_the_open`."""
        send = self.collectives.scatter
        return self.in_the_open(sizes, self.by.weight_bytes, send, group, beside)

    def host_work(self, forward: float, backward: float) -> float:
        """Return the seconds of a micro-batch in which the device waits for the host, which handles
        each weight of stage 3.
        """
        by = self.by
        if by.zero_stage < 3 or not by.by_weight:
            return 0.0
        num_weights = len(self.work.weights) + len(self.work.frozen)
        once = self.rates.weight_seconds * num_weights / by.pipe
        return max(once - forward, 0.0) + max((1 + by.recomputed) * once - backward, 0.0)

    @cached_property
    def gathers(self) -> float:
        """How often stage 3 gathers the weights for a micro-batch.

        Once if all may stay whole; else for the forward and for the backward pass. A recomputed
        layer is run forward and then backward, in the other order: its weights stay whole if no
        more than `reuse` elements are used in between (`__params_to_release` of
        runtime/zero/partitioned_param_coordinator.py), and are gathered a third time if not.
        """
        by = self.by
        if self.held_params <= by.live:
            return 1.0
        layers = [self.passes.weights(part) for part in self.work.parts if part.count > 1]
        between = 2 * max(layers, default=0.0) / by.tensor
        if not between:
            return 2.0
        return 2.0 + by.recomputed * max(1 - by.reuse / between, 0.0)

    def copies(self) -> float:
        """Return the seconds of copies in the device's memory: of gradients into sums and buckets,
        of gathered weights into place.
        """
        by = self.by
        moved = self.stage_params * (3 * by.gradient_bytes)
        if by.zero_stage == 3 and self.ranks > 1:
            moved += self.held_params * (2 * by.weight_bytes * self.gathers)
        return by.accumulation * moved / self.bandwidth

    @property
    def share(self) -> float:
        """Elements of a device's share of the optimizer's state."""
        if self.by.zero_stage:
            shares = sum(sum(group.own) / group.ranks for group in self.groups)
            return shares / self.by.pipe
        return self.stage_params

    def offload_transfers(self, backward: float) -> float:
        """Return the seconds of gradients to the host, beside the backward pass, and of weights on
        their way back.
        """
        by = self.by
        device = self.machine.device
        if not by.is_offloaded and not by.weights_offloaded:
            return 0.0
        link = needed(device.host_bytes_per_second, "bandwidth to host memory", device)
        weights = by.weight_bytes * self.share / link
        seconds = 0.0
        if by.is_offloaded:
            gradients = by.gradient_bytes * self.share / link
            exposed = max(gradients - self.rates.overlap * backward, 0.0)
            seconds += by.host_share * weights + by.accumulation * exposed
        if by.weights_offloaded:
            seconds += by.accumulation * self.gathers * weights
        return seconds

    def optimizer(self) -> float:
        """Return the seconds of the optimizer's step, which is bound by memory.

        It reads gradients, reads and writes its state and fp32 weights, and writes weights.
        """
        by = self.by
        device = self.machine.device
        moved = self.share * (2 * by.state_bytes + 4 + 2 * by.gradient_bytes + by.weight_bytes)
        if by.is_offloaded:
            host = device.host_memory_bytes_per_second
            host = needed(host, "memory bandwidth of the host", device)
            host /= self.machine.devices_per_host
            seconds = by.host_share * moved / host / self.rates.memory
            if not by.host_kernel:
                seconds *= self.rates.torch_on_host
            if by.host_share < 1:  # one part after the other
                seconds += (1 - by.host_share) * moved / self.bandwidth
            return seconds
        if by.joins_gradients:
            moved += self.share * self.rates.joined_bytes
        return moved / self.bandwidth

    @cached_property
    def muon_matrices(self) -> list[Shape]:
        """Shapes of the matrices that Muon steps; none for other optimizers."""
        if self.by.muon is None:
            return []
        return muon_matrices(self.by.muon, self.work.weights)

    def orthogonal_matrices(self) -> float:
        """Return the seconds in which Muon makes matrices orthogonal, at the rate of large products
        in bf16. The stages of a pipeline have even shares of them.
        """
        by = self.by
        if by.muon is None:
            return 0.0
        flops = flops_of_rank(by.muon, self.muon_matrices, stage=by.zero_stage, ranks=self.ranks)
        in_bf16 = self.machine.device.flops_per_second.get("bf16", self.passes.peak)
        reached = self.fastest * in_bf16 / self.passes.peak * self.rates.plateau
        return flops / by.pipe / reached

    def matrix_exchange(self) -> float:
        """Return the seconds in which pieces of matrices in bf16 go to the ranks that make them
        orthogonal, and back.
        """
        by = self.by
        numbers = sent_numbers(self.muon_matrices, stage=by.zero_stage, ranks=self.ranks)
        if not numbers:
            return 0.0
        return 2 * self.collectives.scatter(2 * numbers, self.ranks, by.tensor)
