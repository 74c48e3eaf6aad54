"""Activation recomputation: a group of layers keeps only its input, and runs again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recompute(run: Callable[..., Any], *values: Any, modules: Callable[[], Iterable[nn.Module]]) -> Any:
    """``run(*values)``, keeping the values and none of what `run` computes for the backward pass on the way.

    Gradients are the same to the bit: dropout repeats its draws, and batch norms count the batch once.

    Args:
        run: the part of the model.
        values: its inputs.
        modules: tells the modules that `run` calls, submodules included; asked in the backward pass.
    """
    contexts = partial(_contexts, modules)
    return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)


def _contexts(
    modules: Callable[[], Iterable[nn.Module]],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(modules)


@contextmanager
def _statistics_kept(modules: Callable[[], Iterable[nn.Module]]) -> Iterator[None]:
    """The first run has counted the batch. `track_running_stats` cannot be turned off instead: autograd would save
    other tensors than the first time, and the checkpoint would complain."""
    norms = [module for module in modules() if isinstance(module, _BatchNorm) and module.training]
    before = [
        (norm.momentum, None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if tracked is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(tracked)
