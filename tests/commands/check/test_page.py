"""docs/check.md shows what `check` prints: every command on it is run, and its files are made from
it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.cli import main
from tests.places import ROOT

PAGE = ROOT / "docs/check.md"


def steps() -> Iterator[tuple[str, list[str]]]:
    """Every command of the page, and the lines below it."""
    page = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"```\n(.*?)```", page, re.DOTALL):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = step.removesuffix("\n").split("\n")
            yield command, lines


def test_the_page_on_check_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = 0
    for command, lines in steps():
        words = shlex.split(command)
        if words[0] == "cat":
            Path(words[1]).write_text("\n".join([*lines, ""]), encoding="utf-8")
            continue
        assert words[0] == "dsf"
        main(words[1:])
        out, err = capsys.readouterr()
        assert [*out.splitlines(), *err.splitlines()] == lines, command
        commands += 1
    assert commands == 6
