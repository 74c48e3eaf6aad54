"""Memory of the fullest rank at five moments of a run, by component: estimated from the config
alone, without torch.

`RankMemory` derives the bytes of one rank. They are held against the bytes of all live tensors by
`tests/plan/test_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final

from framework.config.base import Object
from framework.config.model import MoE
from framework.config.optimizer import has_groups_by_name
from framework.config.precision import state_widths
from framework.config.run_config import RunConfig
from framework.config.training import Parallel, always_frozen
from framework.errors import Problem
from framework.plan.activations import Passes, passes_over
from framework.plan.operations import Shape
from framework.plan.optimizer_memory import state_of
from framework.plan.plan import Plan
from framework.plan.rank_memory import EXPERTS, Bytes, PipelineStage, RankMemory, positive
from framework.plan.work import LayerWork, ModelWork, weights_alone, work_of, work_of_rank

if TYPE_CHECKING:
    from framework.plan.balance import Bounds, LayerFacts

# Keys of `deepspeed` with modelled memory.
_MODELLED: Final = frozenset(
    {"zero_optimization", "zero_allow_untested_optimizer", "gradient_clipping"}
)
# Other keys of `deepspeed`, which report what happens and allocate nothing on the device.
_REPORTING: Final = frozenset(
    {
        "comet",
        "comms_logger",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "timers",
        "wall_clock_breakdown",
        "wandb",
    }
)
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
            `deepspeed.initialize`, or before it while stage 3 puts weights into few bits, if that
            takes more; ``between``: between two steps; ``forward``, ``backward``, ``step``: at the
            fullest within.
        host: component -> bytes of host memory that offloading takes, and a save in the background.
        drive: component -> bytes on an NVMe drive.
        saved_bytes: bytes of a checkpoint, the files of all ranks together.
        num_params: trained elements of the model, of a pipeline's fullest stage, or with tensor
            parallelism of a rank.
        lacks: why activations are not counted; empty where they are.
        stage: the pipeline stage that is the fullest; None without a pipeline.
        beside: component -> bytes of the device that no tensor holds (`beside_tensors`), where they
            are requested.
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
        """Return the bytes on the device at one moment."""
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        """The fullest moment."""
        return max(self.moments, key=self.total)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values, as written to ``plan.json``."""
        values: dict[str, Any] = {"is_estimate": True}
        if self.lacks:
            values["without_activations"] = self.lacks
        if self.stage is not None:
            values["stage"] = self.stage
        values["num_params"] = self.num_params
        values["peak"] = self.peak
        values["total_bytes"] = {moment: self.total(moment) for moment in self.moments}
        values["bytes"] = {moment: dict(components) for moment, components in self.moments.items()}
        if self.beside:
            values["beside_tensors_bytes"] = dict(self.beside)
        values["host_bytes"] = dict(self.host)
        if self.drive:
            values["drive_bytes"] = dict(self.drive)
        values["checkpoint_bytes"] = self.saved_bytes
        return values


def estimate(plan: Plan, *, work: ModelWork | None = None) -> Memory:
    """Estimate the memory of a plan's fullest rank.

    Args:
        plan: what will happen. Where it names no kind of device, GPUs are meant.
        work: of the model on one micro-batch; left out: as the named model has it.

    Raises:
        NotEstimatedError: the plan has something that is not modelled.
    """
    _refuse_unknown(plan)
    lacks = ""
    model_work = _work_of_rank(plan, work)
    if model_work is None:
        model_work = _weights_of(plan)
        lacks = "the size of the images is not known"
    if plan.layout.pipe_size > 1:
        memory = _fullest_stage(plan, model_work, whole=work)
    else:
        memory = _memory_without_pipeline(plan, model_work)
    return replace(memory, lacks=lacks)


def _weights_of(plan: Plan) -> ModelWork:
    """Return the model's work without activations, where these are not known."""
    training = plan.config.training
    work = weights_alone(plan.config.model, always_frozen(training.freeze), training.lora)
    if work is None:
        raise NotEstimatedError("the model is one of your own")
    return work


