"""Changes that a config makes to any `nn.Module` before the engine takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from framework.config.training import Training


def prepare_model(model: nn.Module, training: Training, *, replicas: Any = None) -> nn.Module:
    """Freeze weights, synchronise batch norms and recompute layers as `training` configures.

    `training.channels_last` changes the images alone (`models/formats.py`), and convolutions follow
    them. Weights keep their memory format: DeepSpeed 0.19.8 refuses others (runtime/engine.py
    `_broadcast_model` views them as bytes).

    Args:
        model: whole, or the rank's part of it.
        training: section of the run config.
        replicas: process group of the ranks with other samples; None: all ranks.

    Returns:
        The model, changed in place (it may be partitioned by ZeRO-3), or a `LayeredModel` around
        the same layers, with the same names of weights, where recomputation needs one.

    Raises:
        ConfigError: a pattern of `training.freeze` matches no weight, or the patterns match all;
            or recomputation needs a model that can be cut into layers, and this one cannot; or it
            has no perceptrons that can be computed in tiles.
    """
    if training.freeze:
        from framework.models.freezing import freeze

        freeze(model, training.freeze)
    if training.sync_batch_norm:
        from framework.models.sync_batch_norm import with_sync_batch_norm

        model = with_sync_batch_norm(model, process_group=replicas)
    if training.mlp_tile:
        from framework.models.tiled_perceptron import tile_perceptrons

        tile_perceptrons(model, training.mlp_tile)
    if training.recompute_every:
        from framework.models.recomputation import with_recompute

        model = with_recompute(
            model, every=training.recompute_every, keeps_products=training.keeps_products
        )
    return model


def as_fp32(model: nn.Module) -> nn.Module:
    """Convert weights in half precision to fp32, in place, one after the other."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return model
