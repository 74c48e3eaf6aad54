"""Two keys of a section that say the same in steps and in epochs: one of them wins, and nobody may lose in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.errors import Problem

# Section -> (the key that wins, the key that is then ignored).
_PAIRS: Final = {
    "training": ("max_steps", "max_epochs"),
    "evaluation": ("every_steps", "every_epochs"),
    "checkpoint": ("every_steps", "every_epochs"),
}


def overruled(config: RunConfig, source: Source) -> Iterator[Problem]:
    """An error where the command line asks for what the other key overrules, a warning where a file has both.

    `training.max_steps=10` over a file's `max_epochs` is how a short trial is made: nothing is said of that.
    """
    for name, (wins, loses) in _PAIRS.items():
        section = getattr(config, name)
        winner, loser = getattr(section, wins), getattr(section, loses)
        if winner is None or loser is None:
            continue
        is_asked, wins_by_command = source.is_override((name, loses)), source.is_override((name, wins))
        reason = f"{name}.{wins} is {winner} and wins, so that this would be ignored"
        if is_asked:
            fix = f"add {name}.{wins}=null, or change that one instead"
            yield Problem(kind="overruled-key", key=f"{name}.{loses}", value=loser, reason=reason, fix=fix)
        elif not wins_by_command:
            yield Problem(
                kind="overruled-key",
                key=f"{name}.{loses}",
                value=loser,
                reason=reason.replace("would be", "is"),
                fix="keep one of the two",
                severity="warning",
            )
