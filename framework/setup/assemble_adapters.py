"""Puts adapters into the model of a run that has its first weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from framework.config.training import LoRA
from framework.engine.adapter_weights import (
    gathering_in_peft,
    put_adapter,
    quantize_adapted,
    register_read_weights,
)
from framework.engine.distributed import rank
from framework.engine.stage3_build import partition
from framework.engine.step_batches import HALF
from framework.models.adapters import add_adapters
from framework.setup.prepare_run import Prepared
from framework.system.log import print_line

if TYPE_CHECKING:
    from framework.engine.rank_groups import RankGroups


def with_adapters(
    model: torch.nn.Module, prepared: Prepared, lora: LoRA, groups: RankGroups | None
) -> torch.nn.Module:
    """Put adapters into a model that has its first weights, partitioned at stage 3; into one that a
    tensor group shares, this rank's part of them. Collective.
    """
    config = prepared.plan.config
    is_stage3 = config.zero.stage == 3
    reads_weights = is_stage3 and lora.use_dora
    with gathering_in_peft() if reads_weights else nullcontext():
        if groups is None:
            model = add_adapters(model, lora, seed=config.run.seed)
        else:
            from framework.engine.tensor_adapters import add_divided_adapters

            model = add_divided_adapters(model, lora, seed=config.run.seed)
    if prepared.adapter is not None:
        put_adapter(model, prepared.adapter, lora)
        prepared.adapter.let_go()
    if lora.quantization is not None:
        done = quantize_adapted(
            model,
            lora.quantization,
            dtype=HALF.get(config.precision.dtype, torch.float32),
            spread=lambda module: is_stage3 and partition(module, prepared.ds_config, groups),
        )
        if rank() == 0:
            print_line(f"training.lora.quantization: {done}")
    if is_stage3:
        model = partition(model, prepared.ds_config, groups)
    if reads_weights:
        register_read_weights(model)
    return model
