"""Restores optimizer state on NVMe: DeepSpeed 0.19.8's `load_checkpoint` copies the swapper's
files, and nothing else.

It leaves out the optimizer's moments (a fresh engine does not know of the files with them, and
begins with zeros), its step, its parameter groups with the learning rate, the loss scale, and every
group that is too small to be swapped, weights included. All of it is in the checkpoint, and is
taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch

from framework.checkpoint.state.checkpoint_engine import read_file
from framework.errors import StorageError


def complete_nvme_state(engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Restore what DeepSpeed's load has left out, if the engine's optimizer is on NVMe. Collective.

    Raises:
        StorageError: the swapper's files of a moment are not there.
    """
    if not engine.zero_nvme_offload_optimizer():
        return
    optimizer = engine.optimizer
    saved = read_file(Path(engine._get_zero_ckpt_name(str(folder), tag)))["optimizer_state_dict"]
    optimizer.loss_scaler = saved["loss_scaler"]
    optimizer.overflow = saved["overflow"]
    optimizer.dynamic_loss_scale = saved["dynamic_loss_scale"]
    inner = saved["optimizer_state_dict"]
    optimizer._set_fp32_optimizer_param_groups()
    flat_tensors: list[torch.Tensor] = []
    for group in optimizer.optimizer.param_groups:
        flat_tensors += group["params"]
    optimizer._clear_fp32_optimizer_param_groups()
    for group, saved_group in zip(
        optimizer.optimizer.param_groups, inner["param_groups"], strict=True
    ):
        group.update({key: value for key, value in saved_group.items() if key != "params"})
    # small weights are whole on every rank, and are put together anew at the end
    optimizer.checkpoint_event_prologue()
    for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = inner["state"].get(_index_of(flat, flat_tensors), {})
        if optimizer._swappable_optimizer_subgroup(number):
            num_elements = int(optimizer.fp16_partitioned_groups_flat_numel[number])
            _register_moments(optimizer, flat, state, num_elements=num_elements)
        else:
            flat.data.copy_(saved["fp32_flat_groups"][number].data)
            optimizer.optimizer.state[flat] = _on_device(state, flat.device)
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()


def _index_of(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int:
    """Return the position of a tensor, by identity: `list.index` would compare elements."""
    return next(index for index, other in enumerate(tensors) if other is tensor)


def _on_device(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy an optimizer's state to a device; its step stays where it is kept, on the host."""
    copy = dict(state)
    for key, value in state.items():
        if torch.is_tensor(value):
            value = value.clone()
            copy[key] = value.to(device) if value.ndim else value
    return copy


def _register_moments(
    optimizer: Any, flat: torch.Tensor, state: Mapping[str, Any], *, num_elements: int
) -> None:
    """Make a parameter's moments known to the swapper by tensors of their size, and release these
    again.

    Raises:
        StorageError: the swapper's files are not as DeepSpeed 0.19.8 writes them.
    """
    moments = [
        key for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim > 0
    ]
    registered = dict(state)
    for key in moments:
        registered[key] = torch.empty(num_elements, dtype=flat.dtype, device=flat.device)
    optimizer.optimizer.state[flat] = registered
    swapped = optimizer.optimizer_swapper._get_param_swap_info(flat)
    missing = [path for path in swapped.get_swap_paths() if not Path(path).is_file()]
    if missing or swapped.num_tensors() != 1 + len(moments):
        name = "?"
        if missing:
            name = Path(missing[0]).name
        raise StorageError(f"the swapper's files are not as DeepSpeed 0.19.8 writes them ({name})")
    swapped.release_memory()
