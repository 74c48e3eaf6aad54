"""Bytes of one rank on its device at five moments of a run, derived quantity by quantity from a
plan and the rank's weights.

What DeepSpeed 0.19.8 allocates was read in `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`partition_parameters.py`, `runtime/fp16/unfused_optimizer.py` and our `engine/gradient_sums.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, prod
from typing import Final

from framework.config.optimizer import (
    Adafactor,
    Adagrad,
    AdamW8bit,
    Lamb,
    Lion,
    Muon,
    ScheduleFree,
    has_groups,
)
from framework.config.precision import BF16, FP16, state_widths
from framework.config.run_config import RunConfig
from framework.config.zero import OptimizerToCPU
from framework.plan.activations import Moment, Passes
from framework.plan.flat_sums import may_sum_flat, most_in_message, waits
from framework.plan.offload import Shares, name_of_copies
from framework.plan.operations import Shape
from framework.plan.optimizer_memory import (
    bytes_of_blocks,
    compared_bytes,
    muon_copies,
    muon_share_copies,
    state_of,
    step_bytes_per_element,
)
from framework.plan.plan import Plan
from framework.plan.rules.devices import sums_of
from framework.plan.work import ModelWork

Bytes = Mapping[str, int]
EXPERTS: Final = ".experts."
"""Part of the names of all weights of experts."""
_FP32: Final = 4
# Bytes of each number of a layer that is put into few bits: gathered, in fp32, what bits are left.
_QUANTIZED_AT_ONCE: Final = 15
# Elements of the buckets of `engine/gradient_sums.py`.
_STAGE_0_BUCKET: Final = 25 * 2**20 // 4
# The same of DeepSpeed's pipeline (`MEMORY_OPT_ALLREDUCE_SIZE`).
_PIPELINE_BUCKET: Final = 500_000_000


@dataclass(frozen=True)
class PipelineStage:
    """What a pipeline adds to a rank (DeepSpeed's `runtime/pipe/engine.py`).

    Attributes:
        in_flight: micro-batches that have their values held at once.
        received: bytes that the stage receives for each micro-batch.
        sent: bytes that it sends for each.
        is_last: whether the loss is on this stage.
        shared: elements of weights that an earlier stage has too.
    """

    in_flight: int
    received: int
    sent: int
    is_last: bool
    shared: int = 0

    def buffers(self, micro_batches: int) -> int:
        """Return the bytes of the buffers that stay.

        Values and gradients are received into them. The last stage has two slots for its outputs,
        with a graph that holds what came in, and its gradient.
        """
        if self.is_last:
            slots = min(2, micro_batches) * (self.sent + 2 * self.received)
        else:
            slots = self.sent
        return self.received + slots

    @property
    def passing(self) -> int:
        """Bytes of inputs, and of outputs that wait for their gradients."""
        if self.is_last:
            return self.in_flight * self.received
        return self.in_flight * (self.received + self.sent)


@dataclass(frozen=True)
class _ParameterGroup:
    """Weights that the optimizer steps with the same settings and the same ranks hold.

    Attributes:
        sizes: elements of each weight, in order.
        num_ranks: ranks that hold the same weights: ZeRO divides the group over them.
        is_by_muon: whether Muon steps them.
    """

    sizes: list[int]
    num_ranks: int
    is_by_muon: bool = False

    @property
    def padded_share(self) -> int:
        """Elements of a rank at stages 1 and 2: DeepSpeed pads to a multiple of 2 x ranks."""
        return ceil(sum(self.sizes) / (2 * self.num_ranks)) * 2

    @property
    def shares(self) -> list[int]:
        """Elements of a rank of each weight at stage 3, padded to a multiple of ranks."""
        return [ceil(size / self.num_ranks) for size in self.sizes]


class RankMemory:
    """Bytes of one rank on its device.

    A ``width`` is bytes of an element; `sizes`, shares and ``num_*`` count elements of weights.
    `copy_width` is of the weights that are stepped and their gradients then, `moment_width` of what
    the optimizer keeps.
    """

    def __init__(
        self,
        plan: Plan,
        work: ModelWork,
        passes: Passes,
        pipeline: PipelineStage | None = None,
        num_elsewhere: int = 0,
    ) -> None:
        """Take what the derivation starts from.

        Args:
            plan: of the run.
            work: weights and buffers that the rank has.
            passes: moments of its forward and backward pass.
            pipeline: what its pipeline stage adds.
            num_elsewhere: elements of experts on other ranks, which the model's file has too.
        """
        layout = plan.layout
        self.config = plan.config
        self.zero = plan.config.zero
        self.stage = plan.config.zero.stage
        self.layout = layout
        self.work = work
        self.passes = passes
        self.pipeline = pipeline
        self.num_elsewhere = num_elsewhere
        self.ranks = layout.num_replicas  # they hold the same weights
        self.steps = layout.accumulation_steps
        self.is_cpu = plan.cluster.device == "cpu"
        self.is_half = isinstance(plan.config.precision, BF16 | FP16)
        widths = state_widths(plan.config.precision)
        self.copy_width = widths.weight
        self.moment_width = widths.moment
        self.is_offloaded = self.stage > 0 and self.zero.offload_optimizer.device != "none"
        self.overlaps = self.zero.sums_overlap
        self.waits = waits(plan.config, layout)

    # Bytes of an element.

    @property
    def width(self) -> int:
        """Bytes of a weight's element, and of its gradient's."""
        return 2 if self.is_half else _FP32

    @cached_property
    def sum_width(self) -> int:
        """Bytes of an element of the sum of gradients over micro-batches."""
        accumulation, _ = sums_of(self.config, self.layout)
        return _FP32 if accumulation else self.width

    @cached_property
    def reduce_width(self) -> int:
        """Bytes of an element of the sum of gradients over ranks."""
        _, reduction = sums_of(self.config, self.layout)
        return _FP32 if reduction else self.width

    @property
    def gradient_width(self) -> int:
        """Bytes of an element of the gradients, or their sums, that wait to be added up over the
        ranks at stages 1 and 2.
        """
        return self.sum_width if self.waits else self.width

    @cached_property
    def state_width(self) -> float:
        """Bytes of the optimizer's state for an element, on average."""
        state = state_of(self.config.optimizer, self.work.weights)
        assert state is not None  # `estimate` has refused such an optimizer
        if isinstance(self.config.optimizer, AdamW8bit):
            return state.bytes_per_element
        if isinstance(self.config.optimizer, Lion) and self.is_offloaded:
            # DeepSpeed's host kernel is given a mean of squares as well, which it leaves at zero
            # (ops/lion/cpu_lion.py `step`)
            return 2.0 * self.moment_width
        return state.bytes_per_element * self.moment_width / _FP32

    # Elements of weights, and the rank's share of them.

    @cached_property
    def groups(self) -> list[_ParameterGroup]:
        """The optimizer's groups; experts that are divided have groups of their own, over the ranks
        that hold the same ones.
        """
        shapes_of: dict[int, dict[str, Shape]] = {}  # by the number of ranks that hold them
        for name, shape in self.work.weights.items():
            shapes_of.setdefault(self.ranks_with(name), {})[name] = shape
        groups = []
        for num_ranks, shapes in shapes_of.items():
            for sizes, is_by_muon in _group_sizes(shapes, self.config):
                groups.append(_ParameterGroup(sizes, num_ranks, is_by_muon))
        return groups

    def ranks_with(self, name: str) -> int:
        """Return the number of ranks that hold the same of a weight."""
        if EXPERTS in name:
            return self.ranks // self.layout.expert_size
        return self.ranks

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each trained weight."""
        return [size for group in self.groups for size in group.sizes]

    @cached_property
    def frozen(self) -> list[int]:
        """Elements of each frozen weight: it has no gradient and no state, and at stage 3 is spread
        as the others are. In few bits it counts as the elements of as many bytes.
        """
        return [size for size, _ in self.frozen_numbers]

    @cached_property
    def frozen_shares(self) -> list[int]:
        """Elements that the rank has of each frozen weight at stage 3, padded to a multiple of
        ranks.
        """
        names_and_sizes = zip(self.work.frozen, self.frozen, strict=True)
        return [ceil(size / self.ranks_with(name)) for name, size in names_and_sizes]

    @cached_property
    def frozen_numbers(self) -> list[tuple[int, int]]:
        """Elements of each frozen weight, as `frozen` has them, and as how many numbers DeepSpeed
        has it: in few bits its bytes.
        """
        lora = self.config.training.lora
        form = None if lora is None else lora.quantization
        if form is None:
            return [(prod(shape), prod(shape)) for shape in self.work.frozen.values()]
        from framework.config.groups import base_name, quantized_bytes

        sizes = []
        for name, shape in self.work.frozen.items():
            module = base_name(name).removesuffix("weight")
            is_adapted = f"{module}lora_A.default.weight" in self.work.weights
            if is_adapted and len(shape) == 2:
                num_bytes = quantized_bytes(shape, form)
                sizes.append((ceil(num_bytes / self.width), num_bytes))
            else:
                sizes.append((prod(shape), prod(shape)))
        return sizes

    @cached_property
    def total(self) -> int:
        """Trained elements."""
        return sum(self.sizes)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest trained weight."""
        return max(self.sizes)

    def share_of(self, size: int) -> int:
        """Return the rank's share of one weight at stage 3, padded to a multiple of ranks."""
        return ceil(size / self.ranks)

    @cached_property
    def share(self) -> int:
        """The rank's share of the trained elements, padding included."""
        if self.stage == 0:
            return self.total
        if self.stage == 3:
            return sum(sum(group.shares) for group in self.groups)
        return sum(group.padded_share for group in self.groups)

    @cached_property
    def parts(self) -> list[int]:
        """Elements that the optimizer steps at once, one part after the other."""
        if self.stage == 0:
            return self.sizes
        return [size for size, _ in self.divided_parts]

    @cached_property
    def divided_parts(self) -> list[tuple[int, bool]]:
        """Elements of `parts` under ZeRO, and whether Muon steps them."""
        if self.stage == 3:
            return self.sub_groups()
        return [(group.padded_share, group.is_by_muon) for group in self.groups]

    @cached_property
    def largest_part(self) -> int:
        """Elements of the largest part."""
        return max(self.parts)

    def sub_groups(self) -> list[tuple[int, bool]]:
        """List the parts of stage 3: shares of weights, joined up to `sub_group_size`; and whether
        Muon steps them.
        """
        joined = []
        for group in self.groups:
            size = 0
            for share in group.shares:
                size += share
                if size >= self.zero.sub_group_size:
                    joined.append((size, group.is_by_muon))
                    size = 0
            if size:
                joined.append((size, group.is_by_muon))
        return joined

    @cached_property
    def touched(self) -> int:
        """Elements of the weights that have a part in a rank's share, on the fullest rank: their
        gradients stay whole at stages 1 and 2.
        """
        return max(self._touched_by_rank(self.groups))

    @cached_property
    def touched_before(self) -> int:
        """`touched` without the last group: DeepSpeed frees the gradients that it has copied, but
        no gradients of an earlier group.
        """
        return max(self._touched_by_rank(self.groups[:-1]))

    def _touched_by_rank(self, groups: list[_ParameterGroup]) -> list[int]:
        """List for each rank the elements of the weights that have a part in its share."""
        changes = Counter[int]()  # rank -> difference to the rank before
        for group in groups:
            share = group.padded_share
            stride = self.ranks // group.num_ranks  # from one rank of the group to the next
            for size, end in zip(group.sizes, accumulate(group.sizes), strict=True):
                first = (end - size) // share
                last = (end - 1) // share
                changes[first * stride] += size
                changes[(last + 1) * stride] -= size
        return list(accumulate(changes[rank] for rank in range(self.ranks)))

    # What is there all the time.

    def moments(self) -> dict[str, Bytes]:
        """Return the bytes by component at each moment (`Memory.moments`)."""
        start = self.weights() | self.buckets()
        if isinstance(self.config.optimizer, Adagrad):
            start |= self.optimizer_state()  # torch makes it where the optimizer is built
        states = start | self.optimizer_state()
        if self.pipeline is not None:
            states |= {"pipeline buffers": self.pipeline.buffers(self.steps)}
        small_weights = self.persistent()
        between = _largest_first(states | small_weights)
        kept = self.kept_gradients()
        moments = {
            "start": max(start | small_weights, self.put_into_few_bits(), key=_total),
            "between": between,
            "forward": between | kept | self.forward(),
            "backward": self.backward(between, kept),
            "step": self.step(states),  # for which stage 3 frees small weights too
        }
        return {name: positive(components) for name, components in moments.items()}

    def put_into_few_bits(self) -> dict[str, int]:
        """Return the bytes at most while the base of adapters is put into few bits at stage 3,
        where it is partitioned before, in its first type: one layer after the other is whole then
        (`engine/adapter_weights.py`). Below, that happens in host memory.
        """
        if self.stage < 3 or not self.work.frozen:
            return {}
        partitioned = sum(self.share_of(prod(shape)) for shape in self.work.frozen.values())
        most = 0
        layer = 0
        for shape, (held, _) in zip(self.work.frozen.values(), self.frozen_numbers, strict=True):
            size = prod(shape)
            if held == size:
                continue
            one = _QUANTIZED_AT_ONCE * size * self.layout.tensor_size
            if self.width * partitioned + one > most:
                most = self.width * partitioned + one
                layer = one
            partitioned -= self.share_of(size) - self.share_of(held)
        if not layer:
            return {}
        return {
            "weights": most - layer + self.work.buffer_bytes,
            "layer on its way to few bits": layer,
            "adapters": self.width * self.total,
        }

    def weights(self) -> dict[str, int]:
        """Return the bytes of weights and of their copies that are stepped; ZeRO copies fp32
        weights too.
        """
        components = {"weights": self.width * self.num_on_device() + self.work.buffer_bytes}
        num_copied = self.num_kept if self.is_offloaded else self.share
        if self.has_copies and num_copied:
            components[name_of_copies(self.copy_width)] = self.copy_width * num_copied
        return components

    @cached_property
    def num_kept(self) -> int:
        """Elements that are stepped on the device beside an optimizer on the host (Twin-Flow): the
        first sub-groups (stage3.py `subgroup_to_device`). On processors none.
        """
        return sum(self.kept_parts)

    @property
    def kept_parts(self) -> list[int]:
        """Sizes of the sub-groups of `num_kept`."""
        place = self.zero.offload_optimizer
        if not isinstance(place, OptimizerToCPU) or self.is_cpu:
            return []
        return self.parts[: int((1 - place.ratio) * len(self.parts))]

    def num_on_device(self) -> int:
        """Return the elements of weights, frozen ones included, that stay on the device."""
        if self.stage == 0:
            return self.total + sum(self.frozen)
        if self.stage == 3:
            return self.num_sharded_on_device()
        padded = sum(group.padded_share * group.num_ranks for group in self.groups)
        return padded + sum(self.frozen)

    def num_sharded_on_device(self) -> int:
        """Return the elements of the rank's shares at stage 3 that stay on the device."""
        if self.zero.offload_param.device != "none":
            return 0
        return self.share + sum(self.frozen_shares)

    @property
    def has_copies(self) -> bool:
        """Whether copies of the weights are stepped."""
        return self.is_half or self.stage > 0

    def optimizer_state(self) -> dict[str, int]:
        """Return the bytes of the optimizer's state and of the moving average of weights."""
        if self.is_offloaded:
            return self.zenflow_state() | self.kept_state()
        state = self.whole_state or int(self.state_width * self.share)
        return {"optimizer state": state, "weight average": self.average_width * self.share}

    @property
    def whole_state(self) -> int:
        """Bytes of the optimizer's state that every rank has of all weights: Adafactor's means."""
        if isinstance(self.config.optimizer, Adafactor):
            return int(self.state_width * self.total)
        return 0

    def zenflow_state(self) -> dict[str, int]:
        """Return the bytes of what steps ZenFlow's columns on the device, on every rank all of
        them: two moments, if they are not on the host.
        """
        zenflow = self.zero.zenflow
        if zenflow is None or zenflow.offload:
            return {}
        return {"moments of columns": 2 * self.width * self.num_chosen}

    def kept_state(self) -> dict[str, int]:
        """Return the bytes of Twin-Flow's part on the device: state, and the gradients that it is
        stepped by, which stay from step to step.
        """
        return {
            "optimizer state": int(self.state_width * self.num_kept),
            "weight average": self.average_width * self.num_kept,
            "gradients of the part": self.copy_width * self.num_kept,
        }

    @cached_property
    def num_chosen(self) -> int:
        """Elements of the vectors and columns that ZenFlow steps on the device; 0 without it."""
        zenflow = self.zero.zenflow
        if zenflow is None:
            return 0
        chosen = 0
        for shape in self.work.weights.values():
            if len(shape) == 1:
                chosen += prod(shape)
            else:
                columns = prod(shape[1:])
                chosen += shape[0] * max(1, int(columns * zenflow.topk_ratio))
        return chosen

    @property
    def average_width(self) -> int:
        """Bytes of the moving average of an element."""
        return 0 if self.config.training.ema is None else _FP32

    def buckets(self) -> dict[str, int]:
        """Return the bytes of buffers that stay: at stage 3 for gradients of the rank's share, and
        one bucket, as large as configured.
        """
        if self.stage == 3:
            gradients = 0 if self.is_offloaded else self.sum_width * self.share
            bucket = self.width * self.zero.reduce_bucket_size
            return {"gradient buffer": gradients, "reduce bucket": bucket}
        if self.is_offloaded:
            return {"copy buffer": self.width * self.largest}
        return {}

    @property
    def bucket(self) -> int:
        """Bytes of the buckets of stages 1 and 2, however small the model is; two where sums
        overlap, none on one rank and where flat tensors stand in for them.
        """
        if self.is_alone or self.sums_flat:
            return 0
        num_buckets = 2 if self.overlaps else 1
        return num_buckets * self.sum_width * int(self.zero.reduce_bucket_size)

    @cached_property
    def sums_flat(self) -> bool:
        """Whether gradients are summed over ranks from flat tensors (`engine/flat_sums.py`)."""
        if self.ranks == 1 or not may_sum_flat(self.config, self.layout):
            return False
        return self.waits or self.share * self.ranks <= most_in_message(
            self.zero.reduce_bucket_size
        )

    @property
    def is_alone(self) -> bool:
        """Whether gradients of stages 1 and 2 stay where the backward pass has put them
        (`engine/one_rank.py`).
        """
        is_plain = self.pipeline is None and not self.is_offloaded
        return self.stage in (1, 2) and self.ranks == 1 and is_plain

    @cached_property
    def shares(self) -> Shares:
        """The rank's shares, for what is elsewhere than on its device."""
        return Shares(
            stage=self.stage,
            zero=self.zero.model_dump(),
            aio=self.config.deepspeed.get("aio", {}),
            width=self.width,
            sum_width=self.sum_width,
            has_copies=self.has_copies,
            copy_width=self.copy_width,
            moment_width=max(self.moment_width, self.average_width),
            state_bytes=self.average_width + (0.0 if self.whole_state else self.state_width),
            whole_state=self.whole_state,
            swaps_state=not isinstance(self.config.optimizer, Adafactor | AdamW8bit),
            copies=self.copies_of_shares,
            groups=self.shares_by_group(),
            parts=self.parts,
            weights=self.sizes,
            touched=self.touched if self.stage in (1, 2) else 0,
            columns=self.num_chosen,
            kept=self.num_kept,
            frozen=self.frozen,
            frozen_shares=self.frozen_shares,
            saves_frozen=self.config.training.lora is None,
            shared=0 if self.pipeline is None else self.pipeline.shared,
            buffers=self.work.buffer_bytes + self.elsewhere_in_file,
            pins=not self.is_cpu,
            accumulates=self.steps > 1,
        )

    @property
    def elsewhere_in_file(self) -> int:
        """Bytes of experts of other ranks in the model's file; stage 3 has no weights there."""
        if self.stage == 3:
            return 0
        return self.width * self.num_elsewhere

    def shares_by_group(self) -> list[list[int]]:
        """List the rank's shares of each group: of every weight at stage 3, else of all in one."""
        if self.stage == 3:
            return [group.shares for group in self.groups]
        return [[part] for part in self.parts]

    # Weights that stage 3 gathers.

    @cached_property
    def held(self) -> list[tuple[int, int]]:
        """Elements of each weight, trained or frozen, and its numbers, as in `frozen_numbers`;
        without experts that no other rank has: their share is the weight.
        """
        shared = [group for group in self.groups if group.num_ranks > 1 or self.ranks == 1]
        trained = [(size, size) for group in shared for size in group.sizes]
        return trained + self.frozen_numbers

    def persistent(self) -> dict[str, int]:
        """Return the bytes of small weights, which stay whole at stage 3."""
        if not self.gathers:
            return {}
        threshold = self.zero.stage3_param_persistence_threshold
        small = sum(size for size, numbers in self.held if numbers <= threshold)
        return {"small weights": self.width * small}

    @property
    def gathers(self) -> bool:
        """Whether weights of other ranks are gathered."""
        return self.stage == 3 and self.ranks > 1

    @cached_property
    def spread(self) -> list[int]:
        """Elements of each weight that is gathered."""
        threshold = self.zero.stage3_param_persistence_threshold
        return [size for size, numbers in self.held if numbers > threshold]

    @property
    def num_prefetched(self) -> int:
        """Elements that are fetched ahead of their use."""
        return min(self.zero.stage3_prefetch_bucket_size, self.zero.stage3_max_live_parameters)

    @property
    def num_live(self) -> int:
        """Elements of gathered weights that stay after their use."""
        live = self.zero.stage3_max_live_parameters
        if self.num_prefetched or live >= sum(self.spread):
            return live
        return 0

    def gathered_in_backward(self) -> dict[str, int]:
        """Return the bytes of gathered weights in the backward pass: those that stay, beside those
        that are fetched.
        """
        if not self.gathers:
            return {}
        largest = max(self.spread, default=0)
        gathered = self.num_live + self.num_prefetched + 2 * largest
        return {"gathered weights": self.width * min(sum(self.spread), gathered)}

    def gathered_in_forward(self) -> dict[str, int]:
        """Return the bytes of gathered weights in the forward pass, where several weights are
        gathered into one buffer, and copied out of it.
        """
        if not self.gathers:
            return {}
        num_spread = sum(self.spread)
        largest = max(self.spread, default=0)
        live = self.num_live or min(self.zero.stage3_max_live_parameters, 2 * largest)
        elements = min(num_spread, max(live, largest))
        if len(self.spread) > 1:
            elements += min(num_spread, self.num_prefetched + largest)
        return {"gathered weights": self.width * elements}

    # The forward pass.

    def forward(self) -> dict[str, int]:
        """Return the bytes of values and gathered weights at the fullest moment of the forward
        pass.
        """
        fullest = max(self.passes.forward, key=lambda moment: moment.activations + moment.loss)
        values = self.values(fullest)
        gathered = self.gathered_in_forward()
        all_weights = self.width * sum(self.spread)
        if gathered.get("gathered weights", 0) <= all_weights:
            return gathered | values
        # The buffer that weights are fetched into is freed when the last of them was copied out of
        # it, before the loss.
        before_loss = [moment.activations for moment in self.passes.forward if not moment.loss]
        copying = gathered | values | self.values(Moment(max(before_loss, default=0)))
        with_loss = values | {"gathered weights": all_weights}
        return max(copying, with_loss, key=_total)

    def values(self, moment: Moment) -> dict[str, int]:
        """Return the bytes of values at one moment, other micro-batches in flight included."""
        components = {"activations": moment.activations, "logits and loss": moment.loss}
        stage = self.pipeline
        if stage is not None:
            components["activations"] += (stage.in_flight - 1) * self.passes.kept_bytes
            components["pipeline buffers"] = stage.buffers(self.steps) + stage.passing
        return components

    # Gradients.

    def kept_gradients(self) -> dict[str, int]:
        """Return the bytes of gradients, and their bucket, that wait for the next micro-batch."""
        if self.steps <= self.in_flight or self.stage == 3:
            return {}
        if self.stage == 2 and not self.waits:
            return {"gradients": self._kept_at_stage_2()}
        components = {"gradients": self.sum_width * self.total}
        if self.stage == 1 and self.pipeline is None:
            components["reduce bucket"] = self.bucket
        return components

    @property
    def in_flight(self) -> int:
        """Micro-batches that have their values held at once."""
        if self.pipeline is None:
            return 1
        return self.pipeline.in_flight

    def _kept_at_stage_2(self) -> int:
        if self.is_offloaded:
            return 0
        num_kept = self.touched
        if self.sums_flat or self.sum_width > self.width:
            num_kept = self.share
        return self.sum_width * num_kept

    def backward(self, between: Bytes, kept: Bytes) -> Bytes:
        """Return the bytes at the fullest moment of the backward pass.

        It is one of these: the beginning, with all activations; a later moment, when some of them
        are freed and the gradients of later layers are there; the sum of gradients, when all
        activations are freed.

        Args:
            between: what is there between two steps.
            kept: gradients of earlier micro-batches.
        """
        gathered = self.gathered_in_backward()
        within = dict(between) | dict(kept) | gathered
        if self.stage in (1, 2) and self.pipeline is None:
            within["reduce bucket"] = self.bucket
        if self.stage == 3:
            summed = dict(between) | gathered
            reduced = self.reduced_with(gathered.get("gathered weights", 0))
            summed["gradients"] = reduced + _FP32 * self.shares.unswapped_gradients
        else:
            summed = dict(between) | self.summed_gradients(kept)
        before = within.get("gradients", 0)
        # new gradients take no more than the sums of all of them
        room = max(summed.get("gradients", 0) - before, 0)
        fullest = max(
            self.passes.backward,
            key=lambda moment: moment.activations + moment.loss + self.new_gradients(moment, room),
        )
        within["gradients"] = before + self.new_gradients(fullest, room)
        within |= self.values(fullest)
        return max(within, summed, key=_total)

    def new_gradients(self, moment: Moment, room: int) -> int:
        """Return the bytes of gradients that a backward pass has made at a moment, at most `room`.

        Below stage 2 each gradient stays. At stage 2 gradients lie in the bucket up to the first
        sum, which allocates all of the rank's share, and are there twice later.
        """
        stays = self.is_alone and self.sum_width == self.width
        if self.stage != 2 or stays or self.waits or self.sums_flat:
            width = self.gradient_width if self.stage else self.reduce_width
            return min(room, width * (moment.gradients + moment.beside))
        bucket = self.zero.reduce_bucket_size
        num_filled = moment.gradients - moment.waiting
        if num_filled > bucket or (self.is_alone and num_filled):
            return room
        num_gradients = moment.waiting
        overflows = num_filled + moment.own > bucket
        if overflows and not self.is_offloaded and self.sum_width == self.width:
            num_gradients += self.touched
        return self.width * num_gradients

    @property
    def flight(self) -> int:
        """Elements that have their gradients reduced at once: a bucket, or a larger weight."""
        return self.sent_at_once(self.zero.reduce_bucket_size)

    def sent_at_once(self, bucket: int) -> int:
        """Return the elements of a bucket's sum over ranks: a larger weight is summed alone."""
        return min(max(bucket, self.largest), self.total)

    def reduced_with(self, gathered: int) -> int:
        """Return the bytes of gradients at stage 3 at their fullest, beside `gathered` bytes of
        whole weights.

        It is one of these:

        - within the pass, a bucket of gradients, and the gradient that is to join it;
        - at its end, when whole weights are freed again, the last bucket and the copy of it that
          the sum works on (DeepSpeed's `reduce_scatter_coalesced` joins gradients by `torch.cat`;
          gloo's reduce-scatter makes the copy where a gradient is alone);
        - at its end, the gradient of the first weight, if it is too large for a bucket, and the
          copy of it; with several ranks the weight itself is still gathered, too.
        """
        bucket = self.zero.reduce_bucket_size
        filling = min(self.flight + min(self.largest, bucket), self.total)
        first = 0
        if self.sizes[0] > bucket:
            num_copies = 2
            if self.gathers:
                num_copies += 1
            first = num_copies * self.sizes[0]
        # the caller adds `gathered`: no other weights are whole then
        full = self.width * max(2 * self.flight, first) - gathered
        return max(self.width * filling, full)

    def summed_gradients(self, kept: Bytes) -> dict[str, int]:
        """Return the bytes of gradients, their copies and buckets in the sum, below stage 3."""
        if self.stage == 0:
            return self._summed_without_zero()
        if self.is_alone:
            return self._summed_alone(kept)
        if self.sums_flat:
            return self._summed_flat(kept)
        if self.waits and not (self.overlaps and self.steps == 1):
            return self._summed_at_stage_1()
        return self._summed_as_made(kept)

    def _summed_without_zero(self) -> dict[str, int]:
        components = {"gradients": self.reduce_width * self.total}
        if self.pipeline is not None:
            components["reduce bucket"] = self.width * self.sent_at_once(_PIPELINE_BUCKET)
        elif self.ranks > 1:
            components["reduce bucket"] = self.width * self.sent_at_once(_STAGE_0_BUCKET)
        return components

    def _summed_alone(self, kept: Bytes) -> dict[str, int]:
        """Return the bytes of gradients at the end of a backward pass of stages 1 and 2 on one
        rank, which copies them into fp32 sums only.
        """
        gradients = self.sum_width * self.total
        if self.sum_width == self.width:
            if self.stage == 2:
                gradients += kept.get("gradients", 0)
        elif self.stage == 1:
            gradients += self.sum_width * self.share
        else:
            gradients += self.width * self.largest
        return {"gradients": gradients}

    @property
    def num_summed(self) -> int:
        """Elements of the sums that stay on the device at stages 1 and 2."""
        return 0 if self.is_offloaded else self.touched

    def _summed_at_stage_1(self) -> dict[str, int]:
        """Return the bytes of the sums after the backward pass, when all gradients are there."""
        beyond_bucket = max(self.num_summed - self.zero.reduce_bucket_size, 0)
        copied = self.flight if self.sum_width > self.width else 0
        return {
            "gradients": self.sum_width * (self.total + beyond_bucket + copied),
            "reduce bucket": self.bucket,
        }

    def _summed_flat(self, kept: Bytes) -> dict[str, int]:
        """Return the bytes of whole gradients and of a message of them, after the backward pass:
        it is joined, made the type that is sent, and what a rank keeps of it is copied.
        """
        message = self.message
        sent = message // self.ranks * self.reduce_width
        if self.reduce_width != self.gradient_width:
            sent += message * self.reduce_width
        if self.reduce_width != self.sum_width:
            sent += message // self.ranks * self.sum_width
        earlier = 0 if self.waits else kept.get("gradients", 0)
        shares = self.sum_width * self.share
        joined = 2 * shares if self.share * self.ranks > message else shares
        beside = max(shares - message // self.ranks * self.sum_width, 0)
        at_once = max(beside + self.gradient_width * message + sent, joined)
        return {"gradients": self.gradient_width * self.total + earlier + at_once}

    @property
    def message(self) -> int:
        """Elements of the largest message of flat sums: half a bucket, or all gradients."""
        columns = max(most_in_message(self.zero.reduce_bucket_size) // self.ranks, 1)
        return min(columns, self.share) * self.ranks

    @property
    def num_reduced(self) -> int:
        """Elements of the gradients in flight, and of their copies, within the backward pass."""
        num_reduced = 2 * self.flight
        if self.largest <= self.zero.reduce_bucket_size:
            num_reduced = min(num_reduced, self.total)
        if self.is_offloaded:  # on its way to the host
            num_reduced += self.flight
        return num_reduced

    def _summed_as_made(self, kept: Bytes) -> dict[str, int]:
        """Return the bytes of sums within the backward pass, as gradients are made, at the last
        bucket's sum.

        Gradients in flight lie in the bucket, which is counted by itself. Beside it there are the
        copy that the sum works on and the gradients that are made meanwhile (`num_reduced`).

        The rank's own sums are allocated as a whole when the first bucket has been summed: all of
        them are there beside the last of many buckets, none beside the only one. Between the two
        they are taken in proportion to the elements before the last bucket; with `overlap_comm`
        half of that bucket counts as well, as another one fills while it is summed. That is no
        equality: tests/plan/test_memory.py holds it against counted bytes.
        """
        num_reduced = self.num_reduced
        if self.sum_width > self.width:  # summed into the rank's own share, which is kept
            gradients = self.sum_width * self.share + self.width * num_reduced
        else:
            num_left = 2 * self.total if self.overlaps else self.total
            num_done = self.num_summed * (num_left - self.flight) // num_left
            gradients = kept.get("gradients", 0) + self.sum_width * (num_done + num_reduced)
        return {"gradients": gradients, "reduce bucket": self.bucket}

    # The optimizer's step.

    @cached_property
    def step_bytes_per_element(self) -> int:
        """Bytes that the step takes for each element that is stepped at once."""
        is_on_cpu = self.is_cpu or self.is_offloaded
        in_fp32 = step_bytes_per_element(self.config.optimizer, is_on_cpu=is_on_cpu)
        copies = in_fp32 * self.moment_width // _FP32
        if self.copy_width < self.average_width:  # weights are averaged in fp32
            copies = max(copies, self.average_width)
        return copies

    @cached_property
    def copies_of_shares(self) -> int:
        """Bytes that the step under ZeRO takes for the part that is stepped at once."""
        optimizer = self.config.optimizer
        if isinstance(optimizer, Muon):
            return muon_share_copies(
                optimizer,
                self.work.weights,
                stage=self.stage,
                ranks=self.ranks,
                parts=self.divided_parts,
                is_cpu=self.is_cpu or self.is_offloaded,
            )
        if isinstance(optimizer, AdamW8bit):
            return bytes_of_blocks(self.largest_part)
        return self.step_bytes_per_element * self.largest_part

    def step(self, states: Bytes) -> Bytes:
        """Return the bytes in the step by component: `states`, which stay, gradients in the type
        of the stepped weights and the optimizer's own copies.
        """
        if self.is_offloaded:
            waiting = _FP32 * self.shares.unswapped_gradients
            # gradients of the columns, and their values until the host's step is over
            waiting += 2 * self.width * self.num_chosen
            components = {**states, "gradients": waiting} if waiting else dict(states)
            if self.num_kept:
                # of torch's Adam, which steps one part after the other
                components["optimizer copies"] = _FP32 * max(self.kept_parts)
            if not self.step_bytes_per_element:  # it is fullest when it begins
                components |= self.persistent()
            return components
        if self.stage == 0:
            return dict(states) | self._step_without_zero()
        return dict(states) | self._step_with_zero()

    def _step_without_zero(self) -> dict[str, int]:
        optimizer = self.config.optimizer
        if isinstance(optimizer, Muon):
            copies = muon_copies(optimizer, self.work.weights, is_cpu=self.is_cpu)
        elif isinstance(optimizer, AdamW8bit):
            copies = bytes_of_blocks(self.largest_part)
        elif self._steps_one_by_one:
            copies = self.step_bytes_per_element * self.largest_part
        else:
            copies = self.step_bytes_per_element * self.total
        gradients = self.stepped_gradients()
        if self.copy_width > self.width:  # before gradients have copies in fp32
            compared = compared_bytes(self.total, self.width, is_cpu=self.is_cpu)
            copies = max(copies, self.width * self.total + compared - gradients)
        return {"gradients": gradients, "optimizer copies": copies}

    @property
    def _steps_one_by_one(self) -> bool:
        """Whether the optimizer of a run without ZeRO steps one weight after the other."""
        optimizer = self.config.optimizer
        if isinstance(optimizer, Lamb):  # the norms of all weights are taken at once
            return False
        if isinstance(optimizer, Adafactor):  # a tensor group adds up the sums of all at once
            return self.is_cpu and self.layout.tensor_size == 1
        return self.is_cpu or isinstance(optimizer, ScheduleFree)

    def stepped_gradients(self) -> int:
        """Return the bytes of gradients in a step without ZeRO.

        In half precision there are fp32 copies: FP16_UnfusedOptimizer makes them, or
        FP16_Optimizer for DeepSpeed's fused Adam, group by group, first apart and then joined.
        """
        optimizer = self.config.optimizer
        if not self.is_half:
            return self.width * self.total
        if getattr(optimizer, "implementation", "") != "deepspeed":
            return (self.width + _FP32) * self.total
        return self._joined_by_group()

    def _joined_by_group(self) -> int:
        """Return the bytes of gradients while groups of them are joined, at the fullest."""
        most = 0
        num_joined = 0
        for group in self.groups:
            size = sum(group.sizes)
            in_half = self.width * (self.total - num_joined)
            most = max(most, in_half + _FP32 * num_joined + 2 * _FP32 * size)
            num_joined += size
        return most

    @property
    def num_whole(self) -> int:
        """Elements of the gradients that are whole when a step of ZeRO begins."""
        if self.stage == 3:
            return 0
        if self.stage == 1 and self.steps > 1 and self.sum_width == _FP32:
            return self.total
        return self.touched

    def _step_with_zero(self) -> dict[str, int]:
        """Return the bytes of a step of the largest part.

        It is fullest either while gradients are copied into a flat one, at stage 3 and with experts
        before they are converted to the type of the stepped weights, or while the optimizer
        computes.
        """
        part = self.largest_part
        if self.sums_flat:
            return self._step_flat(part)
        stays = 0
        if self.stage < 3:
            stays = self.sum_width * self.touched_before
        flat = self.sum_width * part
        converted = self.copy_width * part if self.sum_width != self.copy_width else 0
        joins_first = self.stage == 3 or self.config.parallel.expert > 1
        copied = self.sum_width * self.num_whole + converted
        if joins_first or not converted:
            copied += flat
        # The flat gradient of one weight alone is that weight's whole gradient, not a copy.
        if self.stage < 3 and self.largest > part:
            flat = self.sum_width * self.largest
        computed_on = stays + (converted or flat)
        gradients = max(copied, computed_on)
        copies = self.copies_of_shares
        return {
            "gradients": gradients,
            "optimizer copies": max(computed_on + copies - gradients, 0),
        }

    def _step_flat(self, part: int) -> dict[str, int]:
        """Return the bytes of a step of the largest part, where the gradients of the rank's share
        are one flat tensor. It is freed when the last group has its part in the type that is
        stepped. DeepSpeed's step is called after each micro-batch, where whole gradients may wait.
        """
        gradients = self.sum_width * self.share
        computed_on = gradients
        if self.sum_width != self.copy_width:
            converted = self.copy_width * part
            gradients += converted
            computed_on = gradients if len(self.groups) > 1 else converted
        if self.waits and self.steps > 1:
            gradients = max(gradients, self.sum_width * self.total)
        return {
            "gradients": gradients,
            "optimizer copies": max(computed_on + self.copies_of_shares - gradients, 0),
        }


def positive(components: Bytes) -> Bytes:
    """Return the components without empty ones."""
    return {name: size for name, size in components.items() if size}


def _total(components: Bytes) -> int:
    return sum(components.values())


def _largest_first(components: Bytes) -> dict[str, int]:
    return dict(sorted(components.items(), key=lambda item: item[1], reverse=True))


def _group_sizes(shapes: Mapping[str, Shape], config: RunConfig) -> list[tuple[list[int], bool]]:
    """List the elements of each weight, in order, for each of the optimizer's parameter groups, and
    whether Muon steps the group.
    """
    if not has_groups(config.optimizer):
        return [([prod(shape) for shape in shapes.values()], False)]
    from framework.config.groups import group_values, in_order

    value_of = group_values(shapes, config.optimizer)
    groups = []
    for value in in_order(value_of.values()):
        sizes = [prod(shape) for name, shape in shapes.items() if value_of[name] == value]
        groups.append((sizes, value.by_muon))
    return groups
