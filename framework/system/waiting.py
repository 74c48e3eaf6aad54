"""Messages about long waits of a start: what it waits for, since when, and until when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from framework.system.frames import is_at_prompt
from framework.system.log import note
from framework.system.stopping import announce

_FIRST_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 30.0
_open: Final[list[threading.Event]] = []  # waits of this process; only the last one is printed


@contextmanager
def waiting(what: str, *, usually: str = "", limit_seconds: float | None = None) -> Iterator[None]:
    """Print what this block waits for, after ten seconds and then every half minute.

    The first rank of each host prints it.

    Args:
        what: is waited for, as it follows ``waiting for``.
        usually: the usual time, in words.
        limit_seconds: after which the wait ends.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    done = threading.Event()
    _open.append(done)
    arguments = (done, what, usually, limit_seconds, threading.get_ident())
    threading.Thread(
        target=_print_while_waiting, args=arguments, name="waiting", daemon=True
    ).start()
    try:
        yield
    finally:
        done.set()
        _open.remove(done)


def _print_while_waiting(
    done: threading.Event, what: str, usually: str, limit_seconds: float | None, thread: int
) -> None:
    """Print the message of `waiting` again and again until `done` is set.

    It is left out while the waiting thread, `thread`, is at a prompt, or waits for another thing
    inside this wait.
    """
    began = time.time()
    wait = _FIRST_SECONDS
    if limit_seconds is not None:
        until = f", until {_clock(began + limit_seconds)}"
    else:
        until = ""
    if usually:
        expected = f" (usually {usually})"
    else:
        expected = ""
    while not done.wait(wait):
        wait = _AGAIN_SECONDS
        if _open and _open[-1] is done and not is_at_prompt(thread):
            line = (
                f"waiting for {what} since {_clock(began)}, {time.time() - began:.0f} "
                f"s{expected}{until}"
            )
            note(line)
            announce(line)


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
