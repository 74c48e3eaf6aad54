"""Packed rows of conversations for a model of the user's own: attention within texts where that is
possible, and a trial before the first step that shows that texts are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from framework.config.precision import Autocast
from framework.engine.distributed import device, gather
from framework.engine.plain_engine import PlainEngine
from framework.engine.step_batches import HALF
from framework.errors import ConfigError, in_one_line
from framework.models.packed_transformers import (
    attend_in_packed_rows,
    attends_in_packed_rows,
    dense_masks,
    keep_masks,
    kept_masks,
)
from framework.plan.plan import Plan
from framework.system.log import warn
from framework.tasks.classification import logits_of
from framework.tasks.task import Task

_TEXT: Final = 4  # tokens of a text of the trial
# Parts of the largest logit. Experts compute the same tokens in other groups, and round otherwise;
# a kernel of half precision rounds otherwise than another.
_ROUNDING: Final = 0.01
_ROUNDING_OF_KERNELS: Final = 0.05


def keep_texts_apart(engine: PlainEngine, task: Task, plan: Plan) -> None:
    """Try a packed row on a model. Collective.

    Attention within texts that computes something else than the model does on a text alone is taken
    back. A warning names each model of transformers that keeps a mask of all pairs of positions.

    Raises:
        ConfigError: kind ``packing-not-separated``: the outputs for a text depend on the one before
            it.
    """
    _keep_texts_apart(engine, task, plan, device=device(), agree=_agreed)


def _keep_texts_apart(
    engine: PlainEngine | _Whole,
    task: Task,
    plan: Plan,
    *,
    device: torch.device,
    agree: Callable[[str], str],
) -> None:
    """Try a packed row on a model on a device; `agree` returns the first rank's reason.

    Raises:
        ConfigError: as `keep_texts_apart`.
    """
    model_config = getattr(engine.module, "config", task)
    if hasattr(model_config, "use_cache"):
        model_config.use_cache = False  # with a cache, transformers' masks ignore the positions
    precision = plan.config.precision
    is_half = precision.dtype in HALF or isinstance(precision, Autocast)
    reasons = kept_masks(engine.module)
    is_shared = plan.config.parallel.sequence > 1
    if reasons and is_shared:
        raise _not_separated(f"ranks that share sequences keep no mask of all pairs: {reasons[0]}")
    reason = agree(_why_mixed(engine, task, is_half=is_half, device=device))
    if reason and not is_shared and attends_in_packed_rows(engine.module):
        keep_masks(engine.module)
        reasons = [reason]
        reason = agree(_why_mixed(engine, task, is_half=is_half, device=device))
    if reason:
        raise _not_separated(reason)
    for kept in reasons:
        _warn_of_masks(kept)


def _not_separated(reason: str) -> ConfigError:
    fix = "set data.packing: false"
    return ConfigError.of("packing-not-separated", reason, fix, "data.packing", True)


class _Whole:
    """A whole model on the host, for the trial before it is divided into stages."""

    def __init__(self, model: torch.nn.Module, task: Task) -> None:
        self.module = model
        self.modes = self
        self._task = task

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        was_training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            yield
        finally:
            for module in was_training:
                module.training = True

    def outputs(self, inputs: Any) -> Any:
        return self._task.forward(self.module, inputs)


def keep_texts_apart_in_layers(model: torch.nn.Module, task: Task, plan: Plan) -> None:
    """Let a model of transformers attend within texts, and try a packed row on it, before its
    layers are divided into stages.

    Raises:
        ConfigError: as `keep_texts_apart`.
    """
    attend_in_packed_rows(model)
    _keep_texts_apart(_Whole(model, task), task, plan, device=torch.device("cpu"), agree=str)


def _agreed(reason: str) -> str:
    """Return the first rank's reason, if any has one: all ranks do the same. Collective."""
    return next(filter(None, gather(reason)), "")


@torch.no_grad()
def _why_mixed(
    engine: PlainEngine | _Whole, task: Task, *, is_half: bool, device: torch.device
) -> str:
    """Return why texts of a row are not kept apart; empty if they are. Collective."""
    is_replaced = attends_in_packed_rows(engine.module)
    rows = torch.arange(2 * _TEXT)[None]
    other_rows = torch.cat([rows[:, :_TEXT] + 2 * _TEXT, rows[:, _TEXT:]], dim=1)
    try:
        with engine.modes.evaluating():
            after_first = _logits_of_last(engine, rows, device)
            after_other = _logits_of_last(engine, other_rows, device)
            alone = after_first
            if is_replaced:
                with dense_masks():
                    alone = _logits_of_last(engine, rows[:, _TEXT:], device)
    except TypeError as error:
        return f"the model does not take the places of tokens ({in_one_line(error)})"
    except Exception as error:
        if not is_replaced:
            raise
        return f"attention within texts fails ({in_one_line(error)})"
    return _why_logits_differ(
        after_first, after_other, alone, tolerance=_ROUNDING_OF_KERNELS if is_half else _ROUNDING
    )


def _why_logits_differ(
    after_first: Tensor, after_other: Tensor, alone: Tensor, *, tolerance: float
) -> str:
    """Return why the logits of a text show that texts are not kept apart; empty if they do not.

    Args:
        after_first: its logits after one text.
        after_other: its logits after another text.
        alone: its logits without another text, or `after_first`.
        tolerance: largest difference to those alone, of the largest logit.
    """
    largest = after_first.abs().max()
    if (after_first - after_other).abs().max() > _ROUNDING * largest:
        return "in this model a conversation sees those before it in a row in spite of its places"
    # Not `>`: a NaN is a difference, too.
    if alone is not after_first and not (after_first - alone).abs().max() <= tolerance * largest:
        return "attention within texts computes something else than the model does on a text alone"
    return ""


def _logits_of_last(engine: PlainEngine | _Whole, rows: Tensor, device: torch.device) -> Tensor:
    """Return the logits of the last text of a batch of texts end to end, (1, tokens, vocabulary)
    float32.
    """
    ids = rows.to(device)
    places = torch.arange(_TEXT, device=device).repeat(1, rows.shape[1] // _TEXT)
    outputs = engine.outputs({"input_ids": ids, "position_ids": places})
    logits: Tensor = logits_of(outputs)[:, -_TEXT:].float()
    return logits


def _warn_of_masks(reason: str) -> None:
    warn(
        f"{reason}: a mask of all pairs of positions keeps the texts of a row apart, which costs "
        "time and memory that grow with the square of data.sequence_length [packed-rows-masked]",
        is_of_all_ranks=True,
    )
