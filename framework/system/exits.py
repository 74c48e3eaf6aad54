"""Ends of a process: uncaught errors become one line and an exit code, and early exits of foreign
code are named.

`fit` and `load_config` set it up in a script, but not in an interactive interpreter, a notebook or
pytest, not if the script has a `sys.excepthook` of its own, and not with `DSF_TRACEBACK=1` in the
environment. Errors that a script catches, or raises itself, are left to it.
"""

from __future__ import annotations

import atexit
import builtins
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import walk_tb
from types import TracebackType
from typing import Any, Final, NoReturn

from framework.errors import (
    EXIT_CONFIG,
    EXIT_STOPPED,
    EXIT_TRAINING,
    EXIT_USAGE,
    FrameworkError,
    RunFolderLostError,
    TrainingError,
    in_one_line,
    printable,
)
from framework.system.command_parser import HelpShown
from framework.system.output import write
from framework.system.parent_watch import record_failure, report_end

SWITCH: Final = "DSF_TRACEBACK"
# A launcher ends all ranks when the first one ends, so the others wait for the rank that prints the
# error.
SILENT_RANKS_WAIT_SECONDS: Final = 2.0
# files of `exit`, `quit`, and of a parser that is called in mid-run
_EXITS: Final = re.compile(r"_sitebuiltins|[/\\]argparse\.py$")
# Signal handlers: that of a command, and that of a run, which calls a script's own.
_HANDLERS: Final = frozenset(
    {("framework.system.stopping", "end"), ("framework.system.stopping", "handle")}
)
_LONGEST: Final = 200


def end_in_one_line() -> None:
    """Make an uncaught error one line and an exit code from now on, if this process runs a script.

    It is called again when the process group is up: torch then sets a hook of its own, which holds
    back the output until it returns.
    """
    hook = sys.excepthook
    if _is_known(hook) and _is_a_script() and os.environ.get(SWITCH, "") in ("", "0"):
        sys.excepthook = _Hook(hook)


def _is_known(hook: Any) -> bool:
    """Check whether a hook is Python's, or torch's around Python's or ours.

    torch keeps the former hook, which may be the script's own.
    """
    is_torchs = False
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        is_torchs = True
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return hook is sys.__excepthook__ or (is_torchs and isinstance(hook, _Hook))


def _is_a_script() -> bool:
    if hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__"):
        return False
    if sys.flags.interactive or sys.flags.inspect or "pytest" in sys.modules:
        return False
    return hasattr(sys.modules.get("__main__"), "__file__")


class _Hook:
    """A `sys.excepthook`; errors other than a FrameworkError go to the former hook."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End the process with one line for a FrameworkError. Report any other error to the agent,
        leave its output to the former hook, and end with EXIT_TRAINING if it came out of a
        run and the process group is up.
        """
        if isinstance(error, FrameworkError) and sys.excepthook is self:
            _end(error)
        if isinstance(error, Exception):
            report_end(in_one_line(error))
        self._before(kind, error, trace)
        if not isinstance(error, Exception) or sys.excepthook is not self:
            return
        if _group_is_up() and _came_through_fit(trace):
            _leave(EXIT_TRAINING)


def report(
    error: FrameworkError,
    *,
    wait: Callable[[], None] = lambda: time.sleep(SILENT_RANKS_WAIT_SECONDS),
) -> None:
    """Print the error that ends this process.

    Mostly every rank has the same error, and one on each host prints it; the others call `wait`.
    """
    report_end(str(error), is_folder_lost=isinstance(error, RunFolderLostError))
    if os.environ.get("LOCAL_RANK", "0") == "0" or error.is_of_one_rank:
        record_failure(str(error))
        write(sys.stderr, f"{error}\n")
    else:
        wait()


def _end(error: FrameworkError) -> NoReturn:
    report(error)
    if error.exit_code in (EXIT_CONFIG, EXIT_USAGE) and not _group_is_up():
        # nothing was started: exit handlers have nothing to wait for
        raise SystemExit(error.exit_code) from None
    if error.exit_code == EXIT_STOPPED and not _group_is_up():
        with suppress(Exception):
            # All ranks have ended well, and exit handlers do not wait. DeepSpeed's threads have to
            # end before the interpreter does.
            atexit._run_exitfuncs()
    _leave(error.exit_code)


def _leave(code: int) -> NoReturn:
    """Exit without exit handlers, as train.py does: they would wait for ranks that are gone."""
    write(sys.stdout, "")
    write(sys.stderr, "")
    os._exit(code)


def _group_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _came_through_fit(trace: TracebackType | None) -> bool:
    entry_modules = ("framework.training", "framework.run")
    return any(frame.f_globals.get("__name__") in entry_modules for frame, _ in walk_tb(trace))


@contextmanager
def refusing_exits(*, speaks: Callable[[str], bool] = lambda text: True) -> Iterator[None]:
    """Raise a TrainingError if code in the block, a user's or a library's, would end the process.

    A rank that ends with 0 in mid-run looks finished to every launcher.

    Args:
        speaks: whether this rank prints an error with this text; by default it does, as it cannot
            know whether the others have it.

    Raises:
        TrainingError: kind ``exit-called``.
    """
    try:
        yield
    except SystemExit as end:
        if is_asked_for(end):
            raise
        error = exited(end)
        error.is_of_one_rank = speaks(str(error))
        raise error from end


def is_asked_for(end: SystemExit) -> bool:
    """Check whether the user requested this exit: by a command's help option, or by a signal."""
    if isinstance(end, HelpShown):
        return True
    for frame, _ in walk_tb(end.__traceback__):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _HANDLERS:
            return True
    return False


def exited(end: SystemExit) -> TrainingError:
    """Return the error that names where `end` was raised."""
    code = printable(" ".join(str(end.code).split()))[:_LONGEST]
    return TrainingError(
        f"{_place(end)}: it exits in the middle of the run (SystemExit: {code}); raise an "
        "exception there, or return [exit-called]"
    )


def _place(end: SystemExit) -> str:
    frames = traceback.extract_tb(end.__traceback__)
    callers = [frame for frame in frames if not _EXITS.search(frame.filename)] or frames
    if callers:
        return f"{callers[-1].filename}:{callers[-1].lineno}"
    return "a part of the run"
