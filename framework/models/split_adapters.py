"""Low-rank adapters of layers that are divided over the ranks of a tensor group.

To W x an adapter adds s B A x. Of a column layer, which has some of the outputs, A is whole and B
has the rows of these outputs: every rank computes the same A x, and has a part of its gradient. Of
a row layer, which has some of the inputs, A has the columns of these inputs and B is whole: A x is
summed over the ranks, one all-reduce of r numbers a position, and all that follows is alike on all
of them. So both halves of an adapter get the gradients that they have in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import linear

from framework.models.split import TensorPart


class CopiedLinear(nn.Linear):
    """A of a column layer: (..., in_features) to (..., r). The gradient of its outputs is summed
    over the group.
    """

    part: TensorPart

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        return self.part.copy(linear(input, self.weight))


class SummedLinear(nn.Linear):
    """A of a row layer: (..., part of in_features) to (..., r), summed over the group."""

    part: TensorPart

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        return self.part.sum(linear(input, self.weight))


class JoinedLinear(nn.Linear):
    """B of a column layer that joins its outputs: (..., r) to (..., out_features).

    Attributes:
        part: this rank's place in the tensor group.
        widths: numbers of outputs of all ranks.
    """

    part: TensorPart
    widths: Sequence[int]

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        return self.part.join(linear(input, self.weight), self.widths)


class DropoutTogether(nn.Dropout):
    """Dropout of the inputs of a column layer's adapter, which all ranks have: they drop the
    same.
    """

    part: TensorPart

    def forward(self, input: Tensor) -> Tensor:
        """Keep the shape."""
        with self.part.together():
            return super().forward(input)


class DropoutApart(nn.Dropout):
    """Dropout of the inputs of a row layer's adapter: each rank has others."""

    part: TensorPart

    def forward(self, input: Tensor) -> Tensor:
        """Keep the shape."""
        if not self.training:
            return input
        with self.part.apart():
            return super().forward(input)
