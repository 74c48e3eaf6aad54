"""Memory of the fullest rank at five moments of a run, by component: estimated from the config
alone, without torch.

What DeepSpeed 0.19.8 allocates was read in `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`partition_parameters.py`, `runtime/fp16/unfused_optimizer.py` and our `engine/gradient_sums.py`,
and is held against the bytes of all live tensors by `tests/plan/test_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import Any, Final

from framework.config.base import Object, Target
from framework.config.freezing import always_frozen
from framework.config.groups import group_values, has_groups, in_order, stepped_by_muon
from framework.config.optimizer import (
    SGD,
    Adafactor,
    Adagrad,
    AdamW,
    Lamb,
    Lion,
    Muon,
    OptimizerSection,
)
from framework.config.precision import BF16, FP16
from framework.config.run_config import RunConfig
from framework.config.training import Parallel
from framework.errors import Problem
from framework.plan.activations import Moment, Passes, passes_over
from framework.plan.balance import Bounds, LayerFacts, cut, needs_same_groups
from framework.plan.measured import OptimizerState, kept_state
from framework.plan.offload import Shares
from framework.plan.operations import Shape
from framework.plan.plan import Plan
from framework.plan.rules.devices import sums_of
from framework.plan.work import LayerWork, ModelWork, weights_alone, work_of, work_of_rank

Bytes = Mapping[str, int]
_FP32: Final = 4
_EXPERTS: Final = ".experts."
# Elements of the buckets of `engine/gradient_sums.py`.
_STAGE_0_BUCKET: Final = 25 * 2**20 // 4
# The same of DeepSpeed's pipeline (`MEMORY_OPT_ALLREDUCE_SIZE`).
_PIPELINE_BUCKET: Final = 500_000_000
# Keys of `deepspeed.zero_optimization` that a run config cannot set, and that allocate nothing.
_HARMLESS: Final = frozenset(
    {"log_trace_cache_warnings", "ignore_unused_parameters", "legacy_stage1"}
)


class NotEstimatedError(Exception):
    """Reason why the memory of a plan is not known."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of the fullest rank, by component.

    Attributes:
        moments: moment -> component -> bytes on the device. ``start``: after
            `deepspeed.initialize`; ``between``: between two steps; ``forward``, ``backward``,
            ``step``: at the fullest within.
        host: component -> bytes of host memory that offloading takes, and a save in the background.
        drive: component -> bytes on an NVMe drive.
        saved_bytes: bytes of a checkpoint, the files of all ranks together.
        num_params: trained elements of the model; of a pipeline those of the fullest stage, with
            tensor parallelism those of a rank.
        lacks: why activations are not counted; empty where they are.
        stage: the pipeline stage that is the fullest; None without a pipeline.
        beside: component -> bytes of the device that no tensor holds (`beside_tensors`), where they
            are asked for.
    """

    moments: Mapping[str, Bytes]
    host: Bytes
    drive: Bytes
    saved_bytes: int
    num_params: int
    lacks: str = ""
    stage: int | None = None
    beside: Bytes = field(default_factory=dict)

    def total(self, moment: str) -> int:
        """Bytes on the device at one moment."""
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        """The fullest moment."""
        return max(self.moments, key=self.total)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain values, as written to ``plan.json``."""
        totals = {moment: self.total(moment) for moment in self.moments}
        return {
            "is_estimate": True,
            **({"without_activations": self.lacks} if self.lacks else {}),
            **({} if self.stage is None else {"stage": self.stage}),
            "num_params": self.num_params,
            "peak": self.peak,
            "total_bytes": totals,
            "bytes": {moment: dict(found) for moment, found in self.moments.items()},
            **({"beside_tensors_bytes": dict(self.beside)} if self.beside else {}),
            "host_bytes": dict(self.host),
            **({"drive_bytes": dict(self.drive)} if self.drive else {}),
            "checkpoint_bytes": self.saved_bytes,
        }


