"""Gradients of a loss as a few numbers each, so that two passes are compared and the gradients of
neither are kept.

The sum of squares gives a gradient's norm. Its products with some vectors of random signs are those
of every other pass, and the mean square of the differences of such products is that of the gradient
difference's norm (Johnson and Lindenstrauss; with signs: Achlioptas 2003, "Database-friendly random
projections").
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite, sqrt
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

PROJECTIONS: Final = 8
_NUMBERS_AT_ONCE: Final = 2**22


class Sketch(NamedTuple):
    """A gradient.

    Attributes:
        numbers: how many numbers it has.
        norm: its L2 norm.
        products: with the vectors of signs.
    """

    numbers: int
    norm: float
    products: tuple[float, ...]

    def distance(self, other: Sketch) -> float:
        """Estimate the L2 norm of the difference of both gradients; 0 if both are not finite."""
        if not isfinite(self.norm) and not isfinite(other.norm):
            return 0.0
        pairs = zip(self.products, other.products, strict=True)
        return sqrt(sum((one - two) ** 2 for one, two in pairs) / PROJECTIONS)


def sketched_gradients(loss: Tensor, weights: Mapping[str, Parameter]) -> dict[str, Sketch]:
    """Run the backward pass of a loss, and return the sketch of each weight's gradient; none for a
    weight without one.

    No weight gets a gradient, and no hook of DeepSpeed's runs that waits for one. Each gradient is
    freed as soon as it is sketched.

    Args:
        loss: 0-d.
        weights: those that are trained, by name.
    """
    found: dict[str, Tensor] = {}

    def note(name: str, number: int, gradient: Tensor) -> Tensor:
        found[name] = _sketch(gradient, number)
        # Stands in for the gradient until the pass has ended, in the memory of one number.
        return gradient.new_zeros(()).expand(gradient.shape)

    handles = []
    for number, (name, weight) in enumerate(weights.items()):
        hook = partial(note, name, number)
        handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]
    try:
        torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    sketches: dict[str, Sketch] = {}
    for name, numbers in found.items():
        count, square, *products = numbers.tolist()
        sketches[name] = Sketch(int(count), sqrt(square), tuple(products))
    return sketches


@torch.no_grad()
def _sketch(gradient: Tensor, number: int) -> Tensor:
    """Return count, sum of squares and products of a gradient, (2 + PROJECTIONS,) float64 on its
    device. `number`, the weight's, gives the signs.
    """
    device = gradient.device
    generator = torch.Generator(device).manual_seed(number)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    sums = torch.zeros(2 + PROJECTIONS, dtype=torch.float64, device=device)
    sums[0] = gradient.numel()
    for part in torch.split(gradient.reshape(-1), _NUMBERS_AT_ONCE):
        values = part.float()
        sums[1] += values.square().sum(dtype=torch.float64)
        for row in range(PROJECTIONS):
            bits = torch.randint(
                2, part.shape, dtype=torch.int8, device=device, generator=generator
            )
            sums[2 + row] += torch.where(bits > 0, values, -values).sum(dtype=torch.float64)
    return sums