def _fullest_stage(plan: Plan, work: ModelWork, *, whole: ModelWork | None) -> Memory:
    """Return the memory of the fullest pipeline stage, with the files of all of them; arguments as
    of `stage_memories`.

    Of stages that are alike the first one has most micro-batches in flight, so that the others are
    counted and not estimated.
    """
    stages = list(_stages(plan, work, whole))
    numbers: dict[Any, list[int]] = {}
    for number, kind in enumerate(_kinds_of_stages(plan, work, stages)):
        numbers.setdefault(kind, []).append(number)
    memories = []
    saved_bytes = 0
    for first, *others in numbers.values():
        memory = _stage_memory(plan, work, stages[first])
        memories.append(memory)
        saved_bytes += memory.saved_bytes * (1 + len(others))
    fullest = max(memories, key=lambda stage: stage.total(stage.peak))
    return replace(fullest, saved_bytes=saved_bytes)


def _kinds_of_stages(plan: Plan, work: ModelWork, stages: Sequence[_Stage]) -> list[Any]:
    """Return what decides the memory of each stage but its micro-batches in flight: equal for
    stages that are alike. Where an optimizer has groups of weights by name, none is.
    """
    if has_groups_by_name(plan.config.optimizer):
        return list(range(len(stages)))
    parts: list[int] = []
    for number, part in enumerate(work.parts[:-1]):
        parts += [number for _ in range(part.count)]
    kinds = []
    for stage in stages:
        start, stop = stage.bounds
        alone = replace(stage.pipeline, in_flight=0)
        kinds.append((tuple(parts[start:stop]), alone))
    return kinds


def _memory_without_pipeline(plan: Plan, work: ModelWork) -> Memory:
    """Return the memory of a rank that runs all layers; weights of experts on other ranks are only
    in `num_params` and in the files.
    """
    *layers, loss = work.layers
    training = plan.config.training
    passes = passes_over(
        layers,
        loss,
        recompute_every=training.recompute_every,
        keeps_products=training.keeps_products,
        offloads=training.offload_activations,
    )
    rank_work = _without_other_experts(work, plan)
    num_elsewhere = work.num_params - rank_work.num_params
    memory = _memory(plan, rank_work, passes, num_elsewhere=num_elsewhere)
    return replace(memory, num_params=work.num_params)


def _work_of_rank(plan: Plan, work: ModelWork | None) -> ModelWork | None:
    """Return the work of one rank, None for images of unknown size.

    Raises:
        NotEstimatedError: tensor or sequence parallelism divides a model of the user's own, and how
            is not known.
    """
    layout = plan.layout
    if layout.tensor_size * layout.sequence_size == 1:
        return work or work_of(plan)
    rank_work = work_of_rank(plan)
    if rank_work is not None:
        return rank_work
    share = None
    if work is not None:
        share = work.of_rank(layout.tensor_size, layout.sequence_size)
    if share is None:
        raise NotEstimatedError("a model of your own is shared by tensor or sequence parallelism")
    if share.work is None:
        raise NotEstimatedError(share.unknown)
    return share.work


def _without_other_experts(work: ModelWork, plan: Plan) -> ModelWork:
    """Return the work with the experts of one rank alone, where experts are divided; all ranks have
    the same number of them.
    """
    size = plan.layout.expert_size
    if size == 1:
        return work
    moe: MoE | None = getattr(plan.config.model, "moe", None)
    if moe is None:  # packed experts of a model of the user's own
        return replace(
            work,
            weights=_packed_parts(work.weights, size),
            frozen=_packed_parts(work.frozen, size),
        )
    num_experts = moe.num_experts // size

    def is_on_rank(name: str) -> bool:
        if EXPERTS not in name:
            return True
        number = name.partition(EXPERTS)[2].partition(".")[0]
        return int(number) < num_experts

    weights = {name: shape for name, shape in work.weights.items() if is_on_rank(name)}
    frozen = {name: shape for name, shape in work.frozen.items() if is_on_rank(name)}
    return replace(work, weights=weights, frozen=frozen)


