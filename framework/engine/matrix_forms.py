"""Classes of layers with a matrix that a tensor group can divide, and how each keeps it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from framework.models.split import ColumnLayer, ColumnLinear, RowLayer, RowLinear


@dataclass(frozen=True)
class MatrixForm:
    """How a class of layers keeps its matrix.

    Attributes:
        outputs: dimension of the matrix along which outputs are counted.
        inputs: the other dimension.
        num_outputs: attribute of the layer that counts outputs.
        num_inputs: attribute of the layer that counts inputs.
        column: class of such a layer with a part of the outputs.
        row: class of such a layer with a part of the inputs.
    """

    outputs: int
    inputs: int
    num_outputs: str
    num_inputs: str
    column: type[ColumnLayer]
    row: type[RowLayer]


_LINEAR: Final = MatrixForm(0, 1, "out_features", "in_features", ColumnLinear, RowLinear)


def matrix_form(layer: nn.Module) -> MatrixForm | None:
    """Return how a layer keeps its matrix, or None if it multiplies in a way that is not known."""
    forward = type(layer).forward
    if isinstance(layer, nn.Linear) and forward is nn.Linear.forward:
        return _LINEAR
    conv1d = _conv1d()
    if conv1d is not None and isinstance(layer, conv1d) and forward is conv1d.forward:
        from framework.models.split_conv1d import ColumnConv1D, RowConv1D

        return MatrixForm(1, 0, "nf", "nx", ColumnConv1D, RowConv1D)
    return None


def _conv1d() -> Any:
    """Return the class Conv1D of transformers, or None as long as nothing has imported it: then no
    model has such a layer.
    """
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
