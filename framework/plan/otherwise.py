"""What fits where no strategy does: settings that train something else, or in other numbers. A
search never chooses them; they are named beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.config.precision import BF16, FP16
from framework.errors import ConfigError
from framework.plan.alternatives import settings_text, size_text, with_settings
from framework.plan.candidate import Candidate
from framework.plan.memory import NotEstimatedError
from framework.plan.search import search
from framework.plan.search_space import Request, Settings, unusual

_STATES: Final = "precision.states"
_LORA: Final = "training.lora"


@dataclass(frozen=True)
class Otherwise:
    """A run that fits, and is another one than what was asked for.

    Attributes:
        changed: dotted keys and values that make it another run.
        difference: what is trained, or in which numbers, in words.
        best: its best strategy.
    """

    changed: Settings
    difference: str
    best: Candidate

    def __str__(self) -> str:
        settings = dict(self.changed) | dict(unusual(self.best.settings))
        size = size_text(self.best.peak_bytes)
        return f"{settings_text(settings)}: fits, {size} at most; another run: {self.difference}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "settings": dict(self.changed) | dict(self.best.settings),
            "difference": self.difference,
            "peak_bytes": self.best.peak_bytes,
        }


def runs_that_fit(request: Request) -> Iterator[Otherwise]:
    """Yield other runs that fit the devices, those that train the same weights first.

    `request`: of a run that fits with no strategy of those that are free.
    """
    for changed, difference in _changes(request):
        try:
            config = with_settings(request.config, changed)
            result = search(replace(request, config=config), is_quick=True)
        except (ConfigError, NotEstimatedError):
            continue
        if result.ranked:
            yield Otherwise(changed, difference, result.ranked[0])


def _changes(request: Request) -> Iterator[tuple[Settings, str]]:
    """Yield settings that make a run another one, and the difference in words; the rules decide
    later which of them are allowed.
    """
    precision = request.config.precision
    if isinstance(precision, BF16) and precision.states != "bf16":
        yield {_STATES: "bf16"}, "small updates of a weight are lost, as it and its state are bf16"
    if isinstance(precision, FP16) and precision.states == "fp32":
        yield {_STATES: "fp16_weights"}, "small updates of a weight are lost, as it is fp16"
    training = request.config.training
    # the work of a model of the user's own is not known with adapters
    if training.lora is None and not training.freeze and request.work is None:
        yield (
            {_LORA: {"target_modules": "all-linear"}},
            "it trains adapters of linear layers, and the weights stay as they start",
        )
