"""Memory of an optimizer: the state that it keeps of each weight, and what it takes in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from framework.config.base import Factory, Object
from framework.config.optimizer import (
    COMPARED_AT_ONCE,
    COMPARED_ON_CPU,
    MOMENT_BLOCK,
    NUMBERS_AT_ONCE,
    SGD,
    Adafactor,
    Adagrad,
    AdamW,
    AdamW8bit,
    Lamb,
    Lion,
    Muon,
    OptimizerSection,
    ScheduleFree,
)
from framework.plan.operations import Shape
from framework.plan.optimizer_state import OptimizerState

_FP32: Final = 4
# of AdamW in 8 bits, for each number that it steps at once: a squared gradient, two moments, codes
_BYTES_AT_ONCE: Final = 20


def state_of(optimizer: OptimizerSection, shapes: Mapping[str, Shape]) -> OptimizerState | None:
    """Return the optimizer's state per element, as the mean over these weights.

    None for an optimizer of the user's own that has not been measured.
    """
    if isinstance(optimizer, Object):
        return None
    factory = optimizer.own_factory()
    if factory is not None:
        return _kept_state(factory)
    return OptimizerState(_FP32 * _numbers_per_element(optimizer, shapes))


def _kept_state(factory: Factory) -> OptimizerState | None:
    from framework.plan.measured import kept_state  # a rank with a named optimizer has no need

    return kept_state(factory)


def _numbers_per_element(optimizer: OptimizerSection, shapes: Mapping[str, Shape]) -> float:
    """Return the fp32 numbers that a named optimizer keeps of an element, on average."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    if isinstance(optimizer, Muon | Adafactor) and shapes:
        return _mean_numbers(optimizer, shapes)
    if isinstance(optimizer, Adagrad | Lion):
        return 1
    if isinstance(optimizer, AdamW8bit):
        return 2 * (1 + _FP32 / MOMENT_BLOCK) / _FP32
    return 2


def _mean_numbers(optimizer: Muon | Adafactor, shapes: Mapping[str, Shape]) -> float:
    num_numbers = sum(_state_numbers(name, shape, optimizer) for name, shape in shapes.items())
    num_params = sum(map(prod, shapes.values()))
    return num_numbers / num_params


def _state_numbers(name: str, shape: Shape, optimizer: Muon | Adafactor) -> int:
    """Count the numbers kept of a weight: Adafactor keeps means of a matrix's rows and columns."""
    if isinstance(optimizer, Muon):
        from framework.config.groups import stepped_by_muon

        if stepped_by_muon(name, shape, optimizer):
            return prod(shape)
        return 2 * prod(shape)
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def step_bytes_per_element(optimizer: OptimizerSection, *, is_on_cpu: bool) -> int:
    """Return the bytes that a step takes for each element that is stepped at once.

    torch's loop over weights, on CPU, holds two copies of one weight. Its `foreach` form, on GPUs,
    holds one copy of all weights. Fused kernels hold none.

    Args:
        optimizer: section of the run config.
        is_on_cpu: whether the step runs on the CPU.
    """
    factory = optimizer.own_factory()
    if factory is not None:
        state = _kept_state(factory)
        return state.step_bytes_per_element if state else 0
    if _is_fused(optimizer, is_on_cpu=is_on_cpu):
        return 0
    decayed = 0
    # Adam, which derives from AdamW, adds the decay to gradients: one more copy
    has_decoupled_decay = type(optimizer) in (AdamW, Adafactor, Lamb, Lion, ScheduleFree)
    if not has_decoupled_decay and optimizer.weight_decay:  # type: ignore[union-attr]
        decayed = _FP32
    if isinstance(optimizer, AdamW8bit):
        return 0  # see `bytes_of_blocks`
    if isinstance(optimizer, SGD):
        return decayed
    if is_on_cpu and isinstance(optimizer, AdamW):
        return decayed + 2 * _FP32
    return decayed + _FP32


def _is_fused(optimizer: object, *, is_on_cpu: bool) -> bool:
    if isinstance(optimizer, AdamW):
        is_fused = optimizer.is_fused(is_on_cuda=not is_on_cpu)
        return is_fused or optimizer.implementation == "deepspeed"
    return isinstance(optimizer, Lion) and not is_on_cpu


def bytes_of_blocks(size: int) -> int:
    """Return the bytes that a step of AdamW in 8 bits takes beside its state, where the largest
    tensor that it steps has this size: it steps `NUMBERS_AT_ONCE` at a time.
    """
    return _BYTES_AT_ONCE * min(size, NUMBERS_AT_ONCE)


def compared_bytes(size: int, width: int, *, is_cpu: bool) -> int:
    """Return the bytes in which a step begins that carries what was written into weights into their
    fp32 copies (`engine/written_weights.py`): both are joined piece by piece, and what they become
    is made beside them, by way of a weight in fp32 and a flag.

    Args:
        size: elements of all weights that are stepped.
        width: bytes of an element of a weight in half precision.
        is_cpu: whether they are compared on processors.
    """
    at_once = COMPARED_ON_CPU if is_cpu else COMPARED_AT_ONCE
    return (width + 3 * _FP32 + 1) * min(size, at_once)


def muon_copies(muon: Muon, weights: Mapping[str, Shape], *, is_cpu: bool) -> int:
    """Return the bytes of a step of Muon at its fullest.

    A matrix is there in fp32 and twice in bf16, with two of its products with itself. The other
    weights are stepped as by AdamW.
    """
    from framework.config.groups import stepped_by_muon

    matrices = []
    others = []
    for name, shape in weights.items():
        if stepped_by_muon(name, shape, muon):
            matrices.append(8 * prod(shape) + 4 * min(shape[-2:]) ** 2)
        else:
            others.append(prod(shape))
    if is_cpu:
        other_bytes = 2 * _FP32 * max(others, default=0)
    else:
        other_bytes = _FP32 * sum(others)
    return max([other_bytes, *matrices])


def muon_share_copies(
    muon: Muon,
    weights: Mapping[str, Shape],
    *,
    stage: int,
    ranks: int,
    parts: Sequence[tuple[int, bool]],
    is_cpu: bool,
) -> int:
    """Return the bytes of a step of Muon at its fullest where ranks have shares of the weights.

    Args:
        muon: the config's section.
        weights: shapes by name.
        stage: of ZeRO.
        ranks: that have the shares.
        parts: elements that are stepped at once, and whether Muon steps them.
        is_cpu: whether the step runs on the CPU.
    """
    from framework.plan.muon import exchange_bytes, muon_matrices  # most runs have no need

    exchanged = exchange_bytes(muon_matrices(muon, weights), stage=stage, ranks=ranks)
    most = 0
    for size, is_by_muon in parts:
        if is_by_muon:
            # the next momentum, and its copy in bf16, which stays
            computed = (_FP32 + 2) * size if muon.nesterov else 2 * size
            copies = max(computed, 2 * size + exchanged)
        elif is_cpu:
            copies = 2 * _FP32 * size
        else:
            copies = _FP32 * size
        most = max(most, copies)
    return most
