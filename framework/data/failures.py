"""Errors of a dataset, in a worker or here: which rank reports one, in the dataset's own words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from framework.errors import FrameworkError, explaining

# torch raises a worker's error as one of the same class, with the worker's whole traceback as text.
_FROM_WORKER: Final = re.compile(r"Caught \w+ in ")

Claims = Callable[[str], bool]
"""Returns True for an error's text if this rank is to report the error."""


def claims_nothing(error: str) -> bool:
    """Claim no error, as a loader outside a run of several ranks."""
    return False


@contextmanager
def explaining_data(claims: Claims) -> Iterator[None]:
    """Explain the errors of a loader that is read in the block; the block ends its workers."""
    with explaining(partial(_without_traceback, claims=claims)), explaining(_end_of_worker):
        yield


def _end_of_worker(error: Exception) -> RuntimeError | None:
    """Return the error of a worker that has ended, where torch has raised another one; else
    None.
    """
    if not isinstance(error, (EOFError, OSError, RuntimeError)):
        return None
    if not isinstance(error, RuntimeError) and _FROM_WORKER.match(str(error)):
        return None  # an error of the dataset itself
    from framework.data.workers import end_of_worker

    end = end_of_worker(error)
    return RuntimeError(end) if end else None


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
