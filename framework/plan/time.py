"""Time of an optimizer step by component: estimated from a model's work, its distribution and a
machine, without torch.

What is sent, and when, was read in DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`,
`runtime/engine.py`, `runtime/pipe/engine.py`) and our `engine/gradient_sums.py`. Collectives cost
as in NCCL's own model (`tuning.cc`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, prod, sqrt
from typing import Any, Final

from framework.config.optimizer import SGD, Adafactor, Adagrad, Lion, Muon, OptimizerSection
from framework.config.precision import BF16, FP16, FP32, Autocast, PrecisionSection
from framework.plan.devices import Device, Machine
from framework.plan.memory import NotEstimatedError
from framework.plan.plan import Plan
from framework.plan.rules.devices import sums_of
from framework.plan.work import LayerWork, ModelWork

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
        scatters: each rank gets its part of the sums alone, as with FSDP; DeepSpeed does so at
            stage 3 only.
        bucket: elements of gradients that are summed at once.
        prefetches: weights of stage 3 are gathered ahead of their use.
        live: elements of weights that stay whole at stage 3 between the forward and the backward
            pass.
        persistent: elements up to which a weight stays whole at stage 3.
        by_weight: the host handles each weight by itself at stage 3, as DeepSpeed does; FSDP
            handles blocks.
        halves_alone: half precision without ZeRO: DeepSpeed steps weight by weight.
        joins_gradients: stages 1 and 2: DeepSpeed steps on a joined, unscaled and clipped fp32
            copy.
        interleaving: parts of the model on each pipeline stage.
        block_sums: all-reduces of tensor parallelism in a block, forward and backward.
        is_offloaded: the optimizer runs on the host.
        weights_offloaded: weights of stage 3 lie on the host.
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
    by_weight: bool = True
    halves_alone: bool = False
    joins_gradients: bool = False
    interleaving: int = 1
    block_sums: tuple[int, int] = (2, 4)
    is_offloaded: bool = False
    weights_offloaded: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of one step."""
        return self.data * self.pipe * self.tensor * self.sequence

    @staticmethod
    def from_plan(plan: Plan) -> Parallelism:
        """Return the distribution of a plan."""
        config = plan.config
        layout = plan.layout
        zero = config.zero
        stage = zero.stage
        is_half = isinstance(config.precision, BF16 | FP16)
        _, reduction = sums_of(config, layout)
        overlaps: bool = stage in (0, 3)
        if stage and zero.overlap_comm is not None:
            overlaps = zero.overlap_comm
        state_bytes = 4 * _num_moments(config.optimizer)
        if is_half or stage:
            state_bytes += 4
        return Parallelism(
            data=layout.data_parallel_size,
            pipe=layout.pipe_size,
            tensor=layout.tensor_size,
            sequence=layout.sequence_size,
            block_sums=(2, 2),
            expert=layout.expert_size,
            zero_stage=stage,
            accumulation=layout.accumulation_steps,
            micro_size=layout.micro_size,
            dtype=_product_dtype(config.precision),
            weight_bytes=2 if is_half else 4,
            gradient_bytes=2 if is_half and not reduction else 4,
            state_bytes=state_bytes,
            recomputed=1.0 if config.training.recompute_every else 0.0,
            overlaps=overlaps,
            scatters=stage == 3,
            bucket=zero.reduce_bucket_size,
            prefetches=zero.stage3_prefetch_bucket_size > 0,
            live=zero.stage3_max_live_parameters,
            persistent=zero.stage3_param_persistence_threshold,
            halves_alone=is_half and not stage and layout.pipe_size == 1,
            joins_gradients=stage in (1, 2),
            is_offloaded=stage > 0 and zero.offload_optimizer.device != "none",
            weights_offloaded=stage == 3 and zero.offload_param.device != "none",
        )


def _product_dtype(precision: PrecisionSection) -> str:
    """Return the type that matrix products are computed in."""
    if isinstance(precision, Autocast):
        return precision.compute_dtype
    if isinstance(precision, FP32):
        return "fp32" if precision.matmul == "highest" else "tf32"
    return precision.dtype


