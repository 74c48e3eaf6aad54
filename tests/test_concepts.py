"""What the house weighs is concepts. These are today's counts: one rises with a decision note that
names the user who needs it, what it replaces, and why it is no plug-in (CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import framework
from tests.launched import ROOT, run_ranks
from tools.docs_site.kinds import find_kinds
from tools.docs_site.reference import config_keys, parsers

CONFIG_KEYS = 305
KINDS_OF_PROBLEMS = 693
COMMANDS = 25  # train.py is one, launch stands for train
OPTIONS = 224
PUBLIC_NAMES = 17
# Before the first step of a run of LeNet on two ranks. Rank 0 prints an estimate of the memory and
# writes the metrics.
MODULES = {0: 161, 1: 141}
BYTES_OF_SOURCE = {0: 1_223_000, 1: 994_000}


def options() -> set[tuple[str, str]]:
    """List every option of every command that its help names."""
    listed = set()
    for command, parser in parsers().items():
        if command == "launch":  # its options are those of train
            continue
        for action in parser._actions:
            is_help = isinstance(action, argparse._HelpAction)
            if action.option_strings and action.help is not argparse.SUPPRESS and not is_help:
                listed.add((command, action.option_strings[-1]))
    return listed


def test_config_keys_are_not_more() -> None:
    assert len(config_keys()) <= CONFIG_KEYS


@pytest.mark.slow
def test_kinds_of_problems_are_not_more() -> None:
    assert len(find_kinds()) <= KINDS_OF_PROBLEMS


def test_commands_and_options_are_not_more() -> None:
    assert len(parsers()) <= COMMANDS
    assert len(options()) <= OPTIONS


def test_public_names_are_not_more() -> None:
    assert len(framework.__all__) <= PUBLIC_NAMES


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("loaded")
    run_ranks(
        ROOT / "tests/jobs/loaded_modules.py",
        "--config",
        str(ROOT / "ds_configs/quickstart.yaml"),
        "training.max_epochs=null",
        "training.max_steps=1",
        f"run.output_dir={folder}/runs",
        num_ranks=2,
        cwd=folder,
    )
    return {
        rank: json.loads((folder / f"loaded-rank{rank}.json").read_text(encoding="utf-8"))
        for rank in (0, 1)
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_plans_once(loaded: dict[int, dict[str, Any]], rank: int) -> None:
    assert loaded[rank]["plans"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_what_trains(loaded: dict[int, dict[str, Any]], rank: int) -> None:
    modules = loaded[rank]["modules"]
    assert "deepspeed_lint.keys" not in modules
    assert not [name for name in modules if name.startswith("framework.plan.search")]
    assert len(modules) <= MODULES[rank], modules
    assert loaded[rank]["bytes"] <= BYTES_OF_SOURCE[rank]
