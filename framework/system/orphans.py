"""No process outlives the one that started it. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from typing import Final

_DIE_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG


def die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, as it does with the process `parent`; at once
    if that is gone already. Only Linux has it: elsewhere nothing but the second holds."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