def _num_moments(optimizer: OptimizerSection) -> int:
    """Return the fp32 numbers of optimizer state that most elements have."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    if isinstance(optimizer, Adagrad | Lion | Muon):
        return 1
    if isinstance(optimizer, Adafactor):
        return 0
    return 2


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


@dataclass(frozen=True)
class Rates:
    """Constants that no table of devices has. The first six were chosen on the `fit` half of the
    published points by ``python -m benchmarks.planner.validate --fit``: least squares of log ratios
    of throughput.

    Attributes:
        plateau: share of the fastest matrix product that the products of a large model reach.
        plateau_hopper: the same since Hopper: its clock falls under load.
        attention: share of the fastest matrix product that attention reaches, in the scores that
            are computed; fused kernels leave masked ones out.
        attention_hopper: the same since Hopper: torch's kernels of attention were not written for
            its tensor cores.
        width: half of the plateau is reached where a part's weights on one device are a square of
            this width, on a device of 1e15 FLOP/s; it grows with the root of those, as a product is
            divided among more units.
        memory: share of the memory's bandwidth that other operations reach.
        overlap: share of the computation beside which something is sent that hides it. Values from
            0.3 to 0.7 fit the points equally well.
        network: share of the network's bandwidth that large collectives reach: four fifths of what
            is printed (source `mle-network` of devices.json).
        best: share of the peak that the fastest matrix product reaches on a device without a
            measurement: NVIDIA's reach 0.73 to 0.87.
        launch_seconds: least time of one part in one pass, in which the host starts its operations.
        weight_seconds: time of the host for one weight in one pass at stage 3. Of the points of the
            `fit` half belle-402-007 to -009 show it: their steps take 0.38 to 0.42 s at every
            length and width, for 293 weights in two passes.
        half_weight_seconds: the same for one weight in a step of half precision without ZeRO. The
            step of GPT-2, which has 196 weights, takes 143 ms on an H200, and 104 at stage 1
            (benchmarks/results/one_gpu.json).
        joined_bytes: moved for an element by DeepSpeed's step at stages 1 and 2 beyond what the
            optimizer itself needs. With them the steps of GPT-2 and GPT-2 XL on an H200 take 8 and
            101 ms, as measured there.
    """

    plateau: float = 0.91
    plateau_hopper: float = 0.822
    attention: float = 0.323
    attention_hopper: float = 0.2
    width: float = 2270.0
    memory: float = 0.612
    overlap: float = 0.5
    network: float = 0.8
    best: float = 0.8
    launch_seconds: float = 2e-4
    weight_seconds: float = 6.6e-4
    half_weight_seconds: float = 2.1e-4
    joined_bytes: float = 158.0


RATES: Final = Rates()
# Of CPUs, on which the engine was measured: the ranks share the cores, so that nothing hides behind
# anything, products of every size reach what was measured, and the host's own time is the engine's.
OF_PROCESSORS: Final = Rates(
    plateau=1.0,
    attention=0.646,
    width=0.0,
    memory=1.0,
    network=1.0,
    overlap=0.0,
    launch_seconds=0.0,
    weight_seconds=0.0,
    half_weight_seconds=0.0,
    joined_bytes=0.0,
)


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


class _Step:
    """Seconds of an optimizer step, component by component."""

    def __init__(
        self, work: ModelWork, parallelism: Parallelism, machine: Machine, rates: Rates
    ) -> None:
        by = parallelism
        device = machine.device
        self.work = work
        self.by = by
        self.machine = machine
        self.rates = rates
        self.ranks = by.data * by.sequence
        self.samples = by.micro_size / work.num_samples
        peak = device.flops_per_second.get(by.dtype)
        self.peak = _needed(peak, f"peak in {by.dtype}", device)
        memory_bandwidth = _needed(device.memory_bytes_per_second, "memory bandwidth", device)
        self.bandwidth = rates.memory * memory_bandwidth
        best = device.matmul_flops_per_second
        bf16 = device.flops_per_second.get("bf16")
        if best and bf16:
            self.fastest = self.peak * (best / bf16)
        else:
            self.fastest = self.peak * rates.best
        num_params = sum(part.num_params * part.count for part in work.parts)
        num_frozen = sum(map(prod, work.frozen.values()))
        self.stage_params = num_params / by.pipe / by.tensor
        self.held_params = self.stage_params + num_frozen / by.pipe / by.tensor

    def time(self) -> StepTime:
        by = self.by
        forward_parts, backward_parts = self.slowest_stage()
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
        seconds["step overhead"] = self.overhead()
        micro_batches = by.accumulation * by.data
        num_tokens = None
        if self.work.num_tokens is not None:
            num_tokens = round(self.work.num_tokens * self.samples * micro_batches)
        flops = 3 * self.samples * sum(part.flops * part.count for part in self.work.parts)
        return StepTime(
            seconds={name: value for name, value in seconds.items() if value},
            num_samples=by.micro_size * micro_batches,
            num_tokens=num_tokens,
            num_devices=by.num_devices,
            model_flops=flops * micro_batches,
            peak_flops_per_second=self.peak,
        )

    def overhead(self) -> float:
        """Return the time of the engine."""
        by = self.by
        weights = self.work.weights.values()
        sizes = [prod(shape) for shape in weights][: ceil(len(weights) / by.pipe)]
        return self.machine.overhead_seconds(
            by.zero_stage, sizes=sizes, micro_batches=by.accumulation, persistent=by.persistent
        )

    # The passes of one micro-batch.

    def slowest_stage(self) -> tuple[Seconds, Seconds]:
        """Return the forward and backward seconds of a micro-batch, by component, on the slowest
        pipeline stage or the only one.
        """
        parts = self.work.parts
        *layers, loss = parts
        passes = [self.part(layer, is_loss=False) for layer in layers]
        passes.append(self.part(loss, is_loss=True))
        times = [sum(forward.values()) + sum(backward.values()) for forward, backward in passes]

        def total_time(counts: Sequence[float]) -> float:
            return sum(count * time for count, time in zip(counts, times, strict=True))

        repeated = [number for number, part in enumerate(parts) if part.count > 1]
        if self.by.pipe == 1:
            counts = [float(part.count) for part in parts]
        elif repeated:
            counts = max(self.stages(max(repeated)), key=total_time)
        else:
            counts = [part.count / self.by.pipe for part in parts]
        forward_total: Seconds = {}
        backward_total: Seconds = {}
        for count, (forward, backward) in zip(counts, passes, strict=True):
            _add(forward_total, forward, count)
            _add(backward_total, backward, count)
        if self.by.pipe > 1:
            output_bytes = parts[max(repeated, default=0)].output_bytes
            size = self.samples * output_bytes / self.by.sequence
            sends = self.by.interleaving * self.send(size)
            forward_total["pipeline sends"] = sends
            backward_total["pipeline sends"] = sends
        return forward_total, backward_total

    def stages(self, repeated: int) -> Iterator[list[float]]:
        """Yield how often each part is on the last stage, and on a stage in the middle, if weights
        are shared evenly.

        `repeated`: number of the part that is repeated, such as a block; the head comes after it.
        """
        parts = self.work.parts
        pipe = self.by.pipe
        weights = [self.weights(part) for part in parts]
        block = weights[repeated]
        head = sum(weights[repeated + 1 :])
        total = sum(weight * part.count for weight, part in zip(weights, parts, strict=True))
        num_blocks = parts[repeated].count
        on_last = min(max(round((total / pipe - head) / block), 0), num_blocks)
        in_middle = ceil((num_blocks - on_last) / (pipe - 1))

        last_stage = [0.0 for _ in parts]
        last_stage[repeated] = on_last
        for number in range(repeated + 1, len(parts)):
            last_stage[number] = 1.0
        yield last_stage
        middle_stage = [0.0 for _ in parts]
        middle_stage[repeated] = in_middle
        yield middle_stage

    def weights(self, part: LayerWork) -> float:
        """Return the elements that its matrix products take, shared ones included."""
        trained = part.num_params + part.shared_params
        if trained or not self.work.frozen or not self.work.num_tokens:
            return trained
        return part.flops / 2 / self.work.num_tokens  # a part has the sizes of trained ones only

    def products(self, part: LayerWork) -> float:
        """Return the seconds of its matrix products, forward.

        Products without a weight are counted as scores of attention, without masked ones.
        """
        by = self.by
        rates = self.rates
        if not part.flops:
            return 0.0
        weights = self.weights(part)
        most = part.flops - part.masked_flops
        flops: float = most
        if self.work.num_tokens is not None:
            flops = min(2 * self.work.num_tokens * weights, most)
        if not weights:
            flops = 0.0
        plateau = rates.plateau
        attention = rates.attention
        capability = self.machine.device.capability
        if capability is not None and capability >= (9, 0):
            plateau = rates.plateau_hopper
            attention = rates.attention_hopper
        saturation = sqrt(self.fastest / 1e15 * by.tensor / max(weights, 1))
        reached = plateau / (1 + rates.width * saturation)
        work = flops / reached + (most - flops) / attention
        return self.samples * work / by.tensor / by.sequence / self.fastest

    def moved(self, part: LayerWork, *, is_loss: bool) -> float:
        """Return the seconds of its other operations, forward.

        Tensor parallelism splits between its products what it splits of the saved values.
        """
        by = self.by
        if is_loss:
            split = 1.0
        else:
            split = part.split_bytes / max(part.saved_bytes, 1)
        num_bytes = self.samples * part.moved_bytes * (1 - split + split / by.tensor)
        return num_bytes / by.sequence / self.bandwidth

    def part(self, part: LayerWork, *, is_loss: bool) -> tuple[Seconds, Seconds]:
        """Return the forward and backward seconds of one part and one micro-batch, by component."""
        product = self.products(part)
        moved = self.moved(part, is_loss=is_loss)
        least = self.rates.launch_seconds if part.flops else 0.0
        launch = max(least - product - moved, 0.0)
        again = 0.0 if is_loss else self.by.recomputed
        forward = {"compute": product, "memory-bound operations": moved, "launch": launch}
        # Each product has two in the backward pass; of other operations as much is moved as
        # forward.
        backward = {
            "compute": (2 + again) * product,
            "memory-bound operations": (1 + again) * moved,
            "launch": max(least - 2 * product - moved, 0.0) + again * launch,
        }
        if not is_loss and part.count > 1:
            for name, (num_forward, num_backward), seconds in self.exchanges(part):
                forward[name] = num_forward * seconds
                backward[name] = (num_backward + again * num_forward) * seconds
        return forward, backward

    def exchanges(self, part: LayerWork) -> Iterator[tuple[str, tuple[int, int], float]]:
        """Yield the collectives of a block: component, how often in the forward and in the backward
        pass, and seconds of one.

        Ulysses exchanges queries, keys, values and outputs, experts what comes to them and from
        them.
        """
        by = self.by
        output = self.samples * part.output_bytes / by.sequence
        seconds = 0.0
        if by.tensor > 1:
            seconds = self.all_reduce(output, by.tensor, 1)
        yield "tensor parallel", by.block_sums, seconds
        seconds = 0.0
        if by.sequence > 1:
            seconds = self.scatter(output, by.sequence, by.tensor)
        yield "sequence parallel", (4, 4), seconds
        seconds = 0.0
        if by.expert > 1:
            seconds = self.scatter(output, by.expert, by.tensor * by.sequence)
        yield "expert parallel", (2, 2), seconds

    # What a step has beside its passes.

    def gradient_sums(self, backward: float) -> float:
        """Return the seconds of the sums of gradients over the data-parallel ranks, without what
        hides behind the backward pass.

        DeepSpeed's buckets wait for each other: one is sent while the next one fills, and the last
        one in the open.
        """
        by = self.by
        if self.ranks == 1:
            return 0.0
        num_buckets = max(ceil(self.stage_params / by.bucket), 1)
        bucket_bytes = by.gradient_bytes * self.stage_params / num_buckets
        if by.scatters:
            bucket_seconds = self.scatter(bucket_bytes, self.ranks, by.tensor)
        else:
            bucket_seconds = self.all_reduce(bucket_bytes, self.ranks, by.tensor)
        hidden = 0.0
        if by.overlaps:
            computing = self.rates.overlap * backward / num_buckets
            hidden = (num_buckets - 1) * min(bucket_seconds, computing)
        num_sums = by.accumulation if by.zero_stage > 1 else 1
        return num_sums * (num_buckets * bucket_seconds - hidden)

    def weight_gathers(self, forward: float, backward: float) -> float:
        """Return the seconds of the gathers of weights: once a step at stages 1 and 2; at stage 3
        for each pass, ahead of their use.
        """
        by = self.by
        if self.ranks == 1 or not by.zero_stage:
            return 0.0
        gathered = self.held_params if by.zero_stage == 3 else self.stage_params
        num_buckets = max(ceil(gathered / by.bucket), 1)
        bucket_bytes = by.weight_bytes * gathered / num_buckets
        bucket_seconds = self.scatter(bucket_bytes, self.ranks, by.tensor)
        if by.zero_stage < 3:
            return num_buckets * bucket_seconds
        ahead = self.rates.overlap if by.prefetches else 0.0
        seconds = 0.0
        for pass_seconds in (forward, backward)[: self.gathers]:
            hidden = (num_buckets - 1) * min(bucket_seconds, ahead * pass_seconds / num_buckets)
            seconds += num_buckets * bucket_seconds - hidden
        return by.accumulation * seconds

    def host_work(self, forward: float, backward: float) -> float:
        """Return the time of a micro-batch in which the device waits for the host, which handles
        each weight of stage 3.
        """
        by = self.by
        if by.zero_stage < 3 or not by.by_weight:
            return 0.0
        num_weights = len(self.work.weights) + len(self.work.frozen)
        once = self.rates.weight_seconds * num_weights / by.pipe
        return max(once - forward, 0.0) + max((1 + by.recomputed) * once - backward, 0.0)

    @property
    def gathers(self) -> int:
        """Passes of a micro-batch for which stage 3 gathers the weights."""
        return 1 if self.held_params <= self.by.live else 2

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
            return self.stage_params / self.ranks
        return self.stage_params

    def offload_transfers(self, backward: float) -> float:
        """Return the seconds of gradients to the host, beside the backward pass, and of weights on
        their way back.
        """
        by = self.by
        device = self.machine.device
        if not by.is_offloaded and not by.weights_offloaded:
            return 0.0
        link = _needed(device.host_bytes_per_second, "bandwidth to host memory", device)
        weights = by.weight_bytes * self.share / link
        seconds = 0.0
        if by.is_offloaded:
            gradients = by.gradient_bytes * self.share / link
            exposed = max(gradients - self.rates.overlap * backward, 0.0)
            seconds += weights + by.accumulation * exposed
        if by.weights_offloaded:
            seconds += by.accumulation * self.gathers * weights
        return seconds

    def optimizer(self) -> float:
        """Return the seconds of the optimizer's step, which is bound by memory.

        It reads gradients, reads and writes its state and fp32 weights, and writes weights; in half
        precision without ZeRO the host looks at each gradient.
        """
        by = self.by
        device = self.machine.device
        moved = self.share * (2 * by.state_bytes + 4 + 2 * by.gradient_bytes + by.weight_bytes)
        if by.is_offloaded:
            host = device.host_memory_bytes_per_second
            host = _needed(host, "memory bandwidth of the host", device)
            return moved * self.machine.devices_per_host / host / self.rates.memory
        if by.joins_gradients:
            moved += self.share * self.rates.joined_bytes
        seconds = moved / self.bandwidth
        if by.halves_alone:
            seconds += self.rates.half_weight_seconds * len(self.work.weights)
        return seconds

    # Collectives.

    def all_reduce(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a sum of `size` bytes over ranks that lie `stride` apart, in a ring
        or in a tree.
        """
        inside, hosts = self.placed(ranks, stride)
        ring = 2 * self.ring_latency(ranks, hosts)
        tree = 2 * ((inside - 1) * _LINK_SECONDS + log2(hosts) * self.hop)
        latency = _START_SECONDS + min(ring, tree)
        if hosts == 1 and self.machine.all_reduce_latency_seconds is not None:
            latency = self.machine.all_reduce_latency_seconds
        return latency + 2 * (ranks - 1) / ranks * size / self.ring_bandwidth(inside, hosts)

    def scatter(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a gather, a scattered sum or an exchange of `size` bytes, in all,
        over ranks.
        """
        inside, hosts = self.placed(ranks, stride)
        sent = (ranks - 1) / ranks * size / self.ring_bandwidth(inside, hosts)
        return self.start + self.ring_latency(ranks, hosts) + sent

    def ring_latency(self, ranks: int, hosts: int) -> float:
        """Return the seconds of all steps of a ring without their bytes."""
        hops = hosts if hosts > 1 else 0
        return (ranks - hosts) * _LINK_SECONDS + hops * self.hop

    def send(self, size: float) -> float:
        """Return the seconds of a transfer to the next pipeline stage.

        Tensor-parallel ranks send a part each, and gather them (DeepSpeed's `pipe_partitioned`, on
        by default).
        """
        tensor = self.by.tensor
        inside, hosts = self.placed(2, self.ranks * tensor)
        hop = self.hop if hosts > 1 else 0.0
        gathered = 0.0
        if tensor > 1:
            gathered = self.scatter(size, tensor, 1)
        sent = size / tensor / self.ring_bandwidth(inside, hosts)
        return self.start + hop + sent + gathered

    def placed(self, ranks: int, stride: int) -> tuple[int, int]:
        """Return the members of a group on one host, and its hosts: tensor ranks are neighbours,
        then sequence, data, pipe.
        """
        inside = min(ranks, max(self.machine.devices_per_host // stride, 1))
        return inside, ceil(ranks / inside)

    @property
    def start(self) -> float:
        """Seconds before the first byte of a collective."""
        return self.machine.all_reduce_latency_seconds or _START_SECONDS

    @property
    def hop(self) -> float:
        """Seconds of a hop between hosts."""
        network = self.machine.network
        return network.latency_seconds if network else 0.0

    def ring_bandwidth(self, inside: int, hosts: int) -> float:
        """Return the bytes per second of a ring: of the links within a host, or of the network of
        all its members on a host.
        """
        device = self.machine.device
        network = self.machine.network
        links = device.collective_bytes_per_second or device.link_bytes_per_second
        if inside > 1:
            links = _needed(links, "bandwidth between devices", device)
        if hosts == 1:
            return links or 0.0
        per_device = network.bytes_per_second if network else None
        between = _needed(per_device, "network between hosts", device)
        across = self.rates.network * between * inside
        if inside == 1:
            return across
        return min(across, links or across)


# NCCL's tuning.cc: start of a ring, and a step over NVLink, both with the protocol of large
# messages.
_START_SECONDS: Final = 8.4e-6
_LINK_SECONDS: Final = 3.4e-6


def _add(total: Seconds, seconds: Seconds, count: float) -> None:
    """Add seconds that are there `count` times to a total, by component."""
    for name, value in seconds.items():
        total[name] = total.get(name, 0.0) + count * value


def _needed(figure: float | None, what: str, device: Device) -> float:
    """Return a figure of a device; raises NotEstimatedError if it is not known."""
    if figure is None:
        raise NotEstimatedError(f"the {what} of {device.name} is not known")
    return figure


def flops_per_step(
    plan: Plan, work: ModelWork | None, peaks: Mapping[str, float]
) -> dict[str, float]:
    """Return the floating-point operations of one step, on one device on average, by the metric
    that is their rate.

    Model operations: matrix products, convolutions and attention in the forward pass, and twice as
    many in the backward pass (Chowdhery et al. 2022, PaLM, appendix B); what is computed again is
    not counted; a multiplication with an addition is two. Utilisation is their share of the
    device's peak; with what is computed again it is the utilisation of the hardware.

    Args:
        plan: of the run.
        work: of its model on one micro-batch; None if it is not known.
        peaks: of the device, type of numbers -> operations per second; empty if it is not known.

    Returns:
        ``throughput/tflops`` if the work is known; ``throughput/mfu`` if the peak is known as well;
        with recomputation ``throughput/hfu``. None of them is guessed.
    """
    if work is None or not work.flops:
        return {}
    by = Parallelism.from_plan(plan)
    forward = work.flops * by.accumulation * by.data / by.num_devices
    amounts = {"throughput/tflops": 3 * forward / 1e12}
    peak = peaks.get(by.dtype)
    if peak:
        amounts["throughput/mfu"] = 3 * forward / peak
        if by.recomputed:  # the loss belongs to no layer, and is kept
            again = by.recomputed * (1 - work.parts[-1].flops / work.flops)
            amounts["throughput/hfu"] = (3 + again) * forward / peak
    return amounts
