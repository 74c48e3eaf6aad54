"""Code that calls `exit()` while it is part of a run: a failure with a place, never an end like any other.

`SystemExit` is no `Exception`. Nobody on its way would stop it, and a rank that ends with 0 in mid-run looks finished
to every launcher.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Final

from framework.errors import TrainingError, printable
from framework.system.arguments import HelpShown

_EXITS: Final = re.compile(
    r"_sitebuiltins|[/\\]argparse\.py$"
)  # `exit`, `quit`; a parser that somebody asks in mid-run
# Of signals: a command's own, and a run's, from which a script's own is called.
_HANDLERS: Final = frozenset({("framework.system.stop_signals", "end"), ("framework.system.stop_request", "handle")})
_LONGEST: Final = 200


@contextmanager
def refusing_exits(*, speaks: Callable[[str], bool] = lambda text: True) -> Iterator[None]:
    """Raise a TrainingError where code in the block, a user's or a library's, would end the process.

    Args:
        speaks: whether this rank prints the error of this text; by default it does, for nobody knows of the others.

    Raises:
        TrainingError: kind ``exit-called``.
    """
    try:
        yield
    except SystemExit as end:
        if is_asked_for(end):
            raise
        failed = exited(end)
        failed.is_of_one_rank = speaks(str(failed))
        raise failed from end


def is_asked_for(end: SystemExit) -> bool:
    """Whether a user asked for it: for the help of a command, or by a signal (the framework's handler, or a script's
    own).
    """
    frames = (frame for frame, _ in walk_tb(end.__traceback__))
    return isinstance(end, HelpShown) or any(
        (each.f_globals.get("__name__"), each.f_code.co_name) in _HANDLERS for each in frames
    )


def exited(end: SystemExit) -> TrainingError:
    """The error that names where `end` was raised."""
    code = printable(" ".join(str(end.code).split()))[:_LONGEST]
    return TrainingError(
        f"{_place(end)}: it exits in the middle of the run (SystemExit: {code}); raise an exception there, or return "
        "[exit-called]"
    )


def _place(end: SystemExit) -> str:
    frames = traceback.extract_tb(end.__traceback__)
    callers = [frame for frame in frames if not _EXITS.search(frame.filename)] or frames
    return f"{callers[-1].filename}:{callers[-1].lineno}" if callers else "a part of the run"
