"""Options of an optimizer that DeepSpeed replaces by those of the checkpoint: its parameter groups are put back whole.

The keys of the config are compared before (`framework.checkpoint.resumable`); what a function from Python gives the
optimizer that it builds stands in no config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import deepspeed

from framework.errors import show_value
from framework.system.log import warn

_RATES: Final = frozenset({"params", "lr", "initial_lr"})
_CYCLED: Final = frozenset({"betas", "momentum"})
_Groups = list[dict[str, Any]]


@contextmanager
def reporting_restored_options(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Name what stands in the groups of the engine's optimizer after a load and is not what it was built with."""
    built = _plain(engine)
    yield
    changed = dict.fromkeys(
        f"{name}: {show_value(kept[name])} is kept, {show_value(value)} was given"
        for given, kept in zip(built, _plain(engine), strict=False)
        for name, value in given.items()
        if name in kept and kept[name] != value
    )
    if changed:
        warn(
            f"the optimizer goes on with what the checkpoint holds ({'; '.join(changed)}); start another run with "
            "checkpoint.init_weights to change it [optimizer-options-kept]",
            is_of_all_ranks=True,
        )


def _plain(engine: deepspeed.DeepSpeedEngine) -> _Groups:
    """The groups without what a schedule moves."""
    groups: list[Mapping[str, Any]] = getattr(engine.optimizer, "param_groups", [])
    moved = _RATES | (_CYCLED if getattr(engine.lr_scheduler, "cycle_momentum", False) else frozenset())
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in moved and _is_plain(value)
        }
        for group in groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
