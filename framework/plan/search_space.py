"""What a search may choose: keys of a run config, and every combination of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.config.training import Batch
from framework.plan.cluster import Cluster
from framework.plan.hardware import UNKNOWN, Hardware
from framework.plan.layers import num_layers
from framework.plan.layout import DEFAULT_MICRO_SIZE
from framework.plan.work import ModelWork

Settings = Mapping[str, Any]
# What may be chosen: dotted keys of a run config.
STAGE: Final = "zero.stage"
OFFLOAD: Final = "zero.offload_optimizer.device"
PARAMS: Final = "zero.offload_param.device"
KERNEL: Final = "optimizer.implementation"
RECOMPUTE: Final = "training.recompute_every"
HOW: Final = "training.recompute"
ACTIVATIONS: Final = "training.offload_activations"
MLP_TILE: Final = "training.mlp_tile"
PIPE: Final = "parallel.pipe"
TENSOR: Final = "parallel.tensor"
SEQUENCE: Final = "parallel.sequence"
EXPERT: Final = "parallel.expert"
MICRO: Final = "batch.micro_size"
ACCUMULATION: Final = "batch.accumulation_steps"
GLOBAL: Final = "batch.global_size"
LENGTH: Final = "data.sequence_length"
POSITIONS: Final = "model.max_positions"
SIZES: Final = (PIPE, TENSOR, SEQUENCE)
"""Sizes of ranks that train on the same samples."""
FOR_LENGTH: Final[Settings] = {HOW: None, ACTIVATIONS: False, MLP_TILE: 0}
"""Keys of memory for long sequences, with their plainest values; few strategies have them."""
SELDOM_SET: Final[Settings] = {PARAMS: "none", KERNEL: "auto", EXPERT: 1, **FOR_LENGTH}
"""Keys that few strategies set, with their defaults."""
STRATEGY: Final = (STAGE, OFFLOAD, RECOMPUTE, *SIZES, *SELDOM_SET)
USUAL: Final[Settings] = {OFFLOAD: "none", RECOMPUTE: 0, **SELDOM_SET, **dict.fromkeys(SIZES, 1)}
"""The plainest value of each key of a strategy but the stage."""
WITHOUT_BATCH: Final = frozenset({STAGE, OFFLOAD, PARAMS, KERNEL, RECOMPUTE, *FOR_LENGTH})
"""Keys of a strategy that leave every rank its batch."""
EVERYTHING: Final = frozenset({*STRATEGY, MICRO, ACCUMULATION})
_LARGEST_MICRO: Final = 4096
# Micro-batches of a step for each stage of a pipeline, where nothing fixes them: a stage then waits
# at most a fifth of the time.
_PER_STAGE: Final = 4
# Positions of a perceptron's tile: with fewer, sums of the weights' gradients take the time.
_POSITIONS_OF_A_TILE: Final = 4096


@dataclass(frozen=True)
class Request:
    """Question to a search.

    Attributes:
        config: of the run; keys that are not `free` stay as they are.
        cluster: where it is to run.
        target: its devices; left out: not known.
        free: dotted keys that may be chosen. `batch.global_size` stays if it is set; else
            micro-batches grow as long as doubling them gains 2 %.
        num_train_samples: size of the training data, if it is known.
        work: of a model of the user's own, on any micro-batch.
        is_brief: beside the config's sizes try those alone that have one of them above 1.
    """

    config: RunConfig
    cluster: Cluster
    target: Hardware = UNKNOWN
    free: Set[str] = EVERYTHING
    num_train_samples: int | None = None
    work: ModelWork | None = None
    is_brief: bool = False


def all_strategies(request: Request, *, for_length: bool = False) -> Iterator[Settings]:
    """Yield every combination of what is free beside the batch, with the same sizes and stage one
    after the other, the plainest first; `for_length`: those that take time to give memory to
    long sequences, for a run that fits in no other way.
    """
    stages: Sequence[int] = [request.config.zero.stage]
    if STAGE in request.free:
        stages = range(4)
    recomputes = _for_length(request) if for_length else _recomputes(request)
    for sizes, stage in product(_sizes(request), stages):
        for offload, recompute in product(_offloads(request, stage), recomputes):
            yield {STAGE: stage} | offload | recompute | sizes


def is_combined(strategy: Settings) -> bool:
    """Check whether ranks share the model in two ways or more."""
    num_ways = 0
    for key in (*SIZES, EXPERT):
        if strategy.get(key, 1) > 1:
            num_ways += 1
    return num_ways > 1


def unusual(settings: Settings) -> Settings:
    """Return the settings of a strategy that differ from the usual ones."""
    return {
        key: value for key, value in settings.items() if key in STRATEGY and USUAL.get(key) != value
    }


def _offloads(request: Request, stage: int) -> list[dict[str, str]]:
    """List what lies on the host: nothing, the optimizer, and at stage 3 then the weights too; only
    what the config names where that is a drive.
    """
    zero = request.config.zero
    devices: dict[str, str] = {
        OFFLOAD: zero.offload_optimizer.device,
        PARAMS: zero.offload_param.device,
    }
    is_free = {key: key in request.free and devices[key] != "nvme" for key in devices}
    optimizers = [devices[OFFLOAD]]
    if is_free[OFFLOAD]:
        optimizers = ["none", "cpu"]
    choices = []
    for device in optimizers:
        choice = {OFFLOAD: device}
        if device == "cpu" and _has_host_kernel(request):
            choice[KERNEL] = "deepspeed"
        choices.append(choice)
    if not is_free[PARAMS]:
        return choices
    choices = [choice | {PARAMS: "none"} for choice in choices]
    if stage == 3:
        choices.append(choices[-1] | {PARAMS: "cpu"})
    return choices


def _has_host_kernel(request: Request) -> bool:
    """Check whether DeepSpeed's kernel may step the optimizer on the host, which is several times
    faster there; a kernel that the config names stays.
    """
    return KERNEL in request.free and (
        getattr(request.config.optimizer, "implementation", "") == "auto"
    )


def _recomputes(request: Request) -> list[dict[str, Any]]:
    """List the layers of a group that is recomputed: none, one, and the config's."""
    every = request.config.training.recompute_every
    if RECOMPUTE not in request.free:
        return [{RECOMPUTE: every}]
    numbers = {0, every}
    if _can_recompute(request):
        numbers.add(1)
    return [{RECOMPUTE: number} for number in sorted(numbers)]


