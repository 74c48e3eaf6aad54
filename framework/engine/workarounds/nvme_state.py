"""Optimizer state on NVMe, put back: DeepSpeed 0.19.8's `load_checkpoint` copies the swapper's
files, and nothing else.

Left out are the optimizer's moments (a fresh engine does not know that there are files of them, and
begins with zeros), its step, its parameter groups with the learning rate, the loss scale, and every
group that is too small to be swapped, weights included. All of it is in the checkpoint, and is
taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch

from framework.checkpoint.state.checkpoint_engine import read_file
from framework.errors import StorageError


def complete_nvme_state(engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str) -> None:
    """After DeepSpeed's load: what it has left out; nothing for an engine whose optimizer is not on
    NVMe. Collective.

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
    numbered = [
        parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]
    ]
    optimizer._clear_fp32_optimizer_param_groups()
    for group, known in zip(optimizer.optimizer.param_groups, inner["param_groups"], strict=True):
        group.update({key: value for key, value in known.items() if key != "params"})
    # small weights are whole on every rank, and are put together anew at the end
    optimizer.checkpoint_event_prologue()
    for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = inner["state"].get(
            next(place for place, one in enumerate(numbered) if one is flat), {}
        )
        if optimizer._swappable_optimizer_subgroup(number):
            _make_known(
                optimizer,
                flat,
                state,
                num=int(optimizer.fp16_partitioned_groups_flat_numel[number]),
            )
        else:
            flat.data.copy_(saved["fp32_flat_groups"][number].data)
            # The optimizer's step stays where it is kept, on the host.
            optimizer.optimizer.state[flat] = {
                key: value.clone().to(flat.device if value.ndim else value.device)
                if torch.is_tensor(value)
                else value
                for key, value in state.items()
            }
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()


def _make_known(optimizer: Any, flat: torch.Tensor, state: Mapping[str, Any], *, num: int) -> None:
    """The swapper learns of a parameter's moments from tensors of their size, and lets go of them
    again.
    """
    swapped = {
        key: isinstance(value, torch.Tensor) and value.ndim > 0 for key, value in state.items()
    }
    optimizer.optimizer.state[flat] = {
        key: torch.empty(num, dtype=flat.dtype, device=flat.device) if swapped[key] else value
        for key, value in state.items()
    }
    known = optimizer.optimizer_swapper._get_param_swap_info(flat)
    missing = [path for path in known.get_swap_paths() if not Path(path).is_file()]
    if missing or known.num_tensors() != 1 + sum(swapped.values()):
        raise StorageError(
            "the swapper's files are not as DeepSpeed 0.19.8 writes them "
            f"({Path([*missing, '?'][0]).name})"
        )
    known.release_memory()
