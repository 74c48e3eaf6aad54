"""Checkpoints of many ranks, laid out as DeepSpeed 0.19.8 does, without its engines: number `i` of parameter `p` is
i + p / 64, and its first moment the negative of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.shard_map import STATE_KEY


def shapes_of(num_tensors: int, *, numel: int) -> dict[str, torch.Size]:
    """Names and shapes, all a little different."""
    return {f"layers.{number}.weight": torch.Size([numel + number % 7]) for number in range(num_tensors)}


def values_of(number: int, start: int, count: int) -> torch.Tensor:
    """Numbers of the parameter `number`, from `start` on."""
    return torch.arange(start, start + count, dtype=torch.float32) + number / 64


def simulate(folder: Path, *, stage: int, num_ranks: int, shapes: dict[str, torch.Size]) -> SavedCheckpoint:
    """Write a checkpoint of a plain run at ZeRO stage 2 or 3, in fp32, without padding between parameters."""
    place = folder / "global_step1"
    place.mkdir(parents=True)
    whole = torch.cat([values_of(number, 0, shape.numel()) for number, shape in enumerate(shapes.values())])
    part = -(-whole.numel() // num_ranks)
    padded = torch.nn.functional.pad(whole, (0, part * num_ranks - whole.numel()))
    offsets = torch.tensor([0, *(shape.numel() for shape in shapes.values())]).cumsum(0).tolist()
    module = dict(_views(whole, shapes)) if stage < 3 else {name: torch.empty(0) for name in shapes}
    model = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [dict(shapes)],
        "frozen_param_shapes": None,
        "shared_params": {},
        "ds_config": {},
        STATE_KEY: {"state": {"step": 1}, "random_states": ()},
    }
    for rank in range(num_ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, place / name)
    for rank in range(num_ranks):
        if stage == 3:
            flat = torch.cat([_share(number, shape, rank, num_ranks) for number, shape in enumerate(shapes.values())])
        else:
            flat = padded[rank * part : (rank + 1) * part].clone()
        inner = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": -flat}}, "param_groups": [{"params": [0]}]}
        held: dict[str, Any] = {"zero_stage": ZeroStageEnum(stage), "param_alignment_paddings": [[0] * len(shapes)]}
        if stage == 3:
            held |= {"fp32_flat_groups": [flat], "optimizer_state_dict": inner}
        else:
            notes = {}
            for name, start, stop in zip(shapes, offsets, offsets[1:], strict=False):
                begin, end = max(start - rank * part, 0), min(stop - rank * part, part)
                if begin < end:
                    notes[name] = fragment_address(numel=end - begin, start=begin)
            held |= {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": inner}
            held |= {"param_slice_mappings": [notes]}
        torch.save({"optimizer_state_dict": held}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    manifest = {"step": 1, "files": {}, "config": {"zero": {"stage": stage}}, "layout": {"world_size": num_ranks}}
    return SavedCheckpoint(folder, place.name, manifest)


def _views(whole: torch.Tensor, shapes: dict[str, torch.Size]) -> Sequence[tuple[str, torch.Tensor]]:
    sizes = [shape.numel() for shape in shapes.values()]
    return list(zip(shapes, (part.clone() for part in whole.split(sizes)), strict=True))


def _share(number: int, shape: torch.Size, rank: int, num_ranks: int) -> torch.Tensor:
    size = -(-shape.numel() // num_ranks)
    own = max(0, min(size, shape.numel() - rank * size))
    return torch.nn.functional.pad(values_of(number, rank * size, own), (0, size - own))
