"""Backends of torch.compile that are wrong, each in its way, and a callback that lets
`training.compile: auto` compile on processors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, fx, nn

from framework.engine import compile_probe, plain_engine
from framework.plan import compiling


def loses_a_gradient(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """As torch 2.11 compiles functions that write their output in place: without a gradient, and
    without an error.
    """
    first = next(n for n, each in enumerate(inputs) if isinstance(each, nn.Parameter))

    def run(*values: Any) -> Any:
        without = list(values)
        without[first] = values[first].detach()
        return graph(*without)

    return run


def rounds_too_much(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The value is right, and its gradient a tenth too large."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return value * 1.1 - value.detach() * 0.1
        return value

    return lambda *values: tuple(changed(each) for each in graph(*values))


def fails_on_rank_1(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise RuntimeError("this compiler is broken")
    return graph.forward


WRONG = {each.__name__: each for each in (loses_a_gradient, rounds_too_much, fails_on_rank_1)}


class AsOnCuda:
    """Lets ``auto`` choose as on a GPU, of blocks of any size, with a backend of torch's or of
    `WRONG`; as a callback it begins with the run and undoes it at the end.
    """

    def __init__(self, backend: str = "aot_eager", smallest: int = 0) -> None:
        if backend in WRONG:
            Registers(backend)
        self._before = list[tuple[Any, str, Any]]()
        choose = compiling.compile_choice
        blocks = compiling.OF_BLOCKS.model_copy(update={"backend": backend})
        self._set(compiling, "OF_BLOCKS", blocks)
        self._set(compile_probe, "SMALL_BLOCK", smallest)
        self._set(
            plain_engine,
            "compile_choice",
            lambda config, device, environment=None: choose(config, "cuda", environment),
        )

    def _set(self, module: Any, name: str, value: Any) -> None:
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def on_end(self, state: Any) -> None:
        for module, name, value in self._before:
            setattr(module, name, value)


class Registers:
    """Makes a wrong backend known by its name."""

    def __init__(self, backend: str) -> None:
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            torch._dynamo.register_backend(WRONG[backend], name=backend)

    def on_start(self, state: Any) -> None:
        """A callback has an event."""
