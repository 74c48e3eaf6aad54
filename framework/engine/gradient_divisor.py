"""Division of gradients by the loss scale and by what clipping asks for, before they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def clipping_divisor(norm: Tensor, *, limit: float, scale: float) -> Tensor | None:
    """Return the number by which gradients are divided, 0-d on the device; None for 1.

    Args:
        norm: of the gradients, still multiplied by the loss scale.
        limit: norm to which they are clipped; 0 clips nothing.
        scale: the loss scale.
    """
    if limit > 0:
        # as DeepSpeed computes it (runtime/zero/stage_1_and_2.py `unscale_and_clip_grads`)
        return ((norm / scale + 1e-6) / limit).clamp(min=1.0).mul_(scale)
    if scale != 1.0:
        return torch.full_like(norm, scale)
    return None


def reads_on_device(optimizer: Any) -> bool:
    """Check whether an optimizer reads on the device whether to step and what to divide gradients
    by: torch's fused Adam. SGD's momentum would begin with what memory held.
    """
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def dividing(optimizer: Any, gradients: list[Tensor], divisor: Tensor | None) -> Iterator[None]:
    """Have an optimizer step with gradients divided by `divisor` within the block: it divides them
    as it reads them if it can; else they are divided before.
    """
    if divisor is None:
        yield
    elif reads_on_device(optimizer):
        optimizer.grad_scale = divisor
        try:
            yield
        finally:
            del optimizer.grad_scale
    else:
        torch._foreach_mul_(gradients, 1.0 / divisor)
        yield
