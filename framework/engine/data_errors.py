"""Data that a rank cannot read: told in one line, by one rank, whichever it is, and whether a worker read it or the
rank itself.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

from framework.engine.distributed import claims_error_report
from framework.errors import FrameworkError

# How torch hands over a worker's error: one of the same class, whose text is the worker's whole traceback.
_FROM_WORKER: Final = re.compile(r"Caught \w+ in ")


class ExplainedData:
    """A loader, for training or for evaluation, whose errors are told."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """As the evaluation loader's."""
        with explaining_data_errors():
            yield from self._loader

    def stream(self, start_step: int) -> Generator[Any, None, None]:
        """As the training loader's."""
        with explaining_data_errors():
            yield from self._loader.stream(start_step)


@contextmanager
def explaining_data_errors() -> Iterator[None]:
    """The ranks read different samples: what one of them meets, it has to tell. What all meet, rank 0 tells."""
    try:
        yield
    except FrameworkError as error:
        reported = _without_traceback(error)
        reported.is_of_one_rank = claims_error_report(str(reported))
        if reported is error:
            raise
        raise reported from error


def _without_traceback(error: FrameworkError) -> FrameworkError:
    """What the worker's error said, which is where its traceback ends."""
    stated = str(error)
    if not _FROM_WORKER.match(stated):
        return error
    of_error = re.compile(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", re.MULTILINE)
    return type(error)(of_error.split(stated)[-1].strip())
