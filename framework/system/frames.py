"""Frames of the threads of this process, for threads that watch other threads: where each is, and
whether it is stopped in a debugger or at a prompt, so that no timeout applies.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

_DEBUGGERS: Final = (
    "bdb",
    "pdb",
    "pudb",
    "debugpy",
    "pydevd",
    "_pydevd",
    "celery.contrib.rdb",
    "remote_pdb",
)
_MODULES: Final = (
    "IPython.core.debugger",
    "IPython.terminal.debugger",
    "IPython.terminal.embed",
    "code",
)
_OWN: Final = str(Path(__file__).resolve().parents[1])


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


def is_at_prompt(thread: int) -> bool:
    """Check whether code that this package has called is in a debugger, or in a prompt of its own.

    `thread` is its identifier, as in `threading.get_ident`.

    The frames of a notebook or of IPython are around the call, so that they do not count. A tracer,
    such as one that measures coverage, has no frames.
    """
    return any(_is_debugger(frame) for frame in _called(current_frames().get(thread)))


def _called(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread from the innermost one, up to the first of this package."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        yield frame
        frame = frame.f_back


def _is_debugger(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name in _MODULES or name.partition(".")[0].startswith(_DEBUGGERS) or name in _DEBUGGERS
