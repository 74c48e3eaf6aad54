"""Values as Python programs have them, as the plain values that a file holds: tuples, paths and numpy's numbers are
welcome.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


def plain_values(value: Any) -> Any:
    """Lists for tuples, text for paths, Python's numbers for numpy's; everything else as it is.

    Under ``args`` nothing is changed: that is what the user's own code is called with.
    """
    if isinstance(value, Mapping):
        return {name: item if name == "args" else plain_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value
