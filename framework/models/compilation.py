"""torch.compile of a model, of its blocks, or of the layers that it recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from framework.config.training import Compile
from framework.errors import ConfigError
from framework.models.layers import LayeredModel


def compile_model(model: nn.Module, section: Compile, *, after_first_pass: bool = False) -> None:
    """Let torch compile a model or its blocks, in place.

    Of a model that recomputes its layers, the layers are compiled: no graph holds recomputation.

    `after_first_pass`: the first forward pass runs uncompiled. At ZeRO stage 3 DeepSpeed learns in
    it which weights a module reads from another module, and gathers them before that module from
    then on; in a graph it learns nothing (0.19.8, runtime/zero/parameter_offload.py
    `ZeROOrderedDict.__getitem__`).

    Raises:
        ConfigError: kind ``no-blocks``.
    """
    torch.compiler.reset()  # graphs of earlier runs count against torch's limit of graphs as well
    modules = _modules_to_compile(model, per=section.per)
    if not modules:
        reason = f"{type(model).__name__} has no two blocks of one class"
        fix = "set training.compile.per: model"
        raise ConfigError.of("no-blocks", reason, fix, "training.compile.per", section.per)

    def compile_modules() -> None:
        for module in modules:
            module.compile(**section.model_dump(exclude={"per"}))

    if not after_first_pass:
        compile_modules()
        return

    def compile_once(*_: Any) -> None:
        compile_modules()
        handle.remove()

    handle = model.register_forward_hook(compile_once)


def _modules_to_compile(model: nn.Module, *, per: str) -> list[nn.Module]:
    if isinstance(model, LayeredModel) and model.recompute_every:
        return [layer.build() for layer in model.layers()]
    if per == "model":
        return [model]
    return list(_blocks(model))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with siblings of their class; torch's own classes do not
    count.
    """
    counts = Counter(map(type, model.children()))
    for child in model.children():
        is_torchs = type(child).__module__.startswith("torch.nn.")
        if counts[type(child)] > 1 and not is_torchs:
            yield child
        else:
            yield from _blocks(child)
