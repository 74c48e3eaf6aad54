"""torch.compile of a model in place: names of weights and checkpoints stay what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from framework.config.training import Compile
from framework.errors import ConfigError
from framework.models.layers import LayeredModel


def compile_model(model: nn.Module, asked: Compile) -> None:
    parts = [model] if asked.per == "model" else list(blocks_of(model))
    if isinstance(model, LayeredModel) and model.recompute_every:
        parts = [layer.build() for layer in model.layers()]
    for part in parts:
        part.compile(**asked.model_dump(exclude={"per"}))


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    own = [child for child in model.children() if not type(child).__module__.startswith("torch.nn.")]
    kinds = Counter(map(type, own))
    for child in model.children():
        if kinds[type(child)] > 1:
            yield child
        else:
            yield from blocks_of(child)