def estimate(plan: Plan, *, work: ModelWork | None = None) -> Memory:
    """Estimate the memory of a plan's fullest rank.

    Args:
        plan: what will happen. Where it names no kind of device, GPUs are meant.
        work: of the model on one micro-batch; left out: as the named model has it.

    Raises:
        NotEstimatedError: the plan has something that is not modelled.
    """
    _refuse_unknown(plan)
    config = plan.config
    layout = plan.layout
    lacks = ""
    is_shared = layout.tensor_size * layout.sequence_size > 1
    if is_shared:
        found = work_of_rank(plan)
    else:
        found = work or work_of(plan)
    if found is None and is_shared:
        raise NotEstimatedError("a model of your own is shared by tensor or sequence parallelism")
    if found is None:
        found = weights_alone(
            config.model, always_frozen(config.training.freeze), config.training.lora
        )
        lacks = "the size of the images is not known"
    if found is None:
        raise NotEstimatedError("the model is one of your own")
    work = found
    if layout.pipe_size > 1:
        stages = stage_memories(plan, work)
        saved_bytes = sum(stage.saved_bytes for stage in stages)
        return replace(
            max(stages, key=lambda stage: stage.total(stage.peak)),
            lacks=lacks,
            saved_bytes=saved_bytes,
        )
    *layers, loss = work.layers()
    passes = passes_over(layers, loss, recompute_every=config.training.recompute_every)
    own = _of_rank(work, plan)
    memory = _Estimate(plan, own, passes, elsewhere=work.num_params - own.num_params).memory()
    return replace(memory, lacks=lacks, num_params=work.num_params)


def _of_rank(work: ModelWork, plan: Plan) -> ModelWork:
    """The weights that a rank holds where experts are divided: as many as any other."""
    size = plan.layout.expert_size
    if size == 1:
        return work
    count = plan.config.model.moe.num_experts // size  # type: ignore[union-attr]  # a rule has seen to it

    def is_own(name: str) -> bool:
        return _EXPERTS not in name or int(name.partition(_EXPERTS)[2].partition(".")[0]) < count

    return replace(
        work, weights={name: shape for name, shape in work.weights.items() if is_own(name)}
    )


def stage_memories(plan: Plan, work: ModelWork) -> list[Memory]:
    """Estimate the memory of a rank of each pipeline stage; errors as of `estimate`."""
    config, parallel = plan.config, plan.config.parallel
    if not work.parts[1:] or (parallel.partition.startswith("type:") and parallel.stages is None):
        raise NotEstimatedError("the layers of the stages are not known")
    *layers, loss = work.layers()
    if parallel.stages is None:
        stages = None
    else:
        stages = tuple(parallel.stages)
    same_groups = needs_same_groups(config)
    bounds = _bounds(work.facts, parallel.pipe, parallel.partition, stages, same_groups)
    if isinstance(bounds, Problem):
        raise NotEstimatedError(bounds.reason)
    found = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        own = layers[start:stop]
        is_last = stop == len(layers)
        passes = passes_over(
            own, loss if is_last else None, recompute_every=config.training.recompute_every
        )
        received = layers[start - 1].output_bytes if start else 0
        sent = layers[stop - 1].output_bytes
        names = {layer.name for layer in own}
        shared = sum(layer.shared_params for layer in own if layer.shares not in names)
        stage = _Stage(
            min(parallel.pipe - number, plan.layout.accumulation_steps),
            received,
            sent,
            is_last,
            shared,
        )
        memory = _Estimate(plan, _of_layers(work, own), passes, stage).memory()
        found.append(replace(memory, stage=number))
    return found


# a search asks for the same cut with every stage of ZeRO and every micro-batch
@lru_cache(maxsize=256)
def _bounds(
    facts: tuple[LayerFacts, ...],
    pipe: int,
    partition: str,
    stages: tuple[int, ...] | None,
    same_groups: bool,
) -> Bounds | Problem:
    parallel = Parallel(
        pipe=pipe, partition=partition, stages=None if stages is None else list(stages)
    )
    table = cut(facts, parallel, same_groups=same_groups)
    if isinstance(table, Problem):
        return table
    return table.bounds


