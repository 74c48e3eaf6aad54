"""Steps that are left out after a roll back (`training.bad_steps`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from framework.engine_protocol import BadStep
from framework.system.files import open_own

_KEY: Final = "left_out"


class RolledBack(Exception):  # noqa: N818 - no error
    """Ends a loop that is to begin again at an earlier checkpoint."""

    def __init__(self, bad: BadStep) -> None:
        super().__init__(str(bad))
        self.bad = bad


class LeftOut:
    """Windows (first step, last step) with data that is left out, one for each roll back of the
    run.
    """

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.windows)

    def add(self, windows: Iterable[Sequence[int]]) -> None:
        """Add windows; one that is there already stays once."""
        added = {(int(first), int(last)) for first, last in windows}
        self.windows = sorted(added.union(self.windows))

    def state(self) -> dict[str, Any]:
        """Return the windows for a checkpoint; empty if there are none."""
        if self.windows:
            return {_KEY: [list(window) for window in self.windows]}
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add the windows of a checkpoint."""
        self.add(state.get(_KEY) or ())


def noted_windows(path: Path) -> list[tuple[int, int]]:
    """Read the windows (first step, last step) in a run's events; empty if they cannot be read. A
    checkpoint from before a roll back does not have the window of that roll back.
    """
    windows: list[tuple[int, int]] = []
    with suppress(OSError), open_own(path, "r") as stream:
        for line in stream:
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                if event["kind"] == "roll_back":
                    windows.append((int(event["first"]), int(event["last"])))
    return windows
