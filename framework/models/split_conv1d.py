"""`Conv1D` of transformers, GPT-2's linear layer, divided over the ranks of a tensor group.

Its matrix is (inputs, outputs), where that of `nn.Linear` is (outputs, inputs).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from framework.models.split import ColumnLayer, DividedLayer, RowLayer


class DividedConv1D(DividedLayer, Conv1D):
    """`Conv1D` with a rank's part of its matrix."""

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with this rank's part, (..., its inputs) to (..., its outputs)."""
        return linear(input, self.weight.t(), bias)


class ColumnConv1D(ColumnLayer, DividedConv1D):
    """`Conv1D` with this rank's part of the outputs."""


class RowConv1D(RowLayer, DividedConv1D):
    """`Conv1D` with this rank's part of the inputs."""
