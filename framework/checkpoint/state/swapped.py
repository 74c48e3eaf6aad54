"""State of DeepSpeed's NVMe swapper in the files of a checkpoint.

DeepSpeed 0.19.8 saves empty tensors in a rank's optimizer file for each sub-group that is swapped,
and copies the swapper's files beside it (runtime/engine.py `save_checkpoint`). They hold plain
numbers, filled up to a multiple of bytes, and bear the sub-group's name: ``0_12.tensor.swp`` are
fp32 weights, ``exp_avg-0_12.tensor.swp`` a state of them (swap_tensor/optimizer_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from framework.checkpoint.names import OPTIMIZER_FILE, SWAPPED, SWAPPED_KEY, SwappedGroups

_GROUP_NAME: Final = re.compile(r"[0-9]+_[0-9]+")


def noted_groups(state: Mapping[str, Any]) -> SwappedGroups | None:
    """Return the swapped groups that the own state of a checkpoint notes, or None if it was written
    by a release that did not note them.

    Raises:
        ValueError: a name that is none of DeepSpeed's. Names become parts of paths.
    """
    groups: SwappedGroups | None = state.get(SWAPPED_KEY)
    for name, _ in (groups or {}).values():
        if not _GROUP_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a group that DeepSpeed swaps")
    return groups


class SwappedFiles:
    """The swapper's files in one checkpoint."""

    def __init__(self, folder: Path, groups: SwappedGroups, *, tensor_size: int) -> None:
        """Take the checkpoint's folder and the groups that were swapped; `tensor_size` is the
        number of ranks in a tensor group of the run that wrote it.
        """
        self._folder = folder
        self._groups = groups
        self._tensor_size = tensor_size

    def complete(self, name: str, content: Any) -> None:
        """Put the numbers of swapped groups, mapped into memory, into the content of a rank's
        optimizer file; leave other files alone.

        Raises:
            RuntimeError: a file is not there, or too short.
        """
        match = OPTIMIZER_FILE.fullmatch(name)
        if match is None:
            return
        rank = int(match["rank"]) * self._tensor_size + int(match["model_rank"])
        folder = self._folder / SWAPPED / f"rank{rank:02d}"
        optimizer = content["optimizer_state_dict"]
        states = optimizer["optimizer_state_dict"]["state"]
        for number, (group_name, num_elements) in self._groups.items():
            path = folder / f"{group_name}.tensor.swp"
            optimizer["fp32_flat_groups"][number] = _mapped(path, num_elements)
            state = states.get(number, {})
            for key, value in state.items():
                if is_swapped(value) and key.isidentifier():
                    path = folder / f"{key}-{group_name}.tensor.swp"
                    state[key] = _mapped(path, num_elements)


def is_swapped(value: Any) -> bool:
    """Check whether a value of an optimizer's saved state stands for one in a file."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.numel()


def _mapped(path: Path, num_elements: int) -> torch.Tensor:
    """Map the first fp32 numbers of a file into memory."""
    return torch.from_file(str(path), shared=False, size=num_elements, dtype=torch.float32)
