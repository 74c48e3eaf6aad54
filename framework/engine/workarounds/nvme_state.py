"""Restores state on NVMe: DeepSpeed 0.19.8's `load_checkpoint` copies the files of an optimizer's
swapper, and nothing else; it fails where weights lie on NVMe and the optimizer elsewhere.

It leaves out the optimizer's moments (a fresh engine does not know of the files with them, and
begins with zeros), its step, its parameter groups with the learning rate, the loss scale, and every
group that is too small to be swapped, weights included. All of it is in the checkpoint, and is
taken from there.

Of weights on NVMe it looks for a flat copy in memory (runtime/zero/stage3.py
`_rigid_load_state_dict`), and there is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch

from framework.checkpoint.names import STATE_KEY
from framework.checkpoint.state.checkpoint_engine import read_file
from framework.checkpoint.state.swapped import SwappedGroups, is_swapped, noted_groups
from framework.errors import StorageError


@contextmanager
def loading_nvme_state(engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str) -> Iterator[None]:
    """Let DeepSpeed load ``folder/tag`` within the block, and restore what it leaves out.
    Collective.

    Raises:
        StorageError: the swapper's files of a moment are not there.
    """
    optimizer = engine.optimizer
    content = read_file(Path(engine._get_ckpt_name(str(folder), tag)), mmap=True)
    _name_as_saved(optimizer, noted_groups(content[STATE_KEY]) or {})
    optimizer._rigid_load_state_dict = partial(_load_rank_state, optimizer)
    try:
        yield
    finally:
        del optimizer._rigid_load_state_dict
    if engine.zero_nvme_offload_optimizer():
        _complete_nvme_state(engine, folder, tag)


def _name_as_saved(optimizer: Any, groups: SwappedGroups) -> None:
    """Give swapped groups the names of their files in the checkpoint. DeepSpeed counts the weights
    of all models of a process in them.
    """
    flats = optimizer.fp32_partitioned_groups_flat
    renamed = {number: name for number, (name, _) in groups.items() if flats[number].ds_id != name}
    if not renamed:
        return
    swapper = optimizer.optimizer_swapper
    infos = {number: swapper.swap_params_info.pop(flats[number].ds_id) for number in renamed}
    for number, name in renamed.items():
        flats[number].ds_id = name
        infos[number].param_id = name
        weights = infos[number].tensors[0]
        Path(weights.swap_path).unlink()
        weights.swap_path = f"{swapper.swap_folder}/{name}.tensor.swp"
        swapper.swap_params_info[name] = infos[number]


def read_weights_once(optimizer: Any) -> None:
    """Have DeepSpeed read a weight on NVMe once where it asks for it twice at a time: the list of
    the next weights has it for the forward and for the backward pass (0.19.8,
    runtime/zero/partitioned_param_coordinator.py `__prefetch_nvme_param_partitions`).
    """
    swapper = optimizer.fp16_groups[0][0].nvme_swapper
    swap_in = swapper.swap_in

    def swap_in_once(weights: Sequence[Any], **options: Any) -> None:
        swap_in(list(dict.fromkeys(weights)), **options)

    swapper.swap_in = swap_in_once


def _load_rank_state(
    optimizer: Any, state: Mapping[str, Any], load_optimizer_states: bool = True
) -> None:
    """Stand in for `_rigid_load_state_dict`."""
    _load_scale(optimizer, state)
    if load_optimizer_states:
        optimizer._set_fp32_optimizer_param_groups()
        optimizer.optimizer.load_state_dict(state["optimizer_state_dict"])
        optimizer._clear_fp32_optimizer_param_groups()
    flats = optimizer.fp32_partitioned_groups_flat
    for number, saved in enumerate(state["fp32_flat_groups"]):
        flats[number].data.copy_(saved.data)
        optimizer._reassign_or_swap_out_partitioned_parameters(number)


def _load_scale(optimizer: Any, state: Mapping[str, Any]) -> None:
    for key in ("loss_scaler", "overflow", "dynamic_loss_scale"):
        setattr(optimizer, key, state[key])


def _complete_nvme_state(engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str) -> None:
    optimizer = engine.optimizer
    saved = read_file(Path(engine._get_zero_ckpt_name(str(folder), tag)))["optimizer_state_dict"]
    _load_scale(optimizer, saved)
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
    registered = _on_device(state, flat.device)
    moments = []
    for key, value in registered.items():
        if is_swapped(value):
            moments.append(key)
        elif isinstance(value, torch.Tensor):
            vars(value)["swappable"] = False
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
