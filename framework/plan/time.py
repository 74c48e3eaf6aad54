"""Time of an optimizer step by component: estimated from a model's work, its distribution and a machine, without torch.

What is sent, and when, was read in DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/engine.py`,
`runtime/pipe/engine.py`) and our `engine/gradient_sums.py`. Collectives cost as in NCCL's own model (`tuning.cc`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import Any, Final

from framework.config.optimizer import SGD, Adagrad, Lion
from framework.config.precision import BF16, FP16, FP32
from framework.plan.devices import Machine
from framework.plan.memory import NotEstimatedError
from framework.plan.plan import Plan
from framework.plan.rules.devices import sums_of
from framework.plan.work import ModelWork, Part

Seconds = dict[str, float]


@dataclass(frozen=True)
class Parallelism:
    """Distribution of one optimizer step over devices, and what else decides its time.

    Attributes:
        data: ranks that see different samples.
        pipe: pipeline stages.
        tensor: ranks that share every matrix product.
        sequence: ranks that share every sample's tokens.
        expert: ranks that share the experts.
        zero_stage: 0 to 3.
        accumulation: micro-batches of a rank, or of a pipeline, per optimizer step.
        micro_size: samples of a micro-batch.
        dtype: what matrix products are computed in: fp32, tf32, fp16, bf16 or fp8.
        weight_bytes: of an element of the weights.
        gradient_bytes: of an element of the gradients that are sent.
        state_bytes: of optimizer state for an element, with the fp32 weight where there is one.
        recomputed: share of the forward pass that runs again in the backward pass.
        overlaps: sums of gradients run beside the backward pass.
        scatters: each rank gets its part of the sums alone, as with FSDP; DeepSpeed does so at stage 3 only.
        bucket: elements of gradients that are summed at once.
        prefetches: weights of stage 3 are gathered ahead of their use.
        live: elements of weights that stay whole at stage 3 between the forward and the backward pass.
        persistent: elements up to which a weight stays whole at stage 3.
        interleaving: parts of the model on each pipeline stage.
        splits_norms: tensor parallelism splits tokens outside of matrix products, as Megatron's sequence parallelism.
        block_sums: all-reduces of tensor parallelism in a block, forward and backward.
        is_offloaded: the optimizer runs on the host.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    zero_stage: int = 0
    accumulation: int = 1
    micro_size: int = 1
    dtype: str = "bf16"
    weight_bytes: int = 2
    gradient_bytes: int = 2
    state_bytes: int = 12
    recomputed: float = 0.0
    overlaps: bool = True
    scatters: bool = False
    bucket: int = 50_000_000
    prefetches: bool = True
    live: int = 1_000_000_000
    persistent: int = 100_000
    interleaving: int = 1
    splits_norms: bool = False
    block_sums: tuple[int, int] = (2, 4)
    is_offloaded: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of one step."""
        return self.data * self.pipe * self.tensor * self.sequence

    @staticmethod
    def from_plan(plan: Plan) -> Parallelism:
        """Read the distribution off a plan."""
        config, layout = plan.config, plan.layout
        precision, zero = config.precision, config.zero
        is_half = isinstance(precision, BF16 | FP16)
        dtype: str = precision.dtype
        if isinstance(precision, FP32):
            dtype = "fp32" if precision.matmul == "highest" else "tf32"
        _, reduction = sums_of(config, layout)
        optimizer = config.optimizer
        moments = 2
        if isinstance(optimizer, SGD):
            moments = 1 if optimizer.momentum else 0
        elif isinstance(optimizer, Adagrad | Lion):
            moments = 1
        stage, overlap = zero.stage, zero.overlap_comm
        return Parallelism(
            data=layout.data_parallel_size,
            pipe=layout.pipe_size,
            zero_stage=stage,
            accumulation=layout.accumulation_steps,
            micro_size=layout.micro_size,
            dtype=dtype if dtype != "autocast" else "bf16",
            weight_bytes=2 if is_half else 4,
            gradient_bytes=2 if is_half and not reduction else 4,
            state_bytes=4 * moments + (4 if is_half or stage else 0),
            recomputed=1.0 if config.training.recompute_every else 0.0,
            overlaps=stage == 0 or (stage == 3 if overlap is None else overlap),
            scatters=stage == 3,
            bucket=zero.reduce_bucket_size,
            prefetches=zero.stage3_prefetch_bucket_size > 0,
            live=zero.stage3_max_live_parameters,
            persistent=zero.stage3_param_persistence_threshold,
            is_offloaded=stage > 0 and zero.offload_optimizer.device != "none",
        )


@dataclass(frozen=True)
class StepTime:
    """Estimated time of an optimizer step.

    Attributes:
        seconds: component -> seconds on the critical path; what runs beside something else is not in it.
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
        return None if self.num_tokens is None else self.num_tokens / self.total / self.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the peak that the model itself needs (Chowdhery et al. 2022, B)."""
        return self.model_flops / self.total / self.num_devices / self.peak_flops_per_second

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain values, as written to ``plan.json``."""
        return {
            "is_estimate": True,
            "step_seconds": self.total,
            "seconds": dict(self.seconds),
            "samples_per_second": self.samples_per_second,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
        }