def _of_layers(work: ModelWork, layers: Sequence[LayerWork]) -> ModelWork:
    """The weights of some layers, and their part of the buffers."""
    names = sorted(
        {name for layer in layers for name in work.names_of(layer)}, key=work.places.__getitem__
    )
    trained, frozen = (
        {name: weights[name] for name in names if name in weights}
        for weights in (work.weights, work.frozen)
    )
    own = sum(map(prod, trained.values()))
    whole = work.num_params
    return replace(
        work, weights=trained, frozen=frozen, buffer_bytes=work.buffer_bytes * own // whole
    )


@dataclass(frozen=True)
class _Stage:
    """What a pipeline adds (DeepSpeed's `runtime/pipe/engine.py`): micro-batches in flight, and
    bytes of what a stage receives and sends for each; `shared`: elements of weights that an earlier
    stage has too.
    """

    in_flight: int
    received: int
    sent: int
    is_last: bool
    shared: int = 0

    def buffers(self, micro_batches: int) -> int:
        """Bytes that stay: what values and gradients are received in, and in the last stage's two
        slots its outputs, whose graph holds what came in and its gradient.
        """
        if self.is_last:
            slots = min(2, micro_batches) * (self.sent + 2 * self.received)
        else:
            slots = self.sent
        return self.received + slots

    @property
    def passing(self) -> int:
        """Bytes of inputs, and of outputs that wait for their gradients."""
        return self.in_flight * (self.received + (0 if self.is_last else self.sent))


def _refuse_unknown(plan: Plan) -> None:
    config, passed = plan.config, plan.config.deepspeed
    zero = passed.get("zero_optimization", {})
    reasons = {
        "deepspeed": bool(
            passed.keys()
            - {"zero_optimization", "zero_allow_untested_optimizer", "gradient_clipping"}
        )
        or not isinstance(zero, Mapping)
        or bool(zero.keys() - _HARMLESS),
        "optimizer: its state is not measured": _state_of(config.optimizer, {}) is None,
    }
    found = [name for name, is_unknown in reasons.items() if is_unknown]
    if found:
        raise NotEstimatedError(f"not modelled with {', '.join(found)}")


