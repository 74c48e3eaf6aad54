"""A trial of evaluation before the first step: nothing that training reads differs afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from framework.engine import random_state
from framework.errors import TrainingError

if TYPE_CHECKING:
    from framework.engine.base_engine import BaseEngine


@contextmanager
def trying_evaluation(engine: BaseEngine) -> Iterator[None]:
    """Evaluate within this context, and random generators go on where they were, samples are not
    shown, and nothing is compiled: a batch of evaluation may have another size than one of
    training, for which kernels are then made as usual.
    """
    generators = None
    with suppress(TrainingError):  # of a generator that cannot be saved; the first save reports it
        generators = random_state.capture()
    show = getattr(engine, "show_batch", None)
    with ExitStack() as ending:
        if generators is not None:
            ending.callback(random_state.restore, generators)
        engine.is_trying = True
        ending.callback(setattr, engine, "is_trying", False)
        if show is not None:
            vars(engine)["show_batch"] = None
            ending.callback(vars(engine).__setitem__, "show_batch", show)
        if _is_compiled(engine.module):
            ending.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _is_compiled(model: torch.nn.Module) -> bool:
    """Check whether torch compiles the model or a part of it in place."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )
