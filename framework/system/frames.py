"""Frames of the threads of this process, for threads that watch other threads."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its number, without a garbage collection.

    CPython holds the lock of its list of threads in `sys._current_frames` (3.11, Python/pystate.c).
    A finalizer that runs there and waits, as DeepSpeed's engine logs in its own, would wait for
    ever for a thread that begins at that moment: it has the interpreter and waits for that lock.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
