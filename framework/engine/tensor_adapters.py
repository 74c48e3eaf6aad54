"""Adapters in a model that a tensor group shares: drawn whole, as in one process, and divided as
the layers that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from framework.checkpoint.state.tensor_split import Split
from framework.checkpoint.state.weight_parts import split_of, whole_shape
from framework.config.groups import ALL_LINEAR, is_adapted
from framework.config.training import LoRA
from framework.engine.distributed import device
from framework.errors import ConfigError
from framework.models.adapters import add_adapters
from framework.models.split import (
    ColumnLayer,
    ColumnLinear,
    DividedLayer,
    RowLayer,
    RowLinear,
    TensorPart,
)
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
        ConfigError: as in `add_adapters`.
    """
    from peft.tuners.lora import LoraLayer

    measuring: AbstractContextManager[None] = nullcontext()
    if lora.use_dora:
        from framework.models.split_dora import measuring_parts

        _refuse_dora(model, lora)
        measuring = measuring_parts(device())
    with _in_whole_sizes(model), measuring:
        model = add_adapters(model, lora, seed=seed)
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if isinstance(base, ColumnLayer):
            _divide_of_column(module, base)
        elif isinstance(base, RowLayer):
            _divide_of_row(module, base)
        if lora.use_dora and isinstance(base, ColumnLinear | RowLinear):
            _divide_lengths(module, base)
    return model


def _refuse_dora(model: nn.Module, lora: LoRA) -> None:
    """Refuse DoRA of embeddings and `Conv1D`s that are divided, and of layers that join their
    outputs.

    Raises:
        ConfigError: kind ``lora-not-adaptable``.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or split_of(weight) is None or not is_adapted(name, lora):
            continue
        is_linear = isinstance(module, nn.Linear)
        if is_linear and getattr(module, "widths", None) is None:
            continue
        if isinstance(module, nn.Embedding) and lora.target_modules == ALL_LINEAR:
            continue
        reason = f"{name} is divided over a tensor group, where DoRA does not measure it"
        fix = "leave it out, or set parallel.tensor: 1"
        key = "training.lora.target_modules"
        raise ConfigError.of("lora-not-adaptable", reason, fix, key, lora.target_modules)


def _divide_lengths(module: Any, base: ColumnLinear | RowLinear) -> None:
    """Make DoRA take the lengths of this rank's rows, or of the whole rows that it holds a part
    of.
    """
    from framework.models.split_dora import ColumnDora, RowDora

    lengths = module.lora_magnitude_vector[_NAME]
    lengths.part = base.part
    if isinstance(base, RowLinear):
        lengths.__class__ = RowDora
        return
    lengths.__class__ = ColumnDora
    split = split_of(base.weight)
    vars(lengths.weight).update(split=split, tensor_model_parallel=True)


@contextmanager
def _in_whole_sizes(model: nn.Module) -> Iterator[None]:
    """Let divided layers have the sizes of whole ones, by which peft draws adapters."""
    sizes: list[tuple[Any, str, Any]] = []

    def set_size(owner: Any, attribute: str, size: Any) -> None:
        sizes.append((owner, attribute, vars(owner).get(attribute)))
        setattr(owner, attribute, size)

    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or split_of(weight) is None:
            continue
        shape = whole_shape(weight)
        if isinstance(module, nn.Linear):
            set_size(module, "out_features", shape[0])
            set_size(module, "in_features", shape[1])
        elif isinstance(module, nn.Embedding):
            set_size(module, "num_embeddings", shape[0])
        elif isinstance(module, DividedLayer):
            # Of Conv1D peft reads the shape of the weight, or this one, as stage 3 spreads it.
            set_size(weight, "ds_shape", shape)
    try:
        yield
    finally:
        for owner, attribute, size in reversed(sizes):
            if size is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, size)


def _divide_of_column(module: Any, base: ColumnLayer) -> None:
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


def _divide_of_row(module: Any, base: RowLayer) -> None:
    """Give a row layer's adapter the columns of A that belong to this rank's inputs."""
    part = base.part
    split = split_of(base.weight)
    assert split is not None
    down = module.lora_A[_NAME]
    _divide(down.weight, Split(1, split.sections), part)
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
