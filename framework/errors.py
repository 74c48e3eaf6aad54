"""Every error a user can meet, and the exit code each one ends the process with.

    FrameworkError                 exit code
    |- UsageError                  64   the command line itself is wrong
    |- ConfigError                 78   the run as described cannot work: holds every Problem found
    |- TrainingError               70   training started and failed
    |  `- PeerLostError            76   another rank or node has ended or cannot be reached
    |- StorageError                74   the run folder or a checkpoint cannot be read or written
    |  `- RunFolderLostError       74   the run folder is no longer this run's
    `- RunStopped                  75   the run was asked to stop, and stopped in good order

A `Problem` is one line: place, key, value, reason, fix, and a stable kind in brackets. Exit codes
follow sysexits(3) where a number exists there: a job scheduler can distinguish "never retry" (64,
78) from "may work next time". `Problem`, and the errors of files and command lines, are those of
`deepspeed_lint`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from deepspeed_lint.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_PROBLEMS,
    EXIT_USAGE,
    MISSING,
    ConfigError,
    FrameworkError,
    Problem,
    Severity,
    UsageError,
    Written,
    counted,
    is_terminal,
    printable,
    show_value,
)

__all__ = [
    "EXIT_CONFIG",
    "EXIT_NO_PROGRESS",
    "EXIT_OK",
    "EXIT_PEER_LOST",
    "EXIT_PROBLEMS",
    "EXIT_STOPPED",
    "EXIT_STORAGE",
    "EXIT_TRAINING",
    "EXIT_USAGE",
    "MISSING",
    "ConfigError",
    "FrameworkError",
    "PeerLostError",
    "Problem",
    "RunFolderLostError",
    "RunStopped",
    "Severity",
    "StorageError",
    "TrainingError",
    "UsageError",
    "Written",
    "counted",
    "explaining",
    "in_one_line",
    "is_terminal",
    "missing_package",
    "printable",
    "show_value",
]

EXIT_TRAINING: Final = 70
EXIT_STORAGE: Final = 74
EXIT_STOPPED: Final = 75
EXIT_PEER_LOST: Final = 76
EXIT_NO_PROGRESS: Final = 77


def in_one_line(error: BaseException, *, longest: int = 200) -> str:
    """Return type and text of an error that another package raised; such a text may fill pages."""
    text = " ".join(str(error).split())[:longest]
    if text:
        return f"{type(error).__name__}: {text}"
    return type(error).__name__


def missing_package(name: str, *, what: str, extra: str = "train") -> ConfigError:
    """Make the error for a package that `what` needs and that is not installed: a ConfigError,
    because the command line is right, and a retry does not help.
    """
    reason = f"{what} needs the package {name}, which {sys.executable} does not have"
    fix = f"in the checkout: ./launch.sh setup {extra}, or pip install -e '.[{extra}]'"
    return ConfigError.of(kind="package-missing", reason=reason, fix=fix)


@contextmanager
def explaining(*explanations: Callable[[Exception], Exception | None]) -> Iterator[None]:
    """Replace an error by the explanation of the first function that has one, with the error as its
    cause; other errors pass. With too many open files an explanation cannot be imported.
    """
    try:
        yield
    except Exception as error:
        for explain in explanations:
            try:
                explanation = explain(error)
            except OSError as failure:
                if failure.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                continue
            if explanation is not None:
                raise explanation from error
        raise


class TrainingError(FrameworkError):
    """Training started and could not go on."""

    exit_code = EXIT_TRAINING


class StorageError(FrameworkError):
    """A run folder or a checkpoint cannot be read or written."""

    exit_code = EXIT_STORAGE


class RunFolderLostError(StorageError):
    """The run folder was removed, renamed or taken by another run while this run wrote to it."""


class PeerLostError(TrainingError):
    """Another rank or node has ended or cannot be reached; its own last message has the reason."""

    exit_code = EXIT_PEER_LOST


class RunStopped(FrameworkError):  # noqa: N818 - it is no error
    """The run was asked to stop, and stopped in good order. It is no failure, and no completed run
    either: exit code 75.
    """

    exit_code = EXIT_STOPPED
