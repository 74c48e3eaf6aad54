"""Check of a thread at the prompt of a debugger."""

from __future__ import annotations

import code
import os
import pdb
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.system.frames import is_at_prompt


def in_pdb(reader: int) -> None:
    with os.fdopen(reader) as stdin, Path(os.devnull).open("w") as stdout:
        debugger = pdb.Pdb(stdin=stdin, stdout=stdout, nosigint=True, readrc=False)
        debugger.set_trace(sys._getframe())
        del debugger


def in_a_prompt(reader: int) -> None:
    with os.fdopen(reader) as stdin:
        console = code.InteractiveConsole()
        console.raw_input = lambda prompt="": _line(stdin)  # type: ignore[method-assign]
        console.interact(banner="", exitmsg="")


def _line(stdin: object) -> str:
    line = stdin.readline()  # type: ignore[attr-defined]
    if not line:
        raise EOFError
    return str(line)


def asleep(reader: int) -> None:
    with os.fdopen(reader) as stdin:
        stdin.readline()


def traced(reader: int) -> None:
    """Trace the thread as coverage and profilers do."""
    sys.settrace(lambda *_: None)
    try:
        asleep(reader)
    finally:
        sys.settrace(None)


@pytest.mark.parametrize(
    ("wait", "expected"),
    [(in_pdb, True), (in_a_prompt, True), (asleep, False), (traced, False)],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_prompt_is_known_by_what_waits_there(wait: Callable[[int], None], expected: bool) -> None:
    reader, writer = os.pipe()
    thread = threading.Thread(target=wait, args=(reader,), daemon=True)
    thread.start()
    assert thread.ident is not None
    try:
        deadline = time.monotonic() + 60
        while is_at_prompt(thread.ident) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert is_at_prompt(thread.ident) == expected
    finally:
        os.write(writer, b"c\n" if wait is in_pdb else b"\n")
        os.close(writer)
        thread.join(60)
    assert not thread.is_alive()
    assert not is_at_prompt(thread.ident)