class _Estimate:
    """Sizes that the components follow from. Elements are numbers of a weight, `ranks` hold the
    same weights.
    """

    def __init__(
        self,
        plan: Plan,
        work: ModelWork,
        passes: Passes,
        stage: _Stage | None = None,
        elsewhere: int = 0,
    ) -> None:
        """Take what a rank has; `elsewhere`: elements of experts on other ranks, which the model's
        file has too.
        """
        config = plan.config
        self.elsewhere = elsewhere
        self.config = config
        self.passes = passes
        self.buffers = work.buffer_bytes
        self.pipeline = stage
        self.ranks = plan.layout.num_replicas
        self.steps = plan.layout.accumulation_steps
        self.tensor_size = plan.layout.tensor_size
        self.zero: dict[str, Any] = config.zero.model_dump()
        self.stage = config.zero.stage
        self.overlaps = self.zero["overlap_comm"] is True
        self.is_offloaded = self.stage > 0 and self.zero["offload_optimizer"]["device"] != "none"
        self.keeps_weights = self.stage < 3 or self.zero["offload_param"]["device"] == "none"
        self.is_half = isinstance(config.precision, BF16 | FP16)
        self.width = 2 if self.is_half else _FP32
        accumulation, reduction = sums_of(config, plan.layout)
        self.sum_width = _FP32 if accumulation else self.width
        self.reduce_width = _FP32 if reduction else self.width
        state = _state_of(config.optimizer, work.weights)
        assert state is not None  # refused before
        self.moment_bytes = state.bytes_per_element
        self.weights_of = work.weights
        # Experts that are divided have groups of their own, over the ranks that hold the same ones.
        kinds: dict[int, dict[str, Shape]] = {}
        for name, shape in work.weights.items():
            over = self.ranks // (plan.layout.expert_size if _EXPERTS in name else 1)
            kinds.setdefault(over, {})[name] = shape
        found = [
            (group, over) for over, shapes in kinds.items() for group in _groups(shapes, config)
        ]
        self.groups = [group for group, _ in found]
        self.over = [over for _, over in found]
        self.sizes = [size for group in self.groups for size in group]
        self.total, self.largest = sum(self.sizes), max(self.sizes)
        # DeepSpeed pads each group to a multiple of 2 x ranks at stages 1 and 2, each weight to one
        # of ranks at 3.
        even = [
            ceil(sum(group) / (2 * over)) * 2
            for group, over in zip(self.groups, self.over, strict=True)
        ]
        self.padded = sum(part * over for part, over in zip(even, self.over, strict=True))
        self.share = {0: self.total, 3: sum(ceil(size / self.ranks) for size in self.sizes)}.get(
            self.stage, sum(even)
        )
        # What the optimizer steps at once.
        self.parts = {0: self.sizes, 3: list(self.sub_groups())}.get(self.stage, even)
        self.largest_share = max(self.parts)
        self.is_cpu = plan.cluster.device == "cpu"
        # Of what is not trained there are weights only, at stage 3 spread as the others.
        self.frozen = [prod(shape) for shape in work.frozen.values()]
        self.held = [*self.sizes, *self.frozen]

    def memory(self) -> Memory:
        if isinstance(self.config.optimizer, Adagrad):
            made_at_once = self.optimizer_state()
        else:
            made_at_once = {}
        start = self.weights() | self.buckets() | made_at_once
        if self.pipeline is None:
            stays = {}
        else:
            stays = {"pipeline buffers": self.pipeline.buffers(self.steps)}
        states = start | self.optimizer_state() | stays
        between = states | self.persistent()
        between = {
            name: between[name] for name in sorted(between, key=between.__getitem__, reverse=True)
        }
        if self.steps > (1 if self.pipeline is None else self.pipeline.in_flight):
            kept = self.kept_gradients()
        else:
            kept = {}
        moments = {
            "start": start | self.persistent(),
            "between": between,
            "forward": between | kept | self.forward(),
            "backward": self.backward(between, kept),
            "step": self.step(states),  # for which stage 3 lets go of small weights too
        }
        moments = {name: _positive(each) for name, each in moments.items()}
        shares = self.shares()
        host, (model, own, _) = (
            shares.host(is_staged=self.config.checkpoint.mode == "async"),
            shares.saved(),
        )
        drive = _positive(shares.drive())
        saved_bytes = self.tensor_size * (model + self.ranks * own)
        return Memory(moments, _positive(host), drive, saved_bytes, self.total)

    def shares(self) -> Shares:
        """The rank's shares, of which some are elsewhere than on its device."""
        groups = [[ceil(size / self.ranks) for size in group] for group in self.groups]
        return Shares(
            stage=self.stage,
            ranks=self.ranks,
            zero=self.zero,
            width=self.width,
            sum_width=self.sum_width,
            has_copies=self.is_half or self.stage > 0,
            state_bytes=self.moment_bytes + _FP32 * (self.config.training.ema is not None),
            copies=self.step_copies() * self.largest_share,
            groups=groups if self.stage == 3 else [[part] for part in self.parts],
            parts=self.parts,
            weights=self.sizes,
            touched=max(self.touched()) if self.stage in (1, 2) else 0,
            frozen=self.frozen,
            saves_frozen=self.config.training.lora is None,
            shared=0 if self.pipeline is None else self.pipeline.shared,
            buffers=self.buffers + self.width * self.elsewhere,
            pins=not self.is_cpu,
            accumulates=self.steps > 1,
        )

    def sub_groups(self) -> Iterator[int]:
        """Elements of a rank's parts that stage 3 steps one after the other."""
        for group in self.groups:
            size = 0
            for share in (ceil(size / self.ranks) for size in group):
                size += share
                if size >= self.zero["sub_group_size"]:
                    yield size
                    size = 0
            if size:
                yield size

    def weights(self) -> dict[str, int]:
        """Weights and their fp32 copies; ZeRO copies fp32 weights too."""
        has_copies = self.is_half or self.stage
        frozen = sum(ceil(size / self.ranks) if self.stage == 3 else size for size in self.frozen)
        own = {3: self.share, 0: self.total}.get(self.stage, self.padded)
        found = {"weights": self.width * (own + frozen) * self.keeps_weights + self.buffers}
        if has_copies and not self.is_offloaded:
            found["fp32 weights"] = _FP32 * self.share
        return found

    def optimizer_state(self) -> dict[str, int]:
        average = _FP32 if self.config.training.ema is not None else 0
        # Adagrad makes its state where it is built, for the weights before ZeRO replaced them.
        is_twice = isinstance(self.config.optimizer, Adagrad) and self.stage in (1, 2)
        unused = self.width * self.total if is_twice else 0
        state = int(self.moment_bytes * self.share) + unused
        found = {"optimizer state": state, "weight average": average * self.share}
        return {} if self.is_offloaded else found

    def buckets(self) -> dict[str, int]:
        """Buffers that stay: at stage 3 gradients of its own part and one bucket, as large as
        configured.
        """
        found = {}
        if self.stage == 3:
            found["gradient buffer"] = 0 if self.is_offloaded else self.sum_width * self.share
            found["reduce bucket"] = self.width * self.zero["reduce_bucket_size"]
        elif self.is_offloaded:
            found["copy buffer"] = self.width * self.largest
        return found

    def persistent(self) -> dict[str, int]:
        """Small weights that stay whole at stage 3."""
        if self.stage < 3 or self.ranks == 1:
            return {}
        threshold = self.zero["stage3_param_persistence_threshold"]
        return {"small weights": self.width * sum(size for size in self.held if size <= threshold)}

    def kept_gradients(self) -> dict[str, int]:
        """Gradients that wait for the next micro-batch."""
        if self.stage == 3:
            return {}
        if self.stage == 2:
            if self.sum_width > self.width:
                own = self.share
            else:
                own = max(self.touched())
            return {"gradients": 0 if self.is_offloaded else self.sum_width * own}
        found = {"gradients": self.sum_width * self.total}
        return found | (
            {"reduce bucket": self.bucket} if self.stage and self.pipeline is None else {}
        )

    @property
    def bucket(self) -> int:
        """Bytes of the buckets of stages 1 and 2, however small the model is; two where sums
        overlap.
        """
        return (1 + self.overlaps) * self.sum_width * int(self.zero["reduce_bucket_size"])

    def touched(self, groups: int | None = None) -> list[int]:
        """For each rank the elements of the weights that have a part in its share: their gradients
        stay whole. `groups`: of the first ones alone.
        """
        totals = [0] * (self.ranks + 1)
        for group, over in [*zip(self.groups, self.over, strict=True)][:groups]:
            part = ceil(sum(group) / (2 * over)) * 2
            alike = self.ranks // over
            for size, end in zip(group, accumulate(group), strict=True):
                totals[(end - size) // part * alike] += size
                totals[((end - 1) // part + 1) * alike] -= size
        return list(accumulate(totals[:-1]))

    @property
    def spread(self) -> list[int]:
        """Elements of each weight that is gathered at stage 3."""
        return [
            size for size in self.held if size > self.zero["stage3_param_persistence_threshold"]
        ]

    def gathered(self, *, forward: bool) -> dict[str, int]:
        """Weights of other ranks at stage 3: they stay up to `stage3_max_live_parameters`, beside
        what is fetched.
        """
        if self.stage < 3 or self.ranks == 1:
            return {}
        live, spread, whole = self.zero["stage3_max_live_parameters"], self.spread, sum(self.spread)
        largest = max(spread, default=0)
        ahead = min(self.zero["stage3_prefetch_bucket_size"], live)
        stays = live if ahead or live >= whole else 0
        elements = min(whole, stays + ahead + 2 * largest)
        if forward:  # several weights are gathered into one buffer, and copied out of it
            if len(spread) > 1:
                copies = min(whole, ahead + largest)
            else:
                copies = 0
            elements = min(whole, max(stays or min(live, 2 * largest), largest)) + copies
        return {"gathered weights": self.width * elements}

    def forward(self) -> dict[str, int]:
        """Values and gathered weights at the fullest moment of the forward pass."""
        most = self.values(
            max(self.passes.forward, key=lambda moment: moment.activations + moment.loss)
        )
        found = self.gathered(forward=True) | most
        whole = self.width * sum(self.spread)
        if found.get("gathered weights", 0) <= whole:
            return found
        # The buffer that they are fetched into is gone when the last of them was copied out of it,
        # before the loss.
        before = [moment.activations for moment in self.passes.forward if not moment.loss]
        copying = found | self.values(Moment(max(before, default=0)))
        return max(copying, most | {"gathered weights": whole}, key=lambda each: sum(each.values()))

    def values(self, moment: Moment) -> dict[str, int]:
        """Values at one moment, with those of the other micro-batches in flight."""
        found = {"activations": moment.activations, "logits and loss": moment.loss}
        stage = self.pipeline
        if stage is not None:
            found["activations"] += (stage.in_flight - 1) * self.passes.kept_bytes
            found["pipeline buffers"] = stage.buffers(self.steps) + stage.passing
        return found

    def backward(self, between: Bytes, kept: Bytes) -> Bytes:
        """The fullest of its moments: of its beginning, with all activations, of those where some
        have gone and the gradients of later layers are there, and of the sums of gradients, when
        all activations are gone.
        """
        gathered = self.gathered(forward=False)
        begin = dict(between) | dict(kept) | gathered
        if 0 < self.stage < 3 and self.pipeline is None:
            begin["reduce bucket"] = self.bucket
        if self.stage == 3:
            summed = dict(between) | gathered
            waiting = _FP32 * self.shares().unswapped_gradients
            summed["gradients"] = self.reduced_with(gathered.get("gathered weights", 0)) + waiting
        else:
            summed = dict(between) | self.summed_gradients(dict(kept))
        first = begin.get("gradients", 0)
        room = max(summed.get("gradients", 0) - first, 0)

        def added(moment: Moment) -> int:
            """Gradients of this backward pass: below stage 2 each stays; at 2 they lie in the
            bucket up to the first sum, which makes room for all of the rank's share, and later are
            there twice.
            """
            bucket = self.zero["reduce_bucket_size"]
            filled = moment.gradients - moment.waiting
            if self.stage == 2 and filled <= bucket:
                has_room = (
                    filled + moment.own > bucket
                    and not self.is_offloaded
                    and self.sum_width == self.width
                )
                return self.width * (moment.waiting + (max(self.touched()) if has_room else 0))
            if self.stage == 2:
                return room
            made = moment.gradients + moment.beside
            return min(room, (self.sum_width if self.stage else self.reduce_width) * made)

        most = max(
            self.passes.backward,
            key=lambda moment: moment.activations + moment.loss + added(moment),
        )
        begin["gradients"] = first + added(most)
        begin |= self.values(most)
        return max(begin, summed, key=lambda each: sum(each.values()))

    @property
    def flight(self) -> int:
        """Elements whose gradients are reduced at once: a bucket, or a weight that is larger."""
        bucket: int = self.zero["reduce_bucket_size"]
        return min(max(bucket, self.largest), self.total)

    def reduced_with(self, gathered: int) -> int:
        """Bytes of gradients at stage 3, beside weights that are whole: of a bucket that fills and
        of one more weight, or of a full one and its copy, or of the first weight, when the others
        are gone.
        """
        bucket: int = self.zero["reduce_bucket_size"]
        filling = min(self.flight + min(self.largest, bucket), self.total)
        if self.sizes[0] > bucket:
            first = (3 if self.ranks > 1 else 2) * self.sizes[0]
        else:
            first = 0
        return max(self.width * filling, self.width * max(2 * self.flight, first) - gathered)

    def summed_gradients(self, kept: Bytes) -> dict[str, int]:
        """Gradients, their copies and buckets below stage 3."""
        bucket = self.zero["reduce_bucket_size"]
        flight = self.flight
        width = self.sum_width
        if self.stage == 0:
            bucket = _STAGE_0_BUCKET if self.pipeline is None else _PIPELINE_BUCKET
            sent = min(max(bucket, self.largest), self.total)
            found = {"gradients": self.reduce_width * self.total}
            return found | (
                {"reduce bucket": self.width * sent} if self.ranks > 1 or self.pipeline else {}
            )
        if self.is_offloaded:
            own = 0
        else:
            own = max(self.touched())
        if self.stage == 1 and not (self.overlaps and self.steps == 1):
            copied = flight if width > self.width else 0
            return {
                "gradients": width * (self.total + max(own - bucket, 0) + copied),
                "reduce bucket": self.bucket,
            }
        # What is reduced is there twice; where weights are larger than a bucket their gradients
        # stay beside the copy.
        if self.largest > bucket:
            reduced = 2 * flight
        else:
            reduced = min(2 * flight, self.total)
        reduced += flight if self.is_offloaded else 0  # on its way to the host
        if width > self.width:  # summed into the rank's own share, which is kept
            gradients = width * self.share + self.width * reduced
        else:
            left = 2 * self.total if self.overlaps else self.total
            gradients = kept.get("gradients", 0) + width * (own * (left - flight) // left + reduced)
        return {"gradients": gradients, "reduce bucket": self.bucket}

    def step(self, states: Bytes) -> Bytes:
        """What the optimizer computes with: gradients in fp32 and its own copies."""
        share = self.largest_share
        copies = self.step_copies()
        found = dict(states)
        if self.is_offloaded:
            waiting = _FP32 * self.shares().unswapped_gradients
            return found | ({"gradients": waiting} if waiting else {})
        if self.stage == 0:
            found["gradients"] = self.stepped_gradients()
            found["optimizer copies"] = copies * (share if self.is_cpu else self.total)
            optimizer = self.config.optimizer
            if isinstance(optimizer, Muon):
                found["optimizer copies"] = self.muon_copies(optimizer)
            return found
        if self.stage < 3:
            own = max(self.touched())
        else:
            own = 0
        # DeepSpeed lets go of gradients that it has copied, but not of those of an earlier group.
        if self.stage < 3:
            stays = self.sum_width * max(self.touched(-1))
        else:
            stays = 0
        if self.stage == 1 and self.steps > 1 and self.sum_width == _FP32:
            own = self.total
        flat = self.sum_width * share
        single = _FP32 * share if self.sum_width < _FP32 else 0
        copied = self.sum_width * own + flat + single
        # of one weight alone nothing is copied: it stays whole
        if self.stage < 3 and self.largest > share:
            flat = self.sum_width * self.largest
        stepped = stays + (single or flat) + copies * share
        found["gradients"] = max(copied, stepped - copies * share)
        found["optimizer copies"] = max(stepped - found["gradients"], 0)
        return found

    def muon_copies(self, muon: Muon) -> int:
        """Bytes of copies of a matrix in fp32 and twice in bf16, with two of its products with
        itself; of the other weights as AdamW.
        """
        weights = self.weights_of.items()
        rest = [
            prod(shape) for name, shape in weights if not stepped_by_muon(name, shape, muon)
        ] or [0]
        own = [
            8 * prod(shape) + 4 * min(shape) ** 2
            for name, shape in weights
            if stepped_by_muon(name, shape, muon)
        ]
        return max(*own, 2 * _FP32 * max(rest) if self.is_cpu else _FP32 * sum(rest))

    def stepped_gradients(self) -> int:
        """Bytes of gradients in a step without ZeRO: in half precision with fp32 copies, as
        FP16_UnfusedOptimizer makes them, or FP16_Optimizer for DeepSpeed's fused Adam: group by
        group, first apart and then joined; for Lamb joined as they are.
        """
        optimizer = self.config.optimizer
        if not self.is_half:
            return self.width * self.total
        if isinstance(optimizer, Lamb):
            return 2 * self.width * self.total
        if getattr(optimizer, "implementation", "") != "deepspeed":
            return (self.width + _FP32) * self.total
        sizes = [sum(group) for group in self.groups]
        joined = accumulate(sizes, initial=0)
        return max(
            self.width * (self.total - before) + _FP32 * before + 2 * _FP32 * size
            for size, before in zip(sizes, joined, strict=False)
        )

    def step_copies(self) -> int:
        """Bytes that the optimizer takes for each element that it steps at once. torch's loop over
        weights, on CPU, holds two copies of one weight, its `foreach` form, on GPUs, one of all;
        fused kernels none.
        """
        optimizer = self.config.optimizer
        if isinstance(optimizer, Target):
            state = kept_state(optimizer)
            if state:
                return state.copies_per_element
            return 0
        if _is_fused(optimizer):
            return 0
        decayed = 0
        if type(optimizer) not in (
            AdamW,
            Adafactor,
        ):  # Adam, which derives from AdamW, adds decay to gradients
            decay = optimizer.weight_decay  # type: ignore[union-attr]
            if decay:
                decayed = _FP32
        if isinstance(optimizer, SGD):
            return decayed
        return decayed + _FP32 * (
            2 if (self.is_cpu or self.is_offloaded) and isinstance(optimizer, AdamW) else 1
        )


def _state_of(optimizer: OptimizerSection, shapes: Mapping[str, Shape]) -> OptimizerState | None:
    """State of the optimizer for an element, of these weights in the mean; None where it is the
    user's own and not measured.
    """
    if isinstance(optimizer, Target | Object):
        if isinstance(optimizer, Target):
            return kept_state(optimizer)
        return None
    if isinstance(optimizer, SGD):
        return OptimizerState(_FP32 if optimizer.momentum else 0)
    if isinstance(optimizer, Muon | Adafactor) and shapes:
        numbers = sum(_state_numbers(name, shape, optimizer) for name, shape in shapes.items())
        return OptimizerState(_FP32 * numbers / sum(map(prod, shapes.values())))
    return OptimizerState(_FP32 if isinstance(optimizer, Adagrad | Lion) else 2 * _FP32)


def _state_numbers(name: str, shape: Shape, optimizer: Muon | Adafactor) -> int:
    """Numbers that it keeps of a weight: Adafactor of a matrix the means of rows and of columns."""
    if isinstance(optimizer, Muon):
        return prod(shape) * (1 if stepped_by_muon(name, shape, optimizer) else 2)
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def _is_fused(optimizer: object) -> bool:
    return (
        isinstance(optimizer, Lion | Lamb)
        or getattr(optimizer, "implementation", "torch") != "torch"
    )


def _positive(found: Bytes) -> Bytes:
    return {name: size for name, size in found.items() if size}


def _groups(shapes: Mapping[str, Shape], config: RunConfig) -> list[list[int]]:
    """The optimizer's parameter groups: elements of each weight, in order."""
    if not has_groups(config.optimizer):
        return [[prod(shape) for shape in shapes.values()]]
    values = group_values(shapes, config.optimizer)
    return [
        [prod(shape) for name, shape in shapes.items() if values[name] == each]
        for each in in_order(values.values())
    ]
