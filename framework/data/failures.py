"""Failures of reading data: errors of a dataset, in a worker or here, and workers that end."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from framework.errors import FrameworkError, Problem, explaining

_WORKER: Final = r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\)"
_END: Final = r"(is killed by signal: ([\w ]+)|exited unexpectedly)"
_DEAD_WORKER: Final = re.compile(f"{_WORKER} {_END}")
# The kernel's name of the signal -> its usual cause, and the fix.
_WAYS_OUT: Final = {
    "Killed": "the host, or the memory limit of this job, has no room for it: set "
    "data.num_workers or data.prefetch_batches lower",
    "Bus error": "/dev/shm is full: give the container a larger one (docker --shm-size, an "
    "emptyDir of medium Memory), or set data.num_workers or data.prefetch_batches "
    "lower",
}
_NO_WAY_OUT_KNOWN: Final = (
    "the code that reads the data has ended its process: data.num_workers=0 shows where"
)
# torch raises a worker's error as one of the same class, with the worker's whole traceback as text.
_FROM_WORKER: Final = re.compile(r"Caught \w+ in ")


def death_of_worker(error: BaseException) -> Problem | None:
    """Return the failure with a way out, if torch's error reports the end of a worker, else
    None.
    """
    dead = _dead_worker(error)
    if not dead:
        return None
    way_out = _WAYS_OUT.get((dead[2] or "").strip(), _NO_WAY_OUT_KNOWN)
    reason = f"a worker that reads the data {dead[1].strip()}: {way_out}"
    return Problem("data-worker-ended", reason)


def _dead_worker(error: BaseException) -> re.Match[str] | None:
    """Find the end of a worker in an error, or, if that names no signal, in the error that it was
    raised from. Group 1 is how the worker ended, group 2 the signal's name, or None.
    """
    dead = _DEAD_WORKER.search(str(error))
    cause = error.__cause__ or error.__context__
    if dead and not dead[2] and cause:
        return _DEAD_WORKER.search(str(cause)) or dead
    return dead


Claims = Callable[[str], bool]
"""Returns True for an error's text if this rank is to report the error."""


def claims_nothing(error: str) -> bool:
    """Claim no error, as a loader outside a run of several ranks."""
    return False


def explaining_data(claims: Claims) -> AbstractContextManager[None]:
    """Explain the errors of a loader that is read in the block."""
    return explaining(partial(_without_traceback, claims=claims))


def _without_traceback(error: Exception, *, claims: Claims) -> FrameworkError | None:
    """Return a new error without the worker's traceback that torch puts before the message; None
    if there is no such traceback.

    Either error gets `is_of_one_rank`: whether `claims` has this rank report it. The ranks read
    different samples: an error of one rank is reported by that rank, an error of all by rank 0.
    """
    if not isinstance(error, FrameworkError):
        return None
    message = str(error)
    if not _FROM_WORKER.match(message):
        error.is_of_one_rank = claims(message)
        return None
    error_name = re.compile(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", re.MULTILINE)
    reported = type(error)(error_name.split(message)[-1].strip())
    reported.is_of_one_rank = claims(str(reported))
    return reported
