"""``export --format torch_export``: the plain module as a program of `torch.export`, for any number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from framework.config.run_config import RunConfig
from framework.data.batches import collate, own_collate
from framework.data.splits import as_splits
from framework.errors import ConfigError, in_one_line
from framework.models.layers import LayeredModel
from framework.setup.objects import call_factory
from framework.setup.parts import load_task
from framework.tasks.task import as_task

PROGRAM: Final = "model.pt2"


def write_program(folder: Path, model: torch.nn.Module, config: RunConfig) -> dict[str, int]:
    """Write ``model.pt2`` of a module in evaluation mode; returns file -> bytes.

    It is called as the run's task calls the model; two samples of the run's data are the example. The first dimension
    of every tensor may be another, and of tokens (batch, length) the second, where the model lets it.

    Raises:
        ConfigError: kind ``not-exportable``, with torch's reason.
    """
    args, named = _example(config, next(model.parameters()).dtype)
    takes_any, described = isinstance(model, LayeredModel), getattr(model, "config", config)
    if hasattr(described, "use_cache"):  # of transformers: a cache is no output of a program
        described.use_cache = False  # type: ignore[union-attr]
    if takes_any:
        args, named = (*args, *named.values()), {}
    is_text = all(one.ndim == 2 and not one.is_floating_point() for one in tree_leaves((args, named)))
    for dims in ((0, 1), (0,)) if is_text else ((0,),):
        shapes: Any = tree_map_only(Tensor, lambda one: dict.fromkeys(dims, torch.export.Dim.DYNAMIC), named or args)  # noqa: B023
        shapes = {"inputs": shapes} if takes_any else shapes
        try:
            with torch.no_grad():
                torch.export.save(torch.export.export(model, args, named, dynamic_shapes=shapes), folder / PROGRAM)
            return {PROGRAM: (folder / PROGRAM).stat().st_size}
        except Exception as error:  # torch has a dozen
            first = in_one_line(error, longest=300).partition(". ")[0]
            reason = f"torch.export does not take {type(model).__name__}: {first}"
    fix = "export its weights: --format safetensors"
    raise ConfigError.of("not-exportable", reason, fix, "--format", "torch_export")


def _example(config: RunConfig, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named inputs of the model, of two samples."""
    section = config.data.model_copy(update={"packing": False}) if hasattr(config.data, "packing") else config.data
    dataset = as_splits(call_factory(section.factory(), key="data")).train
    batch = (own_collate(dataset) or collate)([dataset[0], dataset[min(1, len(dataset) - 1)]])
    inputs, _ = as_task(load_task(config)).split(batch)
    inputs = tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return inputs if isinstance(inputs, tuple) else (inputs,), {}