def _can_recompute(request: Request) -> bool:
    return request.work is None or request.work.can_recompute


def _for_length(request: Request) -> list[dict[str, Any]]:
    """List what gives most memory to long sequences: every layer is recomputed, with inputs of
    layers on the host, and then also with perceptrons in tiles.
    """
    if not {RECOMPUTE, HOW, ACTIVATIONS} <= request.free or not _can_recompute(request):
        return []
    on_host = {RECOMPUTE: 1, HOW: "full", ACTIVATIONS: True}
    choices = [on_host]
    # The work of a model of the user's own is not known in tiles.
    is_known = getattr(request.config.model, "kind", "") == "gpt" and request.work is None
    if MLP_TILE in request.free and is_known:
        choices.append(on_host | {MLP_TILE: _POSITIONS_OF_A_TILE})
    return choices


def _sizes(request: Request) -> Iterator[dict[str, int]]:
    """Yield parallel sizes: as in the config, then with one of them above 1, then with several.

    Tensor and sequence groups stay on a host, together too: what they send between is on the way of
    every block.
    """
    config = request.config
    parallel = config.parallel
    given = {PIPE: parallel.pipe, TENSOR: parallel.tensor, SEQUENCE: parallel.sequence}
    if getattr(config.model, "moe", None) or EXPERT in config.auto:
        given[EXPERT] = parallel.expert
    yield given
    choices = {key: _choices_of_size(request, key, size) for key, size in given.items()}
    all_sizes = [dict(zip(given, sizes, strict=True)) for sizes in product(*choices.values())]
    for sizes in sorted(all_sizes, key=is_combined):
        is_left_out = request.is_brief and is_combined(sizes)
        if sizes != given and not is_left_out and _goes_together(request, sizes):
            yield sizes


def _choices_of_size(request: Request, key: str, size: int) -> list[int]:
    """List the values of a parallel size, 1 first; the config's alone if it is not free."""
    config = request.config
    devices = request.cluster.devices_per_host
    if key not in request.free:
        return [size]
    if key == PIPE:
        sizes = _pipes(config, request.cluster)
    elif key in (TENSOR, SEQUENCE) and request.work is not None:
        sizes = _sizes_traced(request.work, key)
    elif key == TENSOR:
        sizes = _sizes_within_host(config, devices)
    elif key == SEQUENCE:
        sizes = _parts_of_sequences(config, devices)
    else:
        sizes = _parts_of_experts(config, request.cluster)
    return sorted({1, *sizes})


def _goes_together(request: Request, sizes: Mapping[str, int]) -> bool:
    """Check whether several sizes above 1 go together: a pass over the user's model was made for
    them, the sizes divide the ranks and what the search chose inside a host its devices, and the
    samples of a step divide over the replicas. One size alone is left to the rules, which give the
    reason.
    """
    if not is_combined(sizes):
        return True
    inside = sizes[TENSOR] * sizes[SEQUENCE]
    work = request.work
    if work is not None and inside > 1 and work.of_rank(sizes[TENSOR], sizes[SEQUENCE]) is None:
        return False
    free = request.free & {TENSOR, SEQUENCE}
    if free and request.cluster.devices_per_host % inside:
        return False
    replicas, remainder = divmod(request.cluster.world_size, prod(sizes[key] for key in SIZES))
    samples = request.config.batch.global_size
    return not remainder and (samples is None or samples % replicas == 0)


def _parts_of_experts(config: RunConfig, cluster: Cluster) -> list[int]:
    """List the powers of two that divide the experts of the model's mixtures and the ranks."""
    moe = getattr(config.model, "moe", None)
    if not moe:
        return []
    ranks = cluster.world_size
    return [
        size
        for size in powers_of_two(moe.num_experts)
        if not (moe.num_experts % size or ranks % size)
    ]


