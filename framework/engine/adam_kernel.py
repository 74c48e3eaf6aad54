"""Which kernel of torch's Adam steps the weights: the run's own, and not its checkpoint's."""

from __future__ import annotations

from typing import Any, Final

import torch

_KERNEL: Final = ("fused", "foreach")
Kernels = list[dict[str, Any]]
"""Options of each parameter group that choose the kernel."""


def kernels_of(optimizer: Any) -> Kernels:
    """Return the options that choose the kernel; empty for optimizers other than torch's Adam."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return []
    return [{name: group.get(name) for name in _KERNEL} for group in optimizer.param_groups]


def keep_kernels(optimizer: Any, kernels: Kernels) -> None:
    """Put back what `kernels_of` returned, after a checkpoint has replaced the parameter groups.

    Counters of steps are moved to where the kernel reads them: the device, if it is the fused one.
    """
    if not kernels:
        return
    is_fused = False
    for group, kernel in zip(optimizer.param_groups, kernels, strict=True):
        group.update(kernel)
        is_fused = is_fused or bool(group["fused"] or group.get("capturable"))
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            device = parameter.device if is_fused else torch.device("cpu")
            state["step"] = step.to(device, torch.float32)
