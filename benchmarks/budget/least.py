"""The least time of each part of a step on one device: its work, as the planner counts it, over the
rates of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from framework.plan.devices import Machine
from framework.plan.fitted_rates import RATES
from framework.plan.parallelism import Parallelism
from framework.plan.work import LayerWork, ModelWork

PRODUCTS: Final = "products of the blocks"
ATTENTION: Final = "attention"
ELEMENTWISE: Final = "elementwise"
LOSS: Final = "output layer and loss"
OPTIMIZER: Final = "optimizer"
LOSS_PASSES: Final = "further passes of the loss"
PASSES: Final = "DeepSpeed's passes"
COMMUNICATION: Final = "communication"
INPUT: Final = "input"
HOST: Final = "host gaps"
PARTS: Final = (
    PRODUCTS,
    ATTENTION,
    ELEMENTWISE,
    LOSS,
    LOSS_PASSES,
    OPTIMIZER,
    PASSES,
    COMMUNICATION,
    INPUT,
    HOST,
)
# Products of attention in its backward pass for each one of its forward pass: a fused kernel
# computes the scores again and has four products of its own, to two of the forward pass (Dao 2023,
# "FlashAttention-2", 3.1).
_ATTENTION_BACKWARD: Final = 2.5
# What no step needs: a fused kernel reads each logit once and writes its gradient.
_NOT_NEEDED: Final = (LOSS_PASSES, PASSES)
# The fp32 weight with both moments, read and written by Adam.
_ADAM_BYTES: Final = 2 * 12


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        name: one of `PARTS`.
        flops: floating-point operations of its products, of a whole step.
        num_bytes: bytes that it reads and writes, of a whole step.
        seconds: of both at the device's rates, one after the other.
        is_needed: whether a step needs it; else it is what the engine does besides.
    """

    name: str
    flops: float
    num_bytes: float
    seconds: float
    is_needed: bool = True


def least_parts(work: ModelWork, by: Parallelism, machine: Machine) -> list[Part]:
    """Return the parts of a step on one device, in the order of `PARTS`, without those of no work.

    Args:
        work: of the model, on a micro-batch of the plan's size.
        by: how it is distributed: over one device.
        machine: its `matmul_flops_per_second` and its memory's bandwidth are the rates.

    Raises:
        ValueError: there are several devices, or a rate is not known.
    """
    if by.num_devices != 1:
        raise ValueError("the budget is one of a step on one device")
    flops_rate = machine.device.matmul_flops_per_second
    memory_rate = machine.device.memory_bytes_per_second
    if not flops_rate or not memory_rate:
        raise ValueError(f"rates of products and memory are not known: {machine.device.name}")
    flops, moved = _work_of_passes(work, by)
    moved[OPTIMIZER] = work.num_params * _optimizer_bytes(by)
    if by.joins_gradients:
        moved[PASSES] = work.num_params * RATES.joined_bytes
    parts = []
    for name in PARTS:
        part_flops = flops.get(name, 0.0)
        num_bytes = moved.get(name, 0.0)
        if part_flops or num_bytes:
            seconds = part_flops / flops_rate + num_bytes / memory_rate
            is_needed = name not in _NOT_NEEDED
            parts.append(Part(name, part_flops, num_bytes, seconds, is_needed))
    return parts


def _work_of_passes(work: ModelWork, by: Parallelism) -> tuple[dict[str, float], dict[str, float]]:
    """Return the operations and the bytes of all passes of a step, by part."""
    flops: dict[str, float] = {}
    moved: dict[str, float] = {}
    passes = by.accumulation * by.micro_size / work.num_samples
    for layer, is_output in _with_place(work):
        again = 0.0 if is_output else by.recomputed
        count = passes * layer.count
        products = _product_flops(work, layer)
        of_attention = layer.flops - layer.masked_flops - products
        kind = LOSS if is_output else PRODUCTS
        backward = 1 + _trained_share(work, layer)
        _add(flops, kind, count * products * (1 + again + backward))
        scores = count * of_attention * (1 + again + _ATTENTION_BACKWARD)
        _add(flops, ATTENTION, scores)
        num_bytes = count * layer.moved_bytes * (2 + again)
        if is_output:
            least = min(count * _logit_bytes(work, layer, by), num_bytes)
            _add(moved, LOSS, least)
            _add(moved, LOSS_PASSES, num_bytes - least)
        else:
            _add(moved, ELEMENTWISE, num_bytes)
    return flops, moved


def _logit_bytes(work: ModelWork, layer: LayerWork, by: Parallelism) -> float:
    """Return the bytes of an output layer's logits, read once, and of their gradients, written
    once; of a layer without products what it moves.
    """
    if not layer.flops:
        return 2 * layer.moved_bytes
    inputs = [(work.weights.get(name) or work.frozen[name])[-1] for name in work.names_of(layer)]
    return 2 * by.weight_bytes * layer.flops / (2 * max(inputs, default=1))


def _with_place(work: ModelWork) -> list[tuple[LayerWork, bool]]:
    """Return each part of the model, and whether it comes after the last one that is repeated: the
    output layer, the loss, and the norm before them.
    """
    repeated = [number for number, layer in enumerate(work.parts) if layer.count > 1]
    last = max(repeated, default=len(work.parts) - 2)
    return [(layer, number > last) for number, layer in enumerate(work.parts)]


def _matrices(work: ModelWork, layer: LayerWork) -> tuple[int, int]:
    """Return the elements of a layer's matrices, all and trained ones."""
    elements = 0
    trained = 0
    for name in work.names_of(layer):
        shape = work.weights.get(name) or work.frozen[name]
        if len(shape) > 1:
            elements += prod(shape)
            if name in work.weights:
                trained += prod(shape)
    return elements, trained


def _product_flops(work: ModelWork, layer: LayerWork) -> float:
    """Return the forward operations of a layer's products with weights; those beyond are
    attention's. A layer of images has no attention.
    """
    if work.num_tokens is None:
        return layer.flops
    elements, _ = _matrices(work, layer)
    return min(2 * work.num_tokens * elements, layer.flops - layer.masked_flops)


def _trained_share(work: ModelWork, layer: LayerWork) -> float:
    """Return the share of a layer's matrices that have a gradient of their own: the others need
    one product in the backward pass and not two.
    """
    elements, trained = _matrices(work, layer)
    if not elements:
        return 1.0
    return trained / elements


def _optimizer_bytes(by: Parallelism) -> float:
    """Return the bytes of Adam's step for one weight: its state, the gradient once for the norm and
    once for the step, and the weight in half precision, which is written.
    """
    written = by.weight_bytes if by.weight_bytes < 4 else 0
    return _ADAM_BYTES + 2 * by.gradient_bytes + written


def _add(total: dict[str, float], name: str, amount: float) -> None:
    total[name] = total.get(name, 0.0) + amount
