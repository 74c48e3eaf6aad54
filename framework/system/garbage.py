"""Python's collections of cyclic garbage while a process starts: imports make many objects and no
garbage, and at Python's threshold collections take a tenth to a quarter of their time.
"""

from __future__ import annotations

import gc
from typing import Final

_OBJECTS: Final = 100_000  # between two collections
_USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Collect garbage seldom from now on."""
    gc.set_threshold(_OBJECTS, *_USUAL[1:])


def collect_as_usual() -> None:
    """Collect garbage at Python's own thresholds from now on."""
    gc.set_threshold(*_USUAL)
