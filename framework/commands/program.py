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
    """Write ``model.pt2`` of a module in evaluation mode; returns file -> bytes.

    The example inputs are two samples of the run's data, as its task gives them to the model. The
    program takes another number of samples, and of tokens (batch, length) another length if the
    model allows it.

    Raises:
        ConfigError: torch cannot export the model; kind ``not-exportable``, with torch's reason.
    """
    args, named = _example(config, next(model.parameters()).dtype)
    is_layered = isinstance(model, LayeredModel)  # it takes named inputs by their order
    if is_layered:
        args += tuple(named.values())
        named = {}
    model_config = getattr(model, "config", config)
    if hasattr(model_config, "use_cache"):
        model_config.use_cache = False  # of transformers; a cache is no output of a program
    for dimensions in _dynamic_dimensions((args, named)):
        dynamic = dict.fromkeys(dimensions, torch.export.Dim.DYNAMIC)
        shapes: Any = tree_map_only(Tensor, lambda _, dynamic=dynamic: dynamic, named or args)
        if is_layered:
            shapes = {"inputs": shapes}
        try:
            with torch.no_grad():
                program = torch.export.export(model, args, named, dynamic_shapes=shapes)
            torch.export.save(program, folder / PROGRAM)
            return {PROGRAM: (folder / PROGRAM).stat().st_size}
        except Exception as error:  # torch raises a dozen classes
            first = in_one_line(error, longest=300).partition(". ")[0]
            reason = f"torch.export does not take {type(model).__name__}: {first}"
    fix = "export its weights: --format safetensors"
    raise ConfigError.of("not-exportable", reason, fix, "--format", "torch_export")


def _dynamic_dimensions(inputs: Any) -> list[tuple[int, ...]]:
    """Return the sets of dimensions that a program may leave open, the widest one first."""
    if all(_is_tokens(tensor) for tensor in tree_leaves(inputs)):
        return [(0, 1), (0,)]
    return [(0,)]


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point()


def _example(config: RunConfig, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named inputs of the model for two samples of the training data."""
    section = config.data
    if hasattr(section, "packing"):
        section = section.model_copy(update={"packing": False})
    dataset = as_splits(call_factory(section.factory(), key="data")).train
    make_batch = own_collate(dataset) or collate
    batch = make_batch([dataset[0], dataset[min(1, len(dataset) - 1)]])
    inputs, _ = as_task(load_task(config)).split(batch)

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    inputs = tree_map_only(Tensor, cast, inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}
