"""The norm of many gradients, in a few kernels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Of processors, which add up a row in fp32 number by number: with 2**11 of them the norm of 40
# million gradients is off by 1e-5, without rows by 3e-3. GPUs add in a tree.
_ROW: Final = 2**11


def norm_of(gradients: list[Tensor], *, device: torch.device) -> Tensor:
    """Return the Euclidean norm of all gradients together, 0-d float32 on `device`, where they lie;
    0 for none.
    """
    if not gradients:
        return torch.zeros((), device=device)
    if device.type == "cpu":
        gradients = [_in_rows(gradient) for gradient in gradients]
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    if len(norms) == 1:
        return norms[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _in_rows(gradient: Tensor) -> Tensor:
    """Return the norms of a long gradient's rows of `_ROW` numbers, or a short one as it is."""
    while gradient.numel() > _ROW**2 // 16 and gradient.is_contiguous():
        flat = gradient.view(-1)
        end = flat.numel() // _ROW * _ROW
        norms = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1, dtype=torch.float32)
        last = torch.linalg.vector_norm(flat[end:], dtype=torch.float32)
        gradient = torch.cat((norms, last.view(1)))
    return gradient
