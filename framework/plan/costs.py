"""What fixed keys of a run cost: the speed that a search gives where one of them is free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.config.training import Batch
from framework.errors import show_value
from framework.plan.alternatives import settings_text, with_settings
from framework.plan.candidate import Candidate
from framework.plan.memory import NotEstimatedError
from framework.plan.search import search
from framework.plan.search_space import (
    ACCUMULATION,
    ACTIVATIONS,
    EXPERT,
    GLOBAL,
    HOW,
    KERNEL,
    MICRO,
    MLP_TILE,
    OFFLOAD,
    PARAMS,
    RECOMPUTE,
    SELDOM_SET,
    SIZES,
    STAGE,
    Request,
)

# Share of a run's speed that a key has to cost to be named.
_LEAST_COST: Final = 0.05
# Key -> what is free with it: keys that mean nothing without each other.
_TOGETHER: Final[Mapping[str, Set[str]]] = {
    MICRO: {MICRO, ACCUMULATION},
    ACCUMULATION: {MICRO, ACCUMULATION},
    STAGE: {STAGE},
    OFFLOAD: {OFFLOAD, PARAMS, KERNEL},
    PARAMS: {OFFLOAD, PARAMS, KERNEL},
    RECOMPUTE: {RECOMPUTE, HOW, ACTIVATIONS, MLP_TILE},
    **{key: {key} for key in (*SIZES, EXPERT)},
}


@dataclass(frozen=True)
class KeyCost:
    """What a fixed key costs.

    Attributes:
        key: of the run config.
        value: that it has.
        share: of the samples per second that are lost by it.
        settings: what is chosen where it is free: its own value, and those that are `auto`,
            as far as they change.
        samples_per_second: with these settings.
    """

    key: str
    value: Any
    share: float
    settings: Mapping[str, Any]
    samples_per_second: float

    def __str__(self) -> str:
        return (
            f"{self.key}: {show_value(self.value)} costs {self.share:.0%}: a search gives "
            f"{settings_text(self.settings)}, {self.samples_per_second:,.1f} samples per second"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as plain values, for JSON."""
        return {
            "key": self.key,
            "value": self.value,
            "share": self.share,
            "settings": dict(self.settings),
            "samples_per_second": self.samples_per_second,
        }


def costs_of_keys(request: Request, planned: Candidate, written: RunConfig) -> list[KeyCost]:
    """Return what each key costs that the config fixes, the dearest first; keys that cost less than
    5 % are left out, and all if the plan's speed is not known or it does not fit.

    One search for each key, with the sizes of the plan and those with one of them above 1: at most
    some hundred candidates. The global batch stays, as every key that trains another model.

    Args:
        request: with the plan's config and cluster; what is free in it does not count.
        planned: the plan as a candidate.
        written: the config before keys that are `auto` were chosen.
    """
    if planned.samples_per_second is None or planned.lacking(request.target):
        return []
    request = replace(request, config=_with_same_samples(request.config, planned))
    costs = []
    for key in _fixed(written):
        free = set(_TOGETHER[key]) | written.auto
        if MICRO in free and written.batch.accumulation_steps is None:
            free.add(ACCUMULATION)
        found = _found(replace(request, free=free, is_brief=True), key, planned)
        if found is not None:
            costs.append(found)
    return sorted(costs, key=lambda cost: -cost.share)


def _with_same_samples(config: RunConfig, planned: Candidate) -> RunConfig:
    """Return a config with the samples of a step written down, so that a search keeps them."""
    fixed: dict[str, Any] = {GLOBAL: planned.plan.layout.global_size}
    if config.batch.fixed_micro_size is not None:
        fixed[ACCUMULATION] = None  # it follows
    return with_settings(config, fixed)


def _fixed(written: RunConfig) -> Iterator[str]:
    """Yield the keys that a config fixes, by a value or by the default, and that may cost."""
    yield from _fixed_of_batch(written.batch)
    for key in (STAGE, RECOMPUTE, *SIZES):
        if key not in written.auto:
            yield key
    if getattr(written.model, "moe", None) and EXPERT not in written.auto:
        yield EXPERT
    zero = written.zero
    if zero.offload_optimizer.device == "cpu":
        yield OFFLOAD
    elif zero.offload_param.device == "cpu":
        yield PARAMS


def _fixed_of_batch(batch: Batch) -> Iterator[str]:
    """Yield the key that fixes how a step's samples are divided, if one does."""
    if batch.global_size is None:
        return
    if batch.fixed_micro_size is not None:
        yield MICRO
    elif batch.accumulation_steps is not None:
        yield ACCUMULATION


def _found(request: Request, key: str, planned: Candidate) -> KeyCost | None:
    """Return what a key costs by a search in which it is free; None if that is too little."""
    try:
        ranked = search(request).ranked
    except NotEstimatedError:
        return None
    if not ranked:
        return None
    best = ranked[0]
    speed = best.samples_per_second
    before = planned.samples_per_second
    if speed is None or before is None or before > (1 - _LEAST_COST) * speed:
        return None
    changes = best.changes(planned)
    if not changes:
        return None
    value = (dict(SELDOM_SET) | dict(planned.choice))[key]
    return KeyCost(key, value, 1 - before / speed, changes, speed)
