"""The balance loss of transformers' routers where ranks share sequences: that of whole sequences.

A mixture of transformers hands the logits of its routers to the function
`load_balancing_loss_func` of its own file, which multiplies two means over all tokens. Of a rank's
positions alone that would be another loss, and an attention mask of whole sequences would be laid
over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import Function

_NAME: Final = "load_balancing_loss_func"
_IS_SHARED: Final = "takes_whole_sequences"  # attribute of the function that stands in its place


def share_balance(model: nn.Module, sharing: Callable[[], Any]) -> None:
    """Let the routers' loss of a model of transformers be that of whole sequences where ranks share
    them; nothing for a model without one. The function of the model's file is replaced for all
    models, and is as it was where no sequence is shared.

    `sharing` returns the ranks that share sequences now, a `models.sequence.SequenceGroup`, or
    None.
    """
    file = sys.modules[type(model).__module__]
    compute = getattr(file, _NAME, None)
    if compute is not None and not hasattr(compute, _IS_SHARED):
        setattr(file, _NAME, _of_whole_sequences(compute, sharing))


def _of_whole_sequences(
    compute: Callable[..., Any], sharing: Callable[[], Any]
) -> Callable[..., Any]:
    @wraps(compute)
    def balance(
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        group = sharing()
        if group is not None and isinstance(gate_logits, tuple):
            num_rows = 1
            if attention_mask is not None:
                num_rows = len(attention_mask)
            gate_logits = tuple(_joined(logits, group, num_rows) for logits in gate_logits)
        return compute(gate_logits, num_experts, top_k, attention_mask)

    setattr(balance, _IS_SHARED, True)
    return balance


def _joined(logits: Tensor, group: Any, num_rows: int) -> Tensor:
    """Return the logits (rows x positions, experts) of all ranks of a group, given this rank's,
    (rows x its positions, experts), row by row. Collective.
    """
    parts: Any = _Gather.apply(logits, group)
    by_row = parts.view(group.size, num_rows, -1, logits.shape[-1]).transpose(0, 1)
    joined: Tensor = by_row.reshape(-1, logits.shape[-1])
    return joined


class _Gather(Function):
    """Gathers a tensor of each rank, (ranks, *shape). Every rank computes from all of them, so the
    gradients of all are summed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        rows = tensor.new_empty(group.size * len(tensor), *tensor.shape[1:])
        torch.distributed.all_gather_into_tensor(rows, tensor.contiguous(), group=group.group)
        return rows.view(group.size, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group.group)
        return total[ctx.group.rank], None