@dataclass(frozen=True)
class Rates:
    """Constants that no table of devices has, fitted on the `fit` half of `benchmarks/planner/points.json` by
    `benchmarks/planner/validate.py`.

    Attributes:
        plateau: share of the fastest matrix product that the products of a large model reach.
        best: share of the peak that the fastest matrix product reaches, for devices where nobody measured it.
        saturation_seconds: time at which a part's matrix products reach half of the plateau.
        memory: share of the memory's bandwidth that other operations reach.
        network: share of the network's bandwidth that large collectives reach.
        overlap: share of what is sent beside computation that hides behind it.
        launch_seconds: least time of one part, forward, for the host to start its operations.
    """

    plateau: float = 0.85
    best: float = 0.8
    saturation_seconds: float = 1e-4
    memory: float = 0.7
    network: float = 0.7
    overlap: float = 0.9
    launch_seconds: float = 3e-4


RATES: Final = Rates()


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


def step_time(work: ModelWork, parallelism: Parallelism, machine: Machine, rates: Rates = RATES) -> StepTime:
    """Estimate the time of an optimizer step.

    Args:
        work: of the model undivided, for a micro-batch of any size: all but its weights grows with the samples.
        parallelism: how it is distributed.
        machine: what it runs on.
        rates: fitted constants.

    Raises:
        NotEstimatedError: the machine lacks a figure that is needed.
    """
    return _Step(work, parallelism, machine, rates).time()


