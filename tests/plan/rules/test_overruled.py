"""A key that another one overrules does not lose in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.config.load import load_with_source
from framework.errors import ConfigError, Problem
from framework.plan.plan import default_cluster, make_plan

EPOCHS = "training: {max_epochs: 4}\nevaluation: {every_epochs: 2}\ncheckpoint: {every_epochs: 2}\n"
STEPS = "training: {max_steps: 300}\nevaluation: {every_steps: 50}\ncheckpoint: {every_steps: 50}\n"
BOTH = "training:\n  max_steps: 300\n  max_epochs: 4\n"


def findings(folder: Path, text: str, *settings: str) -> list[Problem]:
    (folder / "x.yaml").write_text(text)
    config, source = load_with_source(folder / "x.yaml", settings)
    return [
        found
        for found in make_plan(config, default_cluster(config), source=source).findings
        if found.kind == "overruled-key"
    ]


@pytest.mark.parametrize(
    ("key", "wins", "count"),
    [
        ("training.max_epochs", "training.max_steps", 300),
        ("evaluation.every_epochs", "evaluation.every_steps", 50),
        ("checkpoint.every_epochs", "checkpoint.every_steps", 50),
    ],
)
def test_what_the_command_line_asks_for_in_vain_is_refused(
    tmp_path: Path, key: str, wins: str, count: int
) -> None:
    line = (
        f"command line: {key} = 3: {wins} is {count} and wins, so that this would be ignored; add {wins}=null, or "
        "change that one instead [overruled-key]"
    )
    for settings in ([f"{key}=3"], [f"{wins}={count}", f"{key}=3"]):
        with pytest.raises(ConfigError) as caught:
            findings(tmp_path, STEPS, *settings)
        assert str(caught.value) == line
    assert findings(tmp_path, STEPS, f"{key}=3", f"{wins}=null") == []


def test_a_file_that_has_both_gets_a_warning(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, BOTH)
    assert (found.severity, found.line) == ("warning", 3)
    assert str(found).endswith(
        "training.max_steps is 300 and wins, so that this is ignored; keep one of the two [overruled-key]"
    )
    assert [
        found.severity
        for found in findings(tmp_path, "{}", "training={max_steps: 3, max_epochs: 1}")
    ] == ["warning"]


def test_a_short_trial_of_a_long_run_is_what_everybody_does(tmp_path: Path) -> None:
    settings = ("training.max_steps=5", "evaluation.every_steps=2", "checkpoint.every_steps=2")
    assert (
        findings(tmp_path, EPOCHS, *settings)
        == findings(tmp_path, EPOCHS)
        == findings(tmp_path, STEPS)
        == []
    )
