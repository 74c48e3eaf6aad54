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
RECOMPUTE: Final = "training.recompute_every"
HOW: Final = "training.recompute"
ACTIVATIONS: Final = "training.offload_activations"
MLP_TILE: Final = "training.mlp_tile"
PIPE: Final = "parallel.pipe"
TENSOR: Final = "parallel.tensor"
SEQUENCE: Final = "parallel.sequence"
MICRO: Final = "batch.micro_size"
ACCUMULATION: Final = "batch.accumulation_steps"
GLOBAL: Final = "batch.global_size"
LENGTH: Final = "data.sequence_length"
POSITIONS: Final = "model.max_positions"
SIZES: Final = (PIPE, TENSOR, SEQUENCE)
FOR_LENGTH: Final[Settings] = {HOW: None, ACTIVATIONS: False, MLP_TILE: 0}
"""Keys of memory for long sequences, with their plainest values; few strategies have them."""
STRATEGY: Final = (STAGE, OFFLOAD, RECOMPUTE, *FOR_LENGTH, *SIZES)
USUAL: Final[Settings] = {OFFLOAD: "none", RECOMPUTE: 0, **FOR_LENGTH, **dict.fromkeys(SIZES, 1)}
"""The plainest value of each key of a strategy but the stage."""
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
    """

    config: RunConfig
    cluster: Cluster
    target: Hardware = UNKNOWN
    free: Set[str] = EVERYTHING
    num_train_samples: int | None = None
    work: ModelWork | None = None


def all_strategies(request: Request, *, for_length: bool = False) -> Iterator[Settings]:
    """Yield every combination of what is free beside the batch; `for_length`: those that take time
    to give memory to long sequences, for a run that fits in no other way.
    """
    stages: Sequence[int] = [request.config.zero.stage]
    if STAGE in request.free:
        stages = range(4)
    recomputes = _for_length(request) if for_length else _recomputes(request)
    choices = product(stages, _offloads(request), recomputes, _sizes(request))
    for stage, device, recompute, sizes in choices:
        yield {STAGE: stage, OFFLOAD: device} | recompute | sizes


def _offloads(request: Request) -> list[str]:
    """List the devices to try for the optimizer: only the drive if the config names that."""
    device = request.config.zero.offload_optimizer.device
    if OFFLOAD in request.free and device != "nvme":
        return ["none", "cpu"]
    return [device]


def _recomputes(request: Request) -> list[dict[str, Any]]:
    """List the layers of a group that is recomputed: none, one, and the config's."""
    every = request.config.training.recompute_every
    if RECOMPUTE not in request.free:
        return [{RECOMPUTE: every}]
    return [{RECOMPUTE: number} for number in sorted({0, 1, every})]


def _for_length(request: Request) -> list[dict[str, Any]]:
    """List what gives most memory to long sequences: every layer is recomputed, with inputs of
    layers on the host, and then also with perceptrons in tiles.
    """
    if not {RECOMPUTE, HOW, ACTIVATIONS} <= request.free:
        return []
    on_host = {RECOMPUTE: 1, HOW: "full", ACTIVATIONS: True}
    choices = [on_host]
    # The work of a model of the user's own is not known in tiles.
    is_known = getattr(request.config.model, "kind", "") == "gpt" and request.work is None
    if MLP_TILE in request.free and is_known:
        choices.append(on_host | {MLP_TILE: _POSITIONS_OF_A_TILE})
    return choices


def _sizes(request: Request) -> Iterator[dict[str, int]]:
    """Yield parallel sizes: as in the config, and then with one of them changed at a time.

    Tensor and sequence groups stay on a host: what they send between is on the way of every block.
    """
    config = request.config
    sizes = {key: getattr(config.parallel, key.rpartition(".")[2]) for key in SIZES}
    yield sizes
    for changed in _changed_sizes(request, sizes):
        if changed != sizes:
            yield changed


def _changed_sizes(request: Request, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield parallel sizes with one of them changed, and the others that are free at 1."""
    config = request.config
    plain = {key: 1 if key in request.free else size for key, size in sizes.items()}
    devices = request.cluster.devices_per_host
    choices = {
        PIPE: _pipes(config, request.cluster),
        TENSOR: _sizes_within_host(config, devices),
        SEQUENCE: _parts_of_sequences(config, devices),
    }
    for key, key_sizes in choices.items():
        if key in request.free:
            yield from (plain | {key: size} for size in key_sizes)


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
        yield from _batches_of(share, steps, batch.micro_size)
    else:
        yield from _growing_batches(batch, strategy[PIPE], grows=grows)


def _growing_batches(batch: Batch, pipe: int, *, grows: bool) -> Iterator[Settings]:
    """Yield micro-batches from one sample on, up to the config's if they do not grow beyond."""
    steps = batch.accumulation_steps or _usual_steps(pipe)
    most = batch.micro_size or DEFAULT_MICRO_SIZE
    if grows:
        most = _LARGEST_MICRO
    for size in _sizes_to_try(most, batch.micro_size):
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
