"""Plain names of the weights that a rank holds, the groups in which an optimizer steps them, and
access to what the optimizer has partitioned, or keeps on NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from framework.checkpoint.names import SwappedGroups

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


def any_on_nvme(optimizer: Any) -> bool:
    """Check whether an optimizer keeps its state, or the weights, on NVMe."""
    keys = ("swap_optimizer", "params_in_nvme_and_cpu")
    return any(getattr(optimizer, key, False) for key in keys)


def swapped_groups(optimizer: Any) -> SwappedGroups:
    """Return the sub-groups of an optimizer with their state on NVMe, alike on all ranks."""
    groups: dict[int, tuple[str, int]] = {}
    if not getattr(optimizer, "swap_optimizer", False):
        return groups
    for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        if optimizer._swappable_optimizer_subgroup(number):
            num_elements = int(optimizer.fp16_partitioned_groups_flat_numel[number])
            groups[number] = flat.ds_id, num_elements
    return groups


@contextmanager
def swapped_in(
    optimizer: Any, number: int, *, writes: bool = False, gradients: bool = False
) -> Iterator[None]:
    """Hold the state of a sub-group in memory within the block, if it lies on NVMe. What is written
    there is kept if `writes` is set: of gradients with `gradients`, otherwise of weights and state.
    """
    is_swapped = getattr(optimizer, "swap_optimizer", False)
    if not is_swapped or not optimizer._swappable_optimizer_subgroup(number):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(number)
    try:
        yield
    finally:
        if not writes:
            optimizer._release_swap_buffers(number)
        elif gradients:
            optimizer._writeback_swap_state(number, write_opt_state=False, write_gradients=True)
        else:
            optimizer._optimizer_states_and_gradient_swap_out(number)
