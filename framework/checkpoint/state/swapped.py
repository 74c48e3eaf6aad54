"""State of DeepSpeed's NVMe swapper, in a rank's optimizer and in the files of a checkpoint.

DeepSpeed 0.19.8 saves empty tensors in a rank's optimizer file for each sub-group that is swapped,
and copies the swapper's files beside it (runtime/engine.py `save_checkpoint`). They hold plain
numbers, filled up to a multiple of bytes, and bear the sub-group's name: ``0_12.tensor.swp`` are
fp32 weights, ``exp_avg-0_12.tensor.swp`` a state of them (swap_tensor/optimizer_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from framework.checkpoint.names import OPTIMIZER_FILE, SWAPPED

SWAPPED_KEY: Final = "swapped"
"""Key of `SwappedGroups` in the run's own state."""
SwappedGroups = Mapping[int, tuple[str, int]]
"""Number of a sub-group with such state -> its name, and a rank's elements of it."""
_GROUP_NAME: Final = re.compile(r"[0-9]+_[0-9]+")


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
