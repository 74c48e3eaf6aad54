"""Weights of a model that `training.freeze` keeps from training in all steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from framework.config.freezing import (
    entry_of,
    everything_frozen,
    refuse_bad_freeze,
)
from framework.config.training import FreezeEntry, always_frozen
from framework.models.experts import names_elsewhere


def freeze(model: nn.Module, entries: Sequence[FreezeEntry]) -> None:
    """Set `requires_grad` of the weights that match an entry of `training.freeze`.

    Weights that are frozen in all steps require no gradient. Weights that are trained in some steps
    require one.

    Raises:
        ConfigError: kind ``freeze-matches-all`` where no weight would be left to train, or an error
            of `refuse_bad_freeze`.
    """
    parameters = dict(model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    frozen = frozen_names([*parameters, *names_elsewhere(model)], entries)
    if entries and not trained - frozen:
        raise everything_frozen(entries)
    for name, parameter in parameters.items():
        if name in frozen:
            parameter.requires_grad_(False)
        elif entry_of(name, entries) is not None:
            parameter.requires_grad_(True)


def frozen_names(names: Iterable[str], entries: Sequence[FreezeEntry]) -> set[str]:
    """Return the names of the weights that are never trained; raises as `refuse_bad_freeze`."""
    names = list(names)
    refuse_bad_freeze(names, entries)
    patterns = always_frozen(entries)
    frozen = set()
    for name in names:
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            frozen.add(name)
    return frozen
