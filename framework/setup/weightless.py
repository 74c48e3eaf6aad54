"""Builds a model with weights and buffers that have shapes and no numbers; all else is as it is
built for a run.

Constructors may compute with numbers (a rate of each layer, a mask of positions): only what a
module registers is without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy


def build_weightless(build: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """Return the model that `build` makes, with fake weights and buffers of the mode.

    A weight is real until its module has it, then its memory is free again: at most the largest one
    is there. Buffers stay real while the model is built, as constructors read them.
    """
    with _weights_of(mode), _without_truncated_draws():
        model = build()
    _take_the_rest(model, mode)
    return model


@contextmanager
def _weights_of(mode: FakeTensorMode) -> Iterator[None]:
    """Let every module register fake weights in place of real ones; a weight in two modules stays
    one.
    """
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and _is_real(param):
            module._parameters[name] = _fake_weight(param, mode)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def replace_tensors(modules: Iterable[nn.Module], convert: Callable[[Tensor], Tensor]) -> None:
    """Put what `convert` returns in place of each weight and buffer of some modules; one that is in
    two places stays one. A weight stays a parameter.
    """
    converted: dict[int, Any] = {}
    replaced = []  # an object that has gone could leave its number to another one
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in converted:
                    result = convert(tensor)
                    if isinstance(tensor, nn.Parameter) and not isinstance(result, nn.Parameter):
                        result = nn.Parameter(result.detach(), tensor.requires_grad)
                    converted[id(tensor)] = result
                    replaced.append(tensor)
                tensors[name] = converted[id(tensor)]


@contextmanager
def converting_weightless() -> Iterator[None]:
    """Let `module.to(...)` replace fake weights within the block.

    torch would exchange them in place, and refuses to, as the mode of fake tensors holds weak
    references to them.
    """
    apply = nn.Module._apply

    def replace_each(
        module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        modules = module.modules() if recurse else [module]
        replace_tensors(modules, convert)
        return module

    nn.Module._apply = replace_each  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _is_real(tensor: Tensor) -> bool:
    """Check whether a tensor has numbers. Lazy modules have weights without a shape: they stay."""
    return not isinstance(tensor, FakeTensor) and not is_lazy(tensor)


def _fake_weight(weight: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    """Return a weight of the same shape and type; with what libraries note on it."""
    fake = nn.Parameter(_fake(weight.detach(), mode), weight.requires_grad)
    fake.__dict__.update(weight.__dict__)
    return fake


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("cpu")
        )


def _take_the_rest(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the real tensors of a model: buffers, and weights that were not registered as the
    others are.
    """

    def without_numbers(tensor: Tensor) -> Tensor:
        if not _is_real(tensor):
            return tensor
        if isinstance(tensor, nn.Parameter):
            return _fake_weight(tensor, mode)
        return _fake(tensor, mode)

    replace_tensors(model.modules(), without_numbers)


@contextmanager
def _without_truncated_draws() -> Iterator[None]:
    """Let torch leave truncated normals out: it draws them again until all are within bounds, and
    fake tensors have no numbers to compare.
    """
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
