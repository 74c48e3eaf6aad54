"""Checkpoints of many ranks, laid out as DeepSpeed 0.19.8 does, without its engines: number `i` of
parameter `p` is i + p / 64, and its first moment the negative of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import STATE_KEY
from framework.checkpoint.state.optimizer_shards import EMA_KEY
from framework.checkpoint.state.tensor_split import Split


def shapes_of(num_tensors: int, *, numel: int) -> dict[str, torch.Size]:
    """Names and shapes, all a little different."""
    return {
        f"layers.{number}.weight": torch.Size([numel + number % 7]) for number in range(num_tensors)
    }


def values_of(number: int, start: int, count: int) -> torch.Tensor:
    """Numbers of the parameter `number`, from `start` on."""
    return torch.arange(start, start + count, dtype=torch.float32) + number / 64


def simulate(
    folder: Path,
    *,
    stage: int,
    num_ranks: int,
    shapes: dict[str, torch.Size],
    splits: dict[str, Split] | None = None,
    tensor_size: int = 1,
    averages: bool = False,
) -> SavedCheckpoint:
    """Write a checkpoint of a plain run at ZeRO stage 2 or 3, in fp32, without padding between
    parameters.

    Of `num_ranks` data-parallel ranks times `tensor_size`, which share the weights of `splits`. The
    moving averages of weights are twice the weights.
    """
    place = folder / "global_step1"
    place.mkdir(parents=True)
    splits = splits or {}
    for tensor_rank in range(tensor_size):
        own = {
            name: values_of(number, 0, shape.numel()).view(shape)
            for number, (name, shape) in enumerate(shapes.items())
        }
        own |= {
            name: split.part(own[name], tensor_rank, tensor_size) for name, split in splits.items()
        }
        model_rank = f"mp_rank_{tensor_rank:02d}"
        _write(
            place, own, stage=stage, num_ranks=num_ranks, model_rank=model_rank, averages=averages
        )
    layout = {"world_size": num_ranks * tensor_size} | (
        {"tensor_size": tensor_size} if splits else {}
    )
    manifest: dict[str, Any] = {
        "step": 1,
        "files": {},
        "config": {"zero": {"stage": stage}},
        "layout": layout,
    }
    if averages:
        manifest["config"]["training"] = {"ema": {"decay": 0.5}}
    if splits:
        manifest["tensor"] = {
            name: [split.dim, list(split.sections)] for name, split in splits.items()
        }
    return SavedCheckpoint(folder, place.name, manifest)


def _write(
    place: Path,
    own: dict[str, torch.Tensor],
    *,
    stage: int,
    num_ranks: int,
    model_rank: str,
    averages: bool,
) -> None:
    whole = torch.cat([tensor.flatten() for tensor in own.values()])
    part = -(-whole.numel() // num_ranks)
    padded = torch.nn.functional.pad(whole, (0, part * num_ranks - whole.numel()))
    offsets = torch.tensor([0, *(tensor.numel() for tensor in own.values())]).cumsum(0).tolist()
    model = {
        "module": own if stage < 3 else {name: torch.empty(0) for name in own},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: tensor.shape for name, tensor in own.items()}],
        "frozen_param_shapes": None,
        "shared_params": {},
        "ds_config": {},
        STATE_KEY: {"state": {"step": 1}, "random_states": ()},
    }
    for rank in range(num_ranks if stage == 3 else 1):
        name = (
            f"zero_pp_rank_{rank}_{model_rank}_model_states.pt"
            if stage == 3
            else f"{model_rank}_model_states.pt"
        )
        torch.save(model, place / name)
    for rank in range(num_ranks):
        if stage == 3:
            flat = torch.cat([_share(tensor.flatten(), rank, num_ranks) for tensor in own.values()])
        else:
            flat = padded[rank * part : (rank + 1) * part].clone()
        state = {"step": torch.tensor(1.0), "exp_avg": -flat} | (
            {EMA_KEY: 2 * flat} if averages else {}
        )
        inner = {"state": {0: state}, "param_groups": [{"params": [0]}]}
        held: dict[str, Any] = {
            "zero_stage": ZeroStageEnum(stage),
            "param_alignment_paddings": [[0] * len(own)],
        }
        if stage == 3:
            held |= {"fp32_flat_groups": [flat], "optimizer_state_dict": inner}
        else:
            notes = {}
            for name, start, stop in zip(own, offsets, offsets[1:], strict=False):
                begin, end = max(start - rank * part, 0), min(stop - rank * part, part)
                if begin < end:
                    notes[name] = fragment_address(numel=end - begin, start=begin)
            held |= {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": inner}
            held |= {"param_slice_mappings": [notes]}
        torch.save(
            {"optimizer_state_dict": held},
            place / f"zero_pp_rank_{rank}_{model_rank}_optim_states.pt",
        )


def _share(flat: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    size = -(-flat.numel() // num_ranks)
    own = flat[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(own, (0, size - own.numel()))
