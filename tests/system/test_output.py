"""Lines for a reader that has left."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.errors import is_coloured, painted
from framework.errors import show_value
from framework.system.output import visible, write
from tests.places import ROOT


@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_reader_that_left_changes_nothing(unbuffered: bool) -> None:
    program = """
import sys
from framework.errors import show_value
from framework.system.output import visible, write
for _ in range(3):
    write(sys.stdout, "a line\\n")
    write(sys.stderr, "a line\\n")
print("and what others print")
sys.exit(75)
"""
    reader, writer = os.pipe()
    os.close(reader)
    words = ["-u"] if unbuffered else []
    command = [sys.executable, *words, "-c", program]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 75


@pytest.mark.parametrize(("words", "code"), [(["--config", "nowhere.yaml"], 78), ([], 64)], ids=str)
def test_a_rank_ends_as_if_it_were_read(words: list[str], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", str(ROOT / "train.py"), *words]
    done = subprocess.run(command, stdout=writer, stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == code


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full, which refuses every byte"
)
def test_a_full_disk_neither() -> None:
    with Path("/dev/full").open("w") as stream:
        write(stream, "a line\n")
        write(stream, "a line\n")


def test_what_is_written_is_there_at_once() -> None:
    stream = io.StringIO()
    write(stream, "a line\n")
    write(None, "a process may have no stderr\n")
    assert stream.getvalue() == "a line\n"


STEERING = (
    "\x00",
    "\x07",
    "\b",
    "\r",
    "\x1b[2J",
    "\x7f",
    "\x85",
    "\x9b2J",
    "\u2028",
    "\u2029",
    *map(chr, range(0x202A, 0x202F)),
    *map(chr, range(0x2066, 0x206A)),
    "\udc9b",
    "\ufeff",
)


@pytest.mark.parametrize("text", STEERING, ids=ascii)
def test_what_would_steer_a_terminal_is_visible(text: str) -> None:
    stream = io.StringIO()
    write(stream, f"a{text}b \N{SNOWMAN}\tc\n")
    shown = text.encode("unicode_escape", "surrogatepass").decode()
    assert stream.getvalue() == f"a{shown}b \N{SNOWMAN}\tc\n"
    assert visible(f"{text}\n", keeps="") == shown + "\\n"
    assert show_value(f"a{text}b").isprintable()


@pytest.mark.parametrize(
    ("environment", "on_a_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"NO_COLOR": "", "FORCE_COLOR": "0"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)
def test_colours_are_for_terminals_unless_the_environment_decides(
    environment: dict[str, str],
    on_a_terminal: bool,
    elsewhere: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    assert is_coloured(stream) is elsewhere
    monkeypatch.setattr(stream, "isatty", lambda: True)
    assert is_coloured(stream) is on_a_terminal
    write(stream, "a.yaml:1:2: run.seed = -1: too small; write 0 [wrong-value]\n")
    assert ("\x1b[" in stream.getvalue()) is on_a_terminal


class Tee:
    """Stands in for a stream, with what `print` calls alone."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_a_stand_in_without_isatty_is_no_terminal() -> None:
    tee: Any = Tee()
    write(tee, "run.seed = -1: too small [wrong-value]\n")
    assert tee.text == "run.seed = -1: too small [wrong-value]\n"


def test_a_terminal_gets_long_problems_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    line = "a.yaml:1:2: run.seed = -1: it is too small; write 0 or more there [wrong-value]\n"
    piped, shown = io.StringIO(), io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    other = "a line that states no problem and is as long as it is, wider than the terminal\n"
    for stream in (piped, shown):
        write(stream, line + other)
    assert piped.getvalue() == line + other
    folded = (
        "a.yaml:1:2: run.seed = -1: it is too\n"
        "    small; write 0 or more there\n"
        "    [wrong-value]\n"
    )
    assert shown.getvalue() == folded + other
    coloured = painted(line, width=40)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == folded
    assert coloured.startswith("\x1b[1;31ma.yaml:1:2:\x1b[0m run.seed")
    assert coloured.endswith("\x1b[2m[wrong-value]\x1b[0m\n")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "a.yaml:1:2: run.seed = -1: too small [wrong-value]\n",
            "\x1b[1;31ma.yaml:1:2: \x1b[0mrun.seed = -1: too small\x1b[2m [wrong-value]\x1b[0m\n",
        ),
        (
            "warning: zero: it does nothing [inert-at-stage]\n",
            "\x1b[1;33mwarning: zero: \x1b[0mit does nothing\x1b[2m [inert-at-stage]\x1b[0m\n",
        ),
        ("note: nothing\n", "\x1b[36mnote: \x1b[0mnothing\n"),
        ("a.yaml: fine on 1 device\n", "a.yaml: fine on 1 device\n"),
        ("step 1/2 loss [red]\n", "step 1/2 loss [red]\n"),
        ("\n", "\n"),
    ],
)
def test_only_lines_that_state_a_problem_are_painted(line: str, shown: str) -> None:
    assert painted(line) == shown
