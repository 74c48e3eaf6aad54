"""The page of questions: each YAML that it shows is a valid part of a run config, and each command is
one that there is.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from framework.commands.completion import parser_of
from framework.commands.table import find_command
from framework.config.load import load_config
from tests.places import ROOT

INDEX = (ROOT / "docs/index.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/how-do-i.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "ds_configs/quickstart.yaml").read_text(encoding="utf-8").splitlines()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^dsf ([^#\n]+)", PAGE + INDEX, flags=re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS)
def test_its_yaml_is_part_of_a_run_config(block: str, tmp_path: Path) -> None:
    sections = re.findall(r"^([a-z]+):", block, flags=re.MULTILINE)
    # The quickstart has a line for each section.
    rest = [line for line in QUICKSTART if line.partition(":")[0] not in sections]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(rest) + "\n" + block, encoding="utf-8")
    config = load_config(path)
    assert set(sections) <= set(config.model_fields_set)


@pytest.mark.parametrize("line", COMMANDS)
def test_its_commands_take_their_words(line: str) -> None:
    command, rest = find_command(shlex.split(line))
    parser = parser_of(command.main)
    assert parser is not None
    parser.parse_args(rest)


def test_there_are_enough_of_both() -> None:
    assert len(BLOCKS) > 15
    assert len(COMMANDS) > 5
