"""Log of a rank: its own file, lines on stdout, and warnings on stderr.

The file also has DeepSpeed's messages, so that it shows the rank's progress: both write with
`logging` and share one handler. Nothing goes there before a file is given.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from framework.errors import FrameworkError, Problem, RunStopped
from framework.system.file_writer import settle
from framework.system.output import visible, write

_LOGGER: Final = logging.getLogger("dsf-trainer")
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
# else `logging` prints warnings by itself where there is no file yet
_LOGGER.addHandler(logging.NullHandler())
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


# For the log alone; errors are logged even on ranks that do not print them.
note = _LOGGER.info
note_warning = _LOGGER.warning
note_error = _LOGGER.error


@contextmanager
def without_warnings_of(name: str) -> Iterator[None]:
    """Leave out what a library logs below errors, meanwhile; `name`: of its logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def print_line(line: str = "") -> None:
    """Print a line, and log it.

    A run does not end because its output is closed (``| head``, a closed terminal).
    """
    write(sys.stdout, f"{line}\n")
    if line:
        note(line)


class _Visible(logging.Formatter):
    """Formatter that escapes control characters: a log may be read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def write_to(handler: logging.FileHandler) -> None:
    """Log to this file from now on, and no more to the one before."""
    stop_logging_to_file()
    handler.setFormatter(_Visible(_FORMAT))
    _LOGGER.addHandler(handler)


def stop_logging_to_file() -> None:
    """Stop logging to the file: the next run of this process has another one.

    All messages are in the file then. It is left open, for DeepSpeed's.
    """
    settle()
    for handler in list(_LOGGER.handlers):
        if isinstance(handler, logging.FileHandler):
            handler.flush()
            _LOGGER.removeHandler(handler)


@contextmanager
def logging_the_run() -> Iterator[None]:
    """Log the error that ends the run, re-raise it, and log no more to the run's file afterwards.

    Each rank logs its own error, as another rank may report it for all.
    """
    try:
        yield
    except RunStopped as stopped:
        note(str(stopped))
        raise
    except Exception as error:
        note_error(_reported(error))
        raise
    finally:
        stop_logging_to_file()


def _reported(error: Exception) -> str:
    """Return the text of an error of ours with its causes, and the traceback of any other."""
    if not isinstance(error, FrameworkError):
        return traceback.format_exc().rstrip()
    reported = [str(error)]
    cause = error.__cause__
    # A cause of this class comes from a data loader's worker: its text has the worker's traceback.
    while isinstance(cause, FrameworkError):
        if str(cause) not in reported:
            reported.append(str(cause))
        cause = cause.__cause__
    if cause is not None:
        reported.append("".join(traceback.format_exception(cause)))
    return "\n".join(reported).rstrip()


_listener: Callable[..., object] | None = None


def listen_to_events(listener: Callable[..., object] | None) -> None:
    """Call `listener` for every event from now on, with its kind and details; None: no more."""
    global _listener
    _listener = listener


def report_event(kind: str, **details: object) -> None:
    """Hand an event to this rank's listener, if there is one."""
    if _listener is not None:
        _listener(kind, **details)


def warn(
    text: str, *, is_of_all_ranks: bool = False, kind: str = "warning", **details: object
) -> None:
    """Print a warning on stderr, beside the progress on stdout, and log it.

    Args:
        text: the warning, with its kind in brackets.
        is_of_all_ranks: whether every rank meets it at the same time: rank 0 prints it, and the
            others only log it.
        kind: of the event that the listener gets (`listen_to_events`).
        details: of that event.
    """
    line = " ".join(text.split())
    note_warning(line)
    report_event(kind, text=line, **details)
    if not is_of_all_ranks or os.environ.get("RANK", "0") == "0":
        write(sys.stderr, f"warning: {line}\n")


def print_problem(problem: Problem) -> None:
    """Print a problem that does not prevent a start, on stderr."""
    write(sys.stderr, f"{problem.severity}: {problem}\n")
