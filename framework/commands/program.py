"""``export --format torch_export``: the plain module as a program of `torch.export`."""

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
from framework.setup.components import load_task
from framework.setup.user_code import call_factory
from framework.tasks.task import as_task

PROGRAM: Final = "model.pt2"


def write_program(folder: Path, model: torch.nn.Module, config: RunConfig) -> dict[str, int]:
    """Write ``model.pt2`` of a module in evaluation mode; returns file -> bytes. Two samples of the
    run's data are the example, as its task gives them to the model. Another number of them may
    follow, and another length of tokens (batch, length), where the model lets it. A ConfigError of
    kind ``not-exportable`` has torch's reason.
    """
    args, named = _example(config, next(model.parameters()).dtype)
    takes_any = isinstance(model, LayeredModel)  # values by their order
    if takes_any:
        args = (*args, *named.values())
        named = {}
    described = getattr(model, "config", config)
    if hasattr(described, "use_cache"):
        described.use_cache = False  # of transformers; a cache is no output of a program
    is_text = all(
        one.ndim == 2 and not one.is_floating_point() for one in tree_leaves((args, named))
    )
    dimensions = [(0, 1), (0,)] if is_text else [(0,)]
    for dims in dimensions:
        dynamic = dict.fromkeys(dims, torch.export.Dim.DYNAMIC)
        shapes: Any = tree_map_only(Tensor, lambda _, dynamic=dynamic: dynamic, named or args)
        try:
            with torch.no_grad():
                program = torch.export.export(
                    model, args, named, dynamic_shapes={"inputs": shapes} if takes_any else shapes
                )
            torch.export.save(program, folder / PROGRAM)
            return {PROGRAM: (folder / PROGRAM).stat().st_size}
        except Exception as error:  # torch has a dozen
            first = in_one_line(error, longest=300).partition(". ")[0]
            reason = f"torch.export does not take {type(model).__name__}: {first}"
    fix = "export its weights: --format safetensors"
    raise ConfigError.of("not-exportable", reason, fix, "--format", "torch_export")


def _example(config: RunConfig, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named inputs."""
    if hasattr(config.data, "packing"):
        section = config.data.model_copy(update={"packing": False})
    else:
        section = config.data
    dataset = as_splits(call_factory(section.factory(), key="data")).train
    batch = (own_collate(dataset) or collate)([dataset[0], dataset[min(1, len(dataset) - 1)]])
    inputs, _ = as_task(load_task(config)).split(batch)
    inputs = tree_map_only(
        Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, inputs
    )
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return inputs if isinstance(inputs, tuple) else (inputs,), {}