def _packed_parts(weights: Mapping[str, Shape], size: int) -> dict[str, Shape]:
    """Return the shapes of weights with packed experts, (experts, ...), divided by `size`."""
    parts: dict[str, Shape] = {}
    for name, shape in weights.items():
        if EXPERTS in name:
            parts[name] = (shape[0] // size, *shape[1:])
        else:
            parts[name] = shape
    return parts


def _memory(
    plan: Plan,
    work: ModelWork,
    passes: Passes,
    pipeline: PipelineStage | None = None,
    num_elsewhere: int = 0,
) -> Memory:
    """Return the memory of one rank, but for `Memory.stage` and `lacks`; arguments as in
    `RankMemory`.
    """
    rank = RankMemory(plan, work, passes, pipeline, num_elsewhere)
    host = rank.shares.host(is_staged=plan.config.checkpoint.mode == "async")
    host["activations"] = passes.host_bytes
    model_bytes, rank_bytes, _ = rank.shares.saved()
    saved_bytes = plan.layout.tensor_size * (model_bytes + rank.ranks * rank_bytes)
    return Memory(
        moments=rank.moments(),
        host=positive(host),
        drive=positive(rank.shares.drive()),
        saved_bytes=saved_bytes,
        num_params=rank.total,
    )


@dataclass(frozen=True)
class _Stage:
    """A stage of a pipeline.

    Attributes:
        number: of the stage.
        bounds: numbers of its first layer, and of the next stage's.
        layers: its layers.
        pipeline: what it has of its neighbours.
    """

    number: int
    bounds: tuple[int, int]
    layers: Sequence[LayerWork]
    pipeline: PipelineStage


def stage_memories(plan: Plan, work: ModelWork, *, whole: ModelWork | None = None) -> list[Memory]:
    """Estimate the memory of a rank of each pipeline stage; raises as `estimate` does.

    Args:
        plan: of the run.
        work: of one rank.
        whole: of a model of the user's own that tensor groups divide: the work of all of it.
    """
    return [_stage_memory(plan, work, stage) for stage in _stages(plan, work, whole)]


def _stages(plan: Plan, work: ModelWork, whole: ModelWork | None) -> Iterator[_Stage]:
    """Yield the stages of a pipeline; raises NotEstimatedError if the cut is not known."""
    config = plan.config
    # A run cuts before it divides: by the numbers of whole layers.
    if plan.layout.tensor_size == 1:
        whole = work
    whole = whole or work_of(plan)
    assert whole is not None  # or there were no work of a rank
    layers = work.layers[:-1]
    for number, (start, stop) in enumerate(pairwise(_known_bounds(config, whole))):
        stage_layers = layers[start:stop]
        pipeline = PipelineStage(
            in_flight=min(config.parallel.pipe - number, plan.layout.accumulation_steps),
            received=layers[start - 1].output_bytes if start else 0,
            sent=layers[stop - 1].output_bytes,
            is_last=stop == len(layers),
            shared=_num_shared(stage_layers),
        )
        yield _Stage(number, (start, stop), stage_layers, pipeline)


def _stage_memory(plan: Plan, work: ModelWork, stage: _Stage) -> Memory:
    """Estimate the memory of a rank of a pipeline stage."""
    training = plan.config.training
    passes = passes_over(
        stage.layers,
        work.parts[-1] if stage.pipeline.is_last else None,
        recompute_every=training.recompute_every,
        keeps_products=training.keeps_products,
    )
    stage_work = _of_layers(work, stage.layers)
    rank_work = _without_other_experts(stage_work, plan)
    num_elsewhere = stage_work.num_params - rank_work.num_params
    memory = _memory(plan, rank_work, passes, stage.pipeline, num_elsewhere)
    return replace(memory, stage=stage.number)


def _num_shared(layers: Sequence[LayerWork]) -> int:
    """Count the elements of weights that a stage shares with an earlier one."""
    names = {layer.name for layer in layers}
    return sum(layer.shared_params for layer in layers if layer.shares not in names)


def _known_bounds(config: RunConfig, work: ModelWork) -> Bounds:
    """Return where the stages are cut; raises NotEstimatedError if that is not known."""
    from framework.plan.balance import needs_same_groups

    parallel = config.parallel
    is_cut_by_name = parallel.partition.startswith("type:") and parallel.stages is None
    if len(work.parts) < 2 or is_cut_by_name:
        raise NotEstimatedError("the layers of the stages are not known")
    bounds = _bounds(
        work.facts,
        parallel.pipe,
        parallel.partition,
        None if parallel.stages is None else tuple(parallel.stages),
        needs_same_groups(config),
    )
    if isinstance(bounds, Problem):
        raise NotEstimatedError(bounds.reason)
    return bounds


# a search needs the same cut with every stage of ZeRO and every micro-batch
@lru_cache(maxsize=256)
def _bounds(
    facts: tuple[LayerFacts, ...],
    pipe: int,
    partition: str,
    stages: tuple[int, ...] | None,
    same_groups: bool,
) -> Bounds | Problem:
    stage_list = None if stages is None else list(stages)
    parallel = Parallel(pipe=pipe, partition=partition, stages=stage_list)
    from framework.plan.balance import cut

    table = cut(facts, parallel, same_groups=same_groups)
    if isinstance(table, Problem):
        return table
    return table.bounds


def _of_layers(work: ModelWork, layers: Sequence[LayerWork]) -> ModelWork:
    """Return the work with the weights of some layers, and as large a share of the buffers."""
    unordered = {name for layer in layers for name in work.names_of(layer)}
    names = sorted(unordered, key=work.places.__getitem__)
    trained = {name: work.weights[name] for name in names if name in work.weights}
    frozen = {name: work.frozen[name] for name in names if name in work.frozen}
    num_trained = sum(map(prod, trained.values()))
    buffer_bytes = work.buffer_bytes * num_trained // work.num_params
    return replace(work, weights=trained, frozen=frozen, buffer_bytes=buffer_bytes)


def _is_counted_aio(section: Any) -> bool:
    """Check whether the sizes in a section `deepspeed.aio` are numbers that can be counted with."""
    if not isinstance(section, Mapping):
        return False
    sizes = [section.get("block_size", 1), section.get("intra_op_parallelism", 1)]
    return all(type(size) is int and size > 0 for size in sizes)


def _unmodelled_keys(deepspeed: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section `deepspeed` that may allocate, by their dotted names."""
    keys = deepspeed.keys() - _MODELLED - _REPORTING
    if _is_counted_aio(deepspeed.get("aio")):
        keys -= {"aio"}
    zero = deepspeed.get("zero_optimization", {})
    if isinstance(zero, Mapping):
        keys |= {f"zero_optimization.{key}" for key in zero.keys() - _HARMLESS}
    else:
        keys |= {"zero_optimization"}
    return [f"deepspeed.{key}" for key in sorted(keys)]


def _refuse_unknown(plan: Plan) -> None:
    """Raise NotEstimatedError for keys of `deepspeed` or an optimizer of unknown memory."""
    config = plan.config
    reasons = _unmodelled_keys(config.deepspeed)
    is_own = isinstance(config.optimizer, Object) or config.optimizer.own_factory() is not None
    if state_of(config.optimizer, {}) is None:
        reasons.append("optimizer: its state is not measured")
    elif is_own and state_widths(config.precision).moment == 2:
        reasons.append("optimizer: its state is measured in fp32")
    if reasons:
        raise NotEstimatedError(f"not modelled with {', '.join(reasons)}")
