"""Adapters in a model that a tensor group shares: drawn whole, as in one process, and divided as
the layers that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from framework.checkpoint.state.tensor_split import Split, split_of, whole_shape
from framework.config.training import LoRA
from framework.models.adapters import add_adapters
from framework.models.split import ColumnLinear, RowLinear, TensorPart
from framework.models.split_adapters import (
    CopiedLinear,
    DropoutApart,
    DropoutTogether,
    JoinedLinear,
    SummedLinear,
)

_NAME = "default"  # peft's, of a model's only adapter


def add_divided_adapters(model: nn.Module, lora: LoRA, *, seed: int) -> nn.Module:
    """Put adapters into a model that `TensorCut` has cut, as `add_adapters` does, and leave this
    rank with its part of them.

    An embedding's adapter stays whole: each rank looks all tokens up in it.

    Returns:
        The model, changed in place.

    Raises:
        ConfigError: as of `add_adapters`.
    """
    from peft.tuners.lora import LoraLayer

    with _in_whole_sizes(model):
        model = add_adapters(model, lora, seed=seed)
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if isinstance(base, ColumnLinear):
            _divide_of_column(module, base)
        elif isinstance(base, RowLinear):
            _divide_of_row(module, base)
    return model


@contextmanager
def _in_whole_sizes(model: nn.Module) -> Iterator[None]:
    """Let divided layers have the sizes of whole ones, by which peft draws adapters."""
    sizes: list[tuple[Any, str, int]] = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or split_of(weight) is None:
            continue
        rows, columns = whole_shape(weight)
        if isinstance(module, nn.Linear):
            sizes.append((module, "out_features", module.out_features))
            sizes.append((module, "in_features", module.in_features))
            module.out_features = rows
            module.in_features = columns
        elif isinstance(module, nn.Embedding):
            sizes.append((module, "num_embeddings", module.num_embeddings))
            module.num_embeddings = rows
    try:
        yield
    finally:
        for module, attribute, size in sizes:
            setattr(module, attribute, size)


def _divide_of_column(module: Any, base: ColumnLinear) -> None:
    """Give a column layer's adapter the rows of B that belong to this rank's outputs."""
    part = base.part
    split = split_of(base.weight)
    assert split is not None
    down = module.lora_A[_NAME]
    up = module.lora_B[_NAME]
    _divide(up.weight, Split(0, split.sections), part)
    up.out_features = len(up.weight)
    if base.widths is not None:
        up.__class__ = JoinedLinear
        up.part = part
        up.widths = base.widths
    if base.is_last or base.copies:
        down.__class__ = CopiedLinear
        down.part = part
    else:
        # A module around the layer has copied their common input: its gradient is summed there.
        down.weight.register_hook(part.sum)
    _draw(module, DropoutTogether, part)


def _divide_of_row(module: Any, base: RowLinear) -> None:
    """Give a row layer's adapter the columns of A that belong to this rank's inputs."""
    part = base.part
    split = split_of(base.weight)
    assert split is not None
    down = module.lora_A[_NAME]
    _divide(down.weight, split, part)
    down.in_features = down.weight.shape[1]
    down.__class__ = SummedLinear
    down.part = part
    _draw(module, DropoutApart, part)


def _divide(weight: nn.Parameter, split: Split, part: TensorPart) -> None:
    """Leave this rank's part in a weight, marked as `TensorCut` marks those that it divides."""
    with torch.no_grad():
        weight.data = split.part(weight.data, part.rank, part.size).clone()
    vars(weight).update(split=split, tensor_model_parallel=True)


def _draw(module: Any, kind: type[nn.Dropout], part: TensorPart) -> None:
    """Have an adapter's dropout draw its numbers as `kind` does."""
    dropout: Any = module.lora_dropout[_NAME]
    if isinstance(dropout, nn.Dropout):
        dropout.__class__ = kind
        dropout.part = part  # type: ignore[assignment]
