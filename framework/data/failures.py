"""Failures of what reads data: errors of a dataset, in a worker or here, and workers that end."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Final

from framework.errors import FrameworkError, explaining, printable

_DEAD_WORKER: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: ([\w ]+)|exited unexpectedly)"
)
# The kernel's name of the signal -> what that mostly means.
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
# How torch hands over a worker's error: one of the same class, whose text is the worker's whole
# traceback.
_FROM_WORKER: Final = re.compile(r"Caught \w+ in ")


def death_of_worker(error: BaseException) -> str:
    """Return one line with the way out, where torch's error says that a worker has ended; empty
    otherwise.
    """
    dead = _dead_worker(error)
    if not dead:
        return ""
    way_out = _WAYS_OUT.get((dead[2] or "").strip(), _NO_WAY_OUT_KNOWN)
    return (
        f"a worker that reads the data {printable(dead[1].strip())}: {way_out} [data-worker-ended]"
    )


def _dead_worker(error: BaseException) -> re.Match[str] | None:
    """The signal, where one error of torch's names it and the one that it became does not any
    more.
    """
    dead = _DEAD_WORKER.search(str(error))
    before = error.__cause__ or error.__context__
    return (dead and not dead[2] and before and _DEAD_WORKER.search(str(before))) or dead


class ExplainedData:
    """A loader, for training or for evaluation, whose errors are explained. `claims`: whether this
    rank is the one that reports an error, given its text.
    """

    def __init__(self, loader: Any, *, claims: Callable[[str], bool]) -> None:
        self._loader = loader
        self._explain = partial(_without_traceback, claims=claims)

    def __iter__(self) -> Iterator[Any]:
        """As the evaluation loader's."""
        with explaining(self._explain):
            yield from self._loader

    def stream(self, start_step: int) -> Generator[Any, None, None]:
        """As the training loader's."""
        with explaining(self._explain):
            yield from self._loader.stream(start_step)


def _without_traceback(error: Exception, *, claims: Callable[[str], bool]) -> FrameworkError | None:
    """Without a worker's traceback, which stands before its message. The ranks read different
    samples: what one of them meets, it has to report; what all meet, rank 0 reports.
    """
    if not isinstance(error, FrameworkError):
        return None
    reported = error
    stated = str(error)
    if _FROM_WORKER.match(stated):
        of_error = re.compile(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", re.MULTILINE)
        reported = type(error)(of_error.split(stated)[-1].strip())
    reported.is_of_one_rank = claims(str(reported))
    return None if reported is error else reported