class _Step:
    """Sizes and rates that the components follow from."""

    def __init__(self, work: ModelWork, parallelism: Parallelism, machine: Machine, rates: Rates) -> None:
        self.work, self.by, self.machine, self.rates = work, parallelism, machine, rates
        device = machine.device
        self.samples = parallelism.micro_size / work.num_samples
        self.peak = _needed(device.flops_per_second.get(parallelism.dtype), f"peak in {parallelism.dtype}", device.name)
        self.bandwidth = _needed(device.memory_bytes_per_second, "memory bandwidth", device.name) * rates.memory
        best, bf16 = device.matmul_flops_per_second, device.flops_per_second.get("bf16")
        share = best / bf16 if best and bf16 else rates.best
        self.flops_per_second = self.peak * share * rates.plateau
        self.num_params = sum(part.num_params * part.count for part in work.parts)
        self.stage_params = self.num_params / parallelism.pipe / parallelism.tensor

    def time(self) -> StepTime:
        by = self.by
        forward, backward = self.slowest_stage()
        passes = {name: by.accumulation * (forward[name] + backward[name]) for name in forward}
        micro = sum(forward.values()) + sum(backward.values())
        seconds = {
            **passes,
            "pipeline bubble": micro * (by.pipe - 1) / by.interleaving,
            **self.gradients(sum(backward.values())),
            **self.gathers(sum(forward.values()), sum(backward.values())),
            **self.optimizer(),
            "step overhead": self.overhead(),
        }
        flops = 3 * self.samples * sum(part.flops * part.count for part in self.work.parts)
        micros = by.accumulation * by.data
        tokens = self.work.num_tokens
        return StepTime(
            {name: value for name, value in seconds.items() if value},
            by.micro_size * micros,
            None if tokens is None else round(tokens * self.samples * micros),
            by.num_devices,
            flops * micros,
            self.peak,
        )

    def overhead(self) -> float:
        """Time of the engine."""
        by, weights = self.by, self.work.weights.values()
        sizes = [prod(shape) for shape in weights][: ceil(len(weights) / by.pipe)]
        return self.machine.overhead_seconds(
            by.zero_stage, sizes=sizes, micro_batches=by.accumulation, persistent=by.persistent
        )

    def slowest_stage(self) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of a micro-batch on the pipeline stage that has the loss, or on all."""
        total: tuple[Seconds, Seconds] = ({}, {})
        for part, count, is_recomputed in self.parts_of_stage():
            for pass_, found in zip(total, self.part(part, is_recomputed), strict=True):
                for name, value in found.items():
                    pass_[name] = pass_.get(name, 0.0) + count * value
        return total

    def parts_of_stage(self) -> Iterator[tuple[Part, float, bool]]:
        """Parts of the last stage, which has the loss, with their counts, and whether they are computed again."""
        parts, pipe = self.work.parts, self.by.pipe
        for number, part in enumerate(parts):
            if pipe == 1 or part.count > 1:
                count = part.count if pipe == 1 else ceil(part.count / pipe)
                yield part, count, number < len(parts) - 1
            elif number >= len(parts) - 2:
                yield part, 1, False

    def part(self, part: Part, is_recomputed: bool) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of one part and one micro-batch."""
        by, split = self.by, self.by.tensor * self.by.sequence
        product = self.samples * part.flops / split / self.flops_per_second
        product += self.rates.saturation_seconds if part.flops else 0.0
        moved = self.samples * part.moved_bytes / (split if by.splits_norms else by.sequence) / self.bandwidth
        launch = max(self.rates.launch_seconds - product - moved, 0.0)
        again = by.recomputed if is_recomputed else 0.0
        output = self.samples * part.output_bytes / by.sequence
        forward = {"compute": product, "memory-bound operations": moved, "launch": launch}
        backward = {
            "compute": (2 + again) * product,
            "memory-bound operations": (2 + again) * moved,
            "launch": (1 + again) * launch,
        }
        if by.tensor > 1:
            one = self.all_reduce(output, by.tensor, 1)
            forward["tensor parallel"] = by.block_sums[0] * one
            backward["tensor parallel"] = (by.block_sums[1] + again * by.block_sums[0]) * one
        if by.sequence > 1:  # four all-to-alls of an attention, each way (DeepSpeed Ulysses, Jacobs et al. 2023)
            one = self.scatter(output, by.sequence, by.tensor)
            forward["sequence parallel"], backward["sequence parallel"] = 4 * one, (4 + 4 * again) * one
        if by.pipe > 1:
            one = self.send(output) * by.interleaving / max(part.count / by.pipe, 1)
            forward["pipeline sends"] = backward["pipeline sends"] = one
        return forward, backward

    def gradients(self, backward: float) -> Seconds:
        """Sums of gradients over the data-parallel ranks, without what hides behind a backward pass."""
        by = self.by
        ranks = by.data * by.sequence
        if ranks == 1:
            return {}
        size = by.gradient_bytes * self.stage_params
        buckets = max(ceil(self.stage_params / by.bucket), 1)
        one = self.scatter if by.scatters else self.all_reduce
        once = buckets * one(size / buckets, ranks, by.tensor)
        times = by.accumulation if by.zero_stage > 1 else 1
        hidden = self.rates.overlap * min(once, backward) if by.overlaps else 0.0
        return {"gradient sums": times * (once - hidden)}

    def gathers(self, forward: float, backward: float) -> Seconds:
        """Gathers of weights: once a step at stages 1 and 2, for each pass at stage 3."""
        by = self.by
        ranks = by.data * by.sequence
        if ranks == 1 or not by.zero_stage:
            return {}
        once = self.scatter(by.weight_bytes * self.stage_params, ranks, by.tensor)
        if by.zero_stage < 3:
            return {"weight gathers": once}
        stays = self.stage_params <= by.live
        hidden = self.rates.overlap if by.prefetches else 0.0
        exposed = once - hidden * min(once, forward)
        if not stays:
            exposed += once - hidden * min(once, backward)
        return {"weight gathers": by.accumulation * exposed}

    def optimizer(self) -> Seconds:
        """The optimizer's update: it reads gradients, reads and writes state and weights."""
        by = self.by
        share = self.stage_params / (by.data * by.sequence if by.zero_stage else 1)
        moved = share * (2 * by.state_bytes + 4 + 2 * by.gradient_bytes + by.weight_bytes)
        if not by.is_offloaded:
            return {"optimizer": moved / self.bandwidth}
        device = self.machine.device
        link = _needed(device.host_bytes_per_second, "bandwidth to host memory", device.name)
        return {"offload transfers": share * (by.gradient_bytes + by.weight_bytes) / link, "optimizer": moved / link}

    def all_reduce(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of a sum of `size` bytes over ranks that lie `stride` apart."""
        inside, hosts = self.placed(ranks, stride)
        ring = 2 * ((ranks - hosts) * _LINK_SECONDS + (hosts if hosts > 1 else 0) * self.hop)
        tree = 2 * ((inside - 1) * _LINK_SECONDS + log2(hosts) * self.hop)
        transfer = 2 * (ranks - 1) / ranks * size / self.ring_bandwidth(inside, hosts)
        return self.start + min(ring, tree) + transfer

    def scatter(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of a gather, a scattered sum or an exchange of `size` bytes in all over ranks."""
        inside, hosts = self.placed(ranks, stride)
        latency = (ranks - hosts) * _LINK_SECONDS + (hosts if hosts > 1 else 0) * self.hop
        return self.start + latency + (ranks - 1) / ranks * size / self.ring_bandwidth(inside, hosts)

    def send(self, size: float) -> float:
        """Seconds of a transfer to the next pipeline stage."""
        stride = self.by.data * self.by.sequence * self.by.tensor
        inside, hosts = self.placed(2, stride)
        return self.start + (self.hop if hosts > 1 else 0) + size / self.ring_bandwidth(inside, hosts)

    def placed(self, ranks: int, stride: int) -> tuple[int, int]:
        """Members of a group on one host, and hosts: tensor ranks are neighbours, then sequence, data, pipe."""
        inside = min(ranks, max(self.machine.devices_per_host // stride, 1))
        return inside, ceil(ranks / inside)

    @property
    def start(self) -> float:
        """Seconds before the first byte of a collective."""
        return self.machine.all_reduce_latency_seconds or _START_SECONDS

    @property
    def hop(self) -> float:
        """Seconds of a hop between hosts."""
        return self.machine.network.latency_seconds if self.machine.network else 0.0

    def ring_bandwidth(self, inside: int, hosts: int) -> float:
        """Bytes per second of a ring: of the links within a host, or of the network of all its members on a host."""
        device, network = self.machine.device, self.machine.network
        links = device.collective_bytes_per_second or device.link_bytes_per_second
        if hosts == 1:
            return _needed(links, "bandwidth between devices", device.name)
        between = _needed(network.bytes_per_second if network else None, "network between hosts", device.name)
        across = self.rates.network * between * inside
        return across if inside == 1 else min(across, _needed(links, "bandwidth between devices", device.name))


# NCCL's tuning.cc: start of a ring, and a step over NVLink, both with the protocol of large messages.
_START_SECONDS: Final = 8.4e-6
_LINK_SECONDS: Final = 3.4e-6


def _needed(figure: float | None, what: str, device: str) -> float:
    if figure is None:
        raise NotEstimatedError(f"the {what} of {device} is not known")
    return figure
