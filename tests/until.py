"""Waits for what another thread or process does, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], what: str = "it", *, seconds: float = 60.0) -> None:
    """Wait until `holds` is true; looks every 5 ms.

    Raises:
        AssertionError: `what` has not come after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not after {seconds:.0f} s"
        time.sleep(0.005)
