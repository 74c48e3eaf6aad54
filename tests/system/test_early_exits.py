"""Code that exits in the middle of a run: never a good end."""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.errors import EXIT_TRAINING, TrainingError
from framework.system.command_parser import CommandParser, HelpShown
from framework.system.exits import refusing_exits
from framework.system.stopping import StopRequest, ending_in_good_order
from tests.launched import job_environment
from tests.places import ROOT


def ask(_name: str) -> None:
    argparse.ArgumentParser("their").parse_args(["--unknown"])


@pytest.mark.parametrize(
    ("leave", "stated"),
    [
        (lambda: sys.exit(), "SystemExit: None"),
        (lambda: sys.exit(0), "SystemExit: 0"),
        (lambda: sys.exit("by\x1b[1m"), "SystemExit: by\\x1b[1m"),
        (lambda: exit(3), "SystemExit: 3"),
        (lambda: ask(""), "SystemExit: 2"),
    ],
)
def test_an_exit_is_an_error_with_the_place_of_the_call(
    leave: Callable[[], object], stated: str
) -> None:
    with pytest.raises(TrainingError, match=r"\[exit-called\]$") as caught, refusing_exits():
        leave()
    assert stated in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert caught.value.exit_code == EXIT_TRAINING


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_other_ends_stay_what_they_are(error: type[BaseException]) -> None:
    with pytest.raises(error), refusing_exits():
        raise error


def test_help_ends_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpShown) as shown, refusing_exits():
        CommandParser("x").parse_args(["--help"])
    assert shown.value.code == 0
    assert capsys.readouterr().out.startswith("usage: x")


def test_a_scripts_own_handler_of_signals_may_exit() -> None:
    """The handler exits at the second request, more than two seconds after the first."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    try:
        with StopRequest(clock=itertools.count(0, 3).__next__).handling():
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(SystemExit) as asked, refusing_exits():
                signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit), refusing_exits(), ending_in_good_order():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(TrainingError), refusing_exits(), ending_in_good_order():
            sys.exit(0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked.value.code == 5


def test_train_py_ends_with_70_where_the_run_exits() -> None:
    code = (
        "import sys\nfrom framework import script\nscript._train = lambda *_: sys.exit(0)\n"
        "sys.argv = ['train.py', '--config', 'run.yaml']\nscript.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_TRAINING, done.stderr
    assert done.stderr == (
        "<string>:3: it exits in the middle of the run (SystemExit: 0); raise an exception there, or return "
        "[exit-called]\n"
    )
    helped = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert helped.returncode == 0


SCRIPT = """
import sys
import torch
import framework
from framework.errors import TrainingError

class Data:
    def __init__(self, leaves=False):
        self.leaves = leaves
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if self.leaves:
            exit()                                                          # in the data
        return torch.ones(4), torch.tensor(index % 2)

class Net(torch.nn.Linear):
    def forward(self, x):
        quit(0)                                                             # in the model

def leave(*_):
    sys.exit(0)                                                             # in a function

def fit(name, model=torch.nn.Linear(4, 2), data=Data(), task=torch.nn.functional.cross_entropy, num_workers=0, **more):
    config = {"run": {"name": name}, "batch": {"global_size": 8}, "training": {"max_steps": 2}, "checkpoint": {"at_end": False},
              "monitors": {"tensorboard": False, "csv": False, "progress": "off"}, "data": {"num_workers": num_workers}}
    framework.fit(config, model=model, train_data=data, task=task, **more)

def caught(name, **more):
    try:
        fit(name, **more)
    except TrainingError as error:
        print(name, error, flush=True)

caught("optimizer", optimizer=leave)
caught("builder", model=lambda: leave())
caught("task", task=lambda outputs, targets: leave())
caught("data", data=Data(leaves=True))
caught("worker", data=Data(leaves=True), num_workers=1)
fit("model", model=Net(4, 2))
"""  # noqa: E501


PARTS = {
    "the data": ["data", "worker"],
    "a function": ["optimizer", "builder", "task"],
    "the model": ["model"],
}


@pytest.mark.slow
def test_every_part_of_a_run_that_exits_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == EXIT_TRAINING, done.stderr
    lines = enumerate(SCRIPT.splitlines(), 1)
    places = {
        name: number
        for number, line in lines
        for name in PARTS.get(line.rpartition("# in ")[2], ())
    }
    reported = [line for line in done.stdout.splitlines() if "[exit-called]" in line]
    assert [line.split()[0] for line in reported] == [
        "optimizer",
        "builder",
        "task",
        "data",
        "worker",
    ], done.stdout + done.stderr
    for line in reported:
        name, place = line.split()[:2]
        assert place == f"{tmp_path / 'mine.py'}:{places[name]}:", line
    last = [line for line in done.stderr.splitlines() if "[exit-called]" in line]
    assert len(last) == 1
    assert last[0].startswith(f"{tmp_path / 'mine.py'}:{places['model']}: ")
    assert "Traceback" not in done.stderr
