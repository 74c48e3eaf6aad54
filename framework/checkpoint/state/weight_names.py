"""Plain names of the weights that a rank holds, the groups in which an optimizer steps them, and
access to what the optimizer has partitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

Names = Mapping[torch.Tensor, str]
"""Parameters and saved buffers of a rank's modules -> their names in the plain module."""


def names_of(module: torch.nn.Module, plain: Callable[[str], str] = str) -> Names:
    """Map a module's parameters and saved buffers to their names; `plain` turns a name within it
    into that of the plain module.
    """
    saved = module.state_dict(keep_vars=True)
    names: dict[torch.Tensor, str] = {}
    for name, parameter in module.named_parameters():
        names[parameter] = plain(name)
    for name, buffer in module.named_buffers():
        if name in saved:
            names[buffer] = plain(name)
    return names


def stepped_groups(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that an optimizer steps, group by group, in its own order: they are the
    model's own at stage 0 only.
    """
    # The `param_groups` of these two, for fp16 and bf16, hold copies.
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return [list(group) for group in optimizer.fp16_groups]
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", [])]


@contextmanager
def opened(optimizer: Any) -> Iterator[None]:
    """Allow changes of an optimizer's weights and state within the block; at stage 3 no weight is
    whole meanwhile. Collective.

    After an error it stays open: closing is collective as well, and the other ranks are elsewhere.
    """
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    yield
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()
