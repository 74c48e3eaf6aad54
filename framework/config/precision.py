"""`precision`: the number format of weights, activations and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from framework.config.base import OneOf, PositiveCount, Section
from framework.config.training import switch


class FP32(Section):
    """Single precision throughout."""

    dtype: Literal["fp32"] = "fp32"
    matmul: Literal["highest", "high", "medium"] = "highest"
    """torch.set_float32_matmul_precision: ``high`` lets NVIDIA GPUs use TF32 for matrix products,
    and for convolutions."""


class FP16(Section):
    """Half precision weights with an fp32 master copy in the optimizer and loss scaling. GPU
    only.
    """

    dtype: Literal["fp16"] = "fp16"
    loss_scale: Annotated[float, Field(ge=0.0)] = 0.0
    """Fixed loss scale; 0 scales dynamically: halved after an overflow, doubled after
    `loss_scale_window` good steps.
    """
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    """The first dynamic loss scale is 2 to this power."""
    loss_scale_window: PositiveCount = 1000
    """Good steps before the dynamic loss scale doubles."""
    hysteresis: PositiveCount = 2
    """Overflows before the dynamic loss scale is halved."""
    consecutive_hysteresis: bool = False
    """Refill the hysteresis after every step without overflow."""
    min_loss_scale: PositiveCount = 1
    """Floor of the dynamic loss scale; an overflow there ends the run."""
    grad_accumulation: Literal["fp32", "fp16"] | None = None
    """What the gradients of a step's micro-batches are summed in; left out: fp32 for more than 8 of
    them. At ZeRO stage 0 always fp16.
    """
    grad_reduction: Literal["fp32", "fp16"] | None = None
    """What gradients are averaged over ranks in; left out: fp32 for more than 8 ranks."""
    states: Literal["fp32", "fp16_weights"] = "fp32"
    """What the optimizer steps and keeps. ``fp16_weights``: its copy of the weights and their
    gradients in fp16, its moments in fp32; takes DeepSpeed's Adam on the host.
    """


# Sizes of linear layers that compute in fp8 are multiples of this, which `torch._scaled_mm` asks
# for.
FP8_ALIGNED: Final = 16


class FP8(Section):
    """Linear products of the repeated blocks in fp8: each operand is scaled by its largest number
    and rounded to 4 bits (8-bit floats ``e4m3fn``), and the product is in bf16 again. Weights,
    sums, norms, attention, embeddings and the output layer stay in bf16. Layers with a size that is
    no multiple of 16 do, too.
    """

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """``tensorwise``: one scale for each operand; gradients of outputs are rounded to 3 bits
    (``e5m2``), for their range. ``rowwise``: a scale for each row, a power of 2: nearer to bf16,
    and slower.
    """
    emulate: bool = False
    """Compute the same products of the rounded operands in fp32: on any device, slower than without
    fp8. For tests, and to see what fp8 makes of a loss.
    """


_FP8 = Annotated[FP8 | None, BeforeValidator(switch, json_schema_input_type=bool | FP8 | None)]


class BF16(Section):
    """bfloat16 weights, by default with an fp32 copy in the optimizer; no loss scaling."""

    dtype: Literal["bf16"] = "bf16"
    check_grad_overflow: bool = False
    """Skip a step whose gradients hold NaN or infinity. Waits for the device at every step; without
    it the run stops at the next logged step whose loss is not finite.
    """
    grad_accumulation: Literal["fp32", "bf16"] | None = None
    """What the gradients of a step's micro-batches are summed in; left out: fp32 for more than 8 of
    them, as a sum in bf16 is up to 1 % short after 128 and 20 % after 512. At ZeRO stage 0 always
    bf16.
    """
    grad_reduction: Literal["fp32", "bf16"] | None = None
    """What gradients are averaged over ranks in; left out: fp32 for more than 8 ranks."""
    states: Literal["fp32", "bf16", "bf16_weights"] = "fp32"
    """What the optimizer steps and keeps, with ZeRO. ``bf16``: its copy of the weights, their
    gradients and its moments in bf16, half the memory of fp32; small updates are lost in rounding.
    ``bf16_weights``: moments in fp32; takes DeepSpeed's Adam on the host.
    """
    fp8: _FP8 = None
    """Linear products of the blocks in fp8, or how: ``true`` scales each operand by its largest
    number. NVIDIA GPUs of compute capability 8.9 and newer, with the package torchao, and only
    compiled faster than bf16. Checkpoints are those of bf16.
    """


class Autocast(Section):
    """fp32 weights, with matrix products and convolutions in a lower precision chosen per operation
    by torch.autocast.
    """

    dtype: Literal["autocast"] = "autocast"
    compute_dtype: Literal["bf16", "fp16"] = "bf16"
    """What eligible operations compute in."""
    lower_precision_safe_modules: list[str] | None = None
    """Full class names of modules whose weights and gradients ZeRO keeps in the lower precision;
    left out: Linear, Conv1d, Conv2d, Conv3d.
    """


def fp8_of(precision: PrecisionSection) -> FP8 | None:
    """Return how products are computed in fp8; None: they are not."""
    return precision.fp8 if isinstance(precision, BF16) else None


PrecisionSection = Annotated[FP32 | FP16 | BF16 | Autocast, OneOf("dtype")]


@dataclass(frozen=True)
class StateWidths:
    """Bytes of a number that the optimizer steps, and of one that it keeps beside it.

    Attributes:
        weight: of the copy of a weight that is stepped, and of the gradient that it is stepped by.
        moment: of a number of the optimizer's state.
    """

    weight: int = 4
    moment: int = 4


def state_widths(precision: PrecisionSection) -> StateWidths:
    """Return the widths that `precision.states` asks for."""
    states = getattr(precision, "states", "fp32")
    if states == "bf16":
        return StateWidths(weight=2, moment=2)
    if states in ("bf16_weights", "fp16_weights"):
        return StateWidths(weight=2)
    return StateWidths()
