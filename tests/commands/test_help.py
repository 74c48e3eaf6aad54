"""The manners of the command line: help that fits a terminal, examples that hold, options in both
spellings, names that a slip finds.
"""

from __future__ import annotations

import shlex

import pytest

from framework.cli import main
from framework.commands.table import BUILT_IN
from framework.errors import EXIT_OK, EXIT_USAGE
from framework.system.command_names import BY_NAME, GROUPS
from tests.places import ROOT
from tools.docs_site.reference import parsers

WIDTH = 80


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def test_the_list_has_every_command_once_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == EXIT_OK
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > WIDTH] == []
    assert set(BY_NAME) == {command.name for command in BUILT_IN}
    for title, commands in GROUPS.items():
        assert f"\n{title}:\n" in shown
        for command in commands:
            assert f"\n  {command.name:<12}  {command.help}\n      dsf " in shown


def test_the_help_of_a_command_fits_a_terminal_and_its_examples_are_commands_of_it() -> None:
    found = parsers()
    assert set(BY_NAME) <= set(found)
    for name, command in BY_NAME.items():
        parser = found[name]
        text = parser.format_help()
        assert [line for line in text.splitlines() if len(line) > WIDTH] == [], name
        assert text.endswith(f"\nmore: {command.page}\n")
        assert (ROOT / command.page).is_file()
        options = parser._option_string_actions
        for example in command.examples:
            assert f"\n  {example}\n" in text
            words = shlex.split(example.partition(" > ")[0])
            assert words[: 1 + len(name.split())] == ["dsf", *name.split()]
            assert {word for word in words if word.startswith("--")} <= set(options), example


def test_every_option_of_every_command_goes_in_both_spellings() -> None:
    num_options = 0
    for name, parser in parsers().items():
        for option in list(parser._option_string_actions):
            for other in {option.replace("_", "-"), f"--{option[2:].replace('-', '_')}"}:
                if option.startswith("--"):
                    parser.learn_spelling(other)  # type: ignore[attr-defined]
                    options = parser._option_string_actions
                    assert options[other] is options[option], name
                    num_options += 1
    assert num_options > 150


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["trian"], "(did you mean train?)"),
        (["resume", "runs/a"], "(did you mean train CONFIG checkpoint.resume=auto?)"),
        (["test", "runs/a"], "(did you mean evaluate?)"),
        (["chekc", "run.yaml"], "(did you mean check?)"),
        (["plan", "run.yaml", "--num-gpu", "2"], "--num-gpu (did you mean --num_gpus?)"),
        (["check", "run.yaml", "--frobnicate"], "unrecognized arguments: --frobnicate; see dsf"),
        (["train"], "train: name a run config, for example ds_configs/quickstart.yaml"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    words: list[str], stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_USAGE
    assert stated in capsys.readouterr().err


def test_the_other_spelling_does_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(ROOT / "ds_configs/quickstart.yaml")
    assert main(["check", quickstart, "--num_gpus", "2"]) == EXIT_OK
    first = capsys.readouterr()
    assert main(["check", quickstart, "--num-gpus=2"]) == EXIT_OK
    assert capsys.readouterr() == first


def test_train_is_launch_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(ROOT / "ds_configs/quickstart.yaml")
    options = ["--num_gpus", "2", "--master_port", "29631", "--dry-run"]
    assert main(["launch", quickstart, *options]) == EXIT_OK
    launched = capsys.readouterr()
    assert main(["train", quickstart, *options]) == EXIT_OK
    assert capsys.readouterr() == launched