def sizes_of_groups(config: RunConfig, cluster: Cluster, free: Set[str]) -> list[tuple[int, int]]:
    """List the sizes of tensor and sequence groups, in pairs, that a search tries with a model of
    the user's own. Each takes a pass over the model: those that are free are not tried together.
    """
    devices = cluster.devices_per_host
    within_host = [size for size in powers_of_two(devices) if devices % size == 0]
    tensors = [config.parallel.tensor]
    sequences = [config.parallel.sequence]
    if TENSOR in free:
        tensors = sorted({*tensors, *within_host})
    if SEQUENCE in free:
        sequences = sorted({*sequences, *within_host})
    pairs = []
    for tensor, sequence in product(tensors, sequences):
        is_alone = 1 in (tensor, sequence) or 1 in (len(tensors), len(sequences))
        if is_alone and devices % (tensor * sequence) == 0:
            pairs.append((tensor, sequence))
    return pairs


def _sizes_traced(work: ModelWork, key: str) -> list[int]:
    """List the sizes of the groups that a pass over the model was made for."""
    if key == TENSOR:
        return [share.tensor for share in work.of_ranks]
    return [share.sequence for share in work.of_ranks]


def _sizes_within_host(config: RunConfig, devices: int) -> list[int]:
    """List the powers of two that divide the devices of a host and the model's heads."""
    heads = int(getattr(config.model, "num_kv_heads", 0) or getattr(config.model, "num_heads", 1))
    return [
        size for size in powers_of_two(devices) if size > 1 and not (devices % size or heads % size)
    ]


def _parts_of_sequences(config: RunConfig, devices: int) -> list[int]:
    """List the powers of two that divide the devices of a host and the positions of sequences;
    where they are more than heads, a ring has the rest.
    """
    length = getattr(config.data, "sequence_length", None)
    if not isinstance(length, int) or not hasattr(config.model, "num_heads"):
        return _sizes_within_host(config, devices)
    return [
        size
        for size in powers_of_two(devices)
        if size > 1 and not (devices % size or length % size)
    ]


def _pipes(config: RunConfig, cluster: Cluster) -> list[int]:
    """List the numbers of stages that divide the ranks and that the model has layers for; the
    config's own if the layers are not known.
    """
    most = min(num_layers(config.model) or 1, cluster.world_size)
    divisors = {pipe for pipe in range(1, most + 1) if cluster.world_size % pipe == 0}
    return sorted(divisors | {config.parallel.pipe})


def all_batches(request: Request, strategy: Settings, *, grows: bool) -> Iterator[Settings]:
    """Yield micro-batches and their number in a step, the smallest first; no settings if they are
    not free. Whether they divide is checked by the layout.

    `grows`: without a global size, micro-batches larger than the config's are tried.
    """
    batch = request.config.batch
    if MICRO not in request.free:
        yield {}
        return
    if batch.global_size is not None:
        steps = None if ACCUMULATION in request.free else batch.accumulation_steps
        ranks_per_sample = prod(strategy[key] for key in SIZES)
        share = max(batch.global_size * ranks_per_sample // request.cluster.world_size, 1)
        yield from _batches_of(share, steps, batch.fixed_micro_size)
    else:
        yield from _growing_batches(batch, strategy[PIPE], grows=grows)


def _growing_batches(batch: Batch, pipe: int, *, grows: bool) -> Iterator[Settings]:
    """Yield micro-batches from one sample on, up to the config's if they do not grow beyond."""
    steps = batch.accumulation_steps or _usual_steps(pipe)
    most = batch.fixed_micro_size or DEFAULT_MICRO_SIZE
    if grows:
        most = _LARGEST_MICRO
    for size in _sizes_to_try(most, batch.fixed_micro_size):
        yield {MICRO: size, ACCUMULATION: steps}


def _sizes_to_try(most: int, micro_size: int | None) -> list[int]:
    """List the powers of two up to a size, and the micro-batch of the config."""
    sizes = set(powers_of_two(most))
    if micro_size:
        sizes.add(micro_size)
    return sorted(sizes)


def _usual_steps(pipe: int) -> int:
    """Return the micro-batches of a step, where nothing fixes them."""
    if pipe == 1:
        return 1
    return _PER_STAGE * pipe


def _batches_of(share: int, steps: int | None, micro_size: int | None) -> Iterator[Settings]:
    """Yield the divisions of `share`, a rank's samples of a step, into micro-batches; into `steps`
    of them if that is fixed.
    """
    if steps is not None:
        yield {MICRO: max(share // steps, 1), ACCUMULATION: steps}
        return
    for size in sorted({*_sizes_to_try(share, micro_size), share}):
        if share % size == 0:
            yield {MICRO: size, ACCUMULATION: share // size}


def powers_of_two(most: int) -> Iterator[int]:
    """Yield the powers of two up to a size."""
    size = 1
    while size <= most:
        yield size
        size *= 2
