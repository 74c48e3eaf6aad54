"""Work of a model in one micro-batch, part by part: what it computes, moves and keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from framework.plan.weights import Shape


@dataclass(frozen=True)
class Part:
    """One part of a model, such as a transformer block, in the forward pass of one micro-batch on one rank.

    Attributes:
        name: of the layer, as `layers()` names it where the model has such.
        num_params: trained elements; those that it shares with an earlier part are counted there.
        flops: floating-point operations of its matrix products and convolutions; a multiplication with an addition is
            two.
        moved_bytes: bytes that all its other operations read and write.
        saved_bytes: bytes that autograd keeps for the backward pass, without weights, and without what an earlier part
            keeps already.
        split_bytes: those of `saved_bytes` that tensor parallelism splits.
        peak_bytes: bytes at most at any moment within it, beside what it keeps in the end.
        output_bytes: bytes of its output: what recomputation keeps, and a pipeline sends.
        count: so many parts alike, one after the other; every figure is of one of them.
    """

    name: str
    num_params: int
    flops: int
    moved_bytes: int
    saved_bytes: int
    split_bytes: int
    peak_bytes: int
    output_bytes: int
    count: int = 1


@dataclass(frozen=True)
class ModelWork:
    """A model and its loss, on one micro-batch.

    Attributes:
        weights: name -> shape of every trained weight, in the model's order, shared ones once.
        buffer_bytes: bytes of what is kept beside weights, such as statistics of batch norms.
        parts: in the order in which they run; the loss is the last one.
        num_samples: of the micro-batch.
        num_tokens: of the micro-batch; None for models that know none.
        is_traced: whether it was found by a pass over the model; else by closed form.
    """

    weights: Mapping[str, Shape]
    buffer_bytes: int
    parts: tuple[Part, ...]
    num_samples: int
    num_tokens: int | None = None
    is_traced: bool = False
