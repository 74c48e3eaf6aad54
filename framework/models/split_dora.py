"""DoRA of layers that are divided over the ranks of a tensor group: the length of each row of the
adapted weight is trained.

A rank of a column layer has whole rows, and their lengths; of a row layer it has a part of every
row, and squares are summed over the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils.integrations import gather_params_ctx
from torch import Tensor, nn
from torch.nn.functional import linear

from framework.models.split import ColumnLinear, RowLinear, TensorPart


class ColumnDora(DoraLinearLayer):
    """peft's layer, for the rows of this rank."""

    part: TensorPart

    def forward(
        self, x: Tensor, *, base_layer: Any, base_result: Tensor | None = None, **named: Any
    ) -> Tensor:
        """Return what is added to the outputs of `base_layer`, of the same shape.

        Without `base_result`, as with dropout, the product of `x` with the frozen weight is made.
        """
        if base_result is None:
            copied = self.part.copy(x) if base_layer.copies else x
            base_result = linear(copied, base_layer.weight, base_layer.bias)
        added: Tensor = super().forward(  # type: ignore[no-untyped-call]
            x, base_layer=base_layer, base_result=base_result, **named
        )
        return added


class RowDora(DoraLinearLayer):
    """peft's layer where this rank holds a part of each row."""

    part: TensorPart

    def get_lora_weight(
        self,
        lora_A: Any,  # noqa: N803  # peft's names
        lora_B: Any,  # noqa: N803
        adapter_name: str | None = None,
    ) -> Tensor:
        """Return this rank's part of B A, without a gradient."""
        product: Tensor = lora_B.weight.detach() @ lora_A.weight.detach()
        return product

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """Return the lengths (out_features,) of whole rows of W + `scaling` x B A. Collective."""
        return _lengths(weight + scaling * lora_weight, self.part)

    def forward(
        self, x: Tensor, *, base_layer: Any, base_result: Tensor | None = None, **named: Any
    ) -> Tensor:
        """Do as `ColumnDora.forward`; `x` is this rank's part of the inputs."""
        if base_result is None:
            base_result = self.part.sum(linear(x, base_layer.weight))
            if base_layer.bias is not None:
                base_result = base_result + base_layer.bias
        added: Tensor = super().forward(  # type: ignore[no-untyped-call]
            x, base_layer=base_layer, base_result=base_result, **named
        )
        return added


def _lengths(rows: Tensor, part: TensorPart) -> Tensor:
    """Return the lengths of rows (rows, part of columns). Collective."""
    squares = rows.detach().float().square().sum(1)
    torch.distributed.all_reduce(squares, group=part.group)
    return squares.sqrt().to(rows.dtype)


@contextmanager
def measuring_parts(device: torch.device) -> Iterator[None]:
    """Have peft measure the rows of divided layers by this rank's part of the weight: their
    adapters are drawn whole, and add nothing at first.

    Ranks send each other what lies on a `device`: below stage 3 the model is in host memory yet.
    """
    patched: Any = DoraLinearLayer
    measure: Callable[..., None] = patched.update_layer

    def measure_part(layer: Any, *, base_layer: nn.Module, **named: Any) -> None:
        if not isinstance(base_layer, ColumnLinear | RowLinear):
            measure(layer, base_layer=base_layer, **named)
            return
        with gather_params_ctx(base_layer.parameters()):
            if isinstance(base_layer, RowLinear):
                weight = base_layer.weight
                lengths = _lengths(weight.to(device), base_layer.part).to(weight.device)
            else:
                lengths = torch.linalg.norm(base_layer.weight.detach(), dim=1)
        layer.weight = nn.Parameter(lengths, requires_grad=True)

    patched.update_layer = measure_part
    try:
        yield
    finally:
        patched.update_layer = measure
