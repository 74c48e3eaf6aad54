"""Python's collections of cyclic garbage while a process starts: imports make many objects and no
garbage, and at Python's threshold collections take a tenth to a quarter of their time.
"""

from __future__ import annotations

import gc
from typing import Final

_OBJECTS: Final = 100_000  # between two collections
_USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Collect garbage seldom from now on, unless the user's code has set thresholds of its own."""
    if gc.get_threshold() == _USUAL:
        gc.set_threshold(_OBJECTS, *_USUAL[1:])


def collect_as_usual() -> None:
    """Collect garbage at Python's thresholds from now on, if it is collected seldom."""
    if gc.get_threshold()[0] == _OBJECTS:
        gc.set_threshold(*_USUAL)
