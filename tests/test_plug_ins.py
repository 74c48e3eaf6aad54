"""The package of docs/plug-ins.md, as it stands there: built, installed by pip into an environment
of its own, checked and trained.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launched import copied_op
from tests.places import ROOT

PAGE = ROOT / "docs/plug-ins.md"
# Kinds of the sections that the page leaves out.
MORE = {
    "pyproject.toml": """
[project]
name = "dsf-more"
version = "1.0"
[project.entry-points]
"dsf.tasks" = {smoothed = "more:Smoothed"}
"dsf.optimizers" = {signs = "more:Signs"}
"dsf.schedulers" = {halving = "more:Halving"}
""",
    "more/__init__.py": '''
from typing import ClassVar, Literal
from framework.plug_ins import Fraction, OptimizerKind, PositiveCount, SchedulerKind, TaskKind

class Smoothed(TaskKind):
    """Cross-entropy, smoothed."""
    builds: ClassVar[str] = "more.parts:make_loss"
    kind: Literal["smoothed"] = "smoothed"
    smoothing: Fraction = 0.1
    """Share of the target that is spread."""

class Signs(OptimizerKind):
    """Steps along the signs of the gradient."""
    builds: ClassVar[str] = "more.parts:make_optimizer"
    kind: Literal["signs"] = "signs"
    momentum: Fraction = 0.9
    """Share of the last update carried over."""

class Halving(SchedulerKind):
    """Half the rate every so many steps."""
    builds: ClassVar[str] = "more.parts:make_schedule"
    kind: Literal["halving"] = "halving"
    steps: PositiveCount = 10
    """Steps between two halvings."""
''',
    "more/parts.py": """
import torch

def make_loss(smoothing):
    return torch.nn.CrossEntropyLoss(label_smoothing=smoothing)

def make_optimizer(parameters, lr, momentum):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)

def make_schedule(optimizer, steps):
    return torch.optim.lr_scheduler.StepLR(optimizer, steps, 0.5)
""",
}
pytestmark = pytest.mark.slow


def write_package(folder: Path) -> None:
    """Write the files that the page shows, by their titles."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, re.DOTALL):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


class Environment:
    """A fresh environment with pip, in which our own packages are found behind its own."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self.python = folder / "venv/bin/python"
        self.folder = folder / "work"
        self.folder.mkdir()
        places = [str(ROOT), sysconfig.get_path("purelib")]
        self.variables: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": copied_op(folder / "ops"),
        }

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *words],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=240,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("plug_ins")
    write_package(folder / "package")
    environment = Environment(folder)
    options = ("--no-index", "--no-deps", "--no-build-isolation")
    for name, text in MORE.items():
        place = folder / "more" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    packages = (str(folder / "package"), str(folder / "more"))
    done = environment.call("-m", "pip", "install", *options, *packages)
    assert done.returncode == 0, done.stdout + done.stderr
    config = (folder / "package/waves.yaml").read_text(encoding="utf-8")
    (environment.folder / "waves.yaml").write_text(config, encoding="utf-8")
    return environment


def test_check_knows_its_kinds(environment: Environment) -> None:
    done = environment.call("-m", "framework", "check", "waves.yaml", "--num_gpus", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fine on 2 devices" in done.stdout
    done = environment.call("-m", "framework", "check", "waves.yaml", "model.widht=24")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] in PAGE.read_text(encoding="utf-8")
    done = environment.call("-m", "framework", "check", "waves.yaml", "model.kind=wave_nett")
    assert "did you mean 'wave_net'?" in done.stderr
    done = environment.call("-m", "framework", "check", "waves.yaml", "data.num_points=many")
    assert "data.num_points = many: text where a whole number belongs" in done.stderr


def test_the_schema_has_its_kinds(environment: Environment) -> None:
    done = environment.call("-m", "framework", "schema")
    assert done.returncode == 0, done.stderr
    schema = json.loads(done.stdout)
    width = schema["$defs"]["WaveNet"]["properties"]["width"]
    assert width["description"] == "Units of the hidden layer."
    references = [member["$ref"] for member in schema["properties"]["model"]["oneOf"]]
    assert "#/$defs/WaveNet" in references


def test_its_command_is_there(environment: Environment) -> None:
    done = environment.call("-m", "framework", "frequencies", "--count", "2")
    assert (done.returncode, done.stdout) == (0, "1 2\n"), done.stderr


def test_a_plan_knows_the_work_of_its_model(environment: Environment) -> None:
    done = environment.call("-m", "framework", "plan", "waves.yaml", "--num_gpus", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not estimated" not in done.stdout


def test_it_trains_from_yaml(environment: Environment) -> None:
    done = environment.call(str(ROOT / "train.py"), "--config", "waves.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (environment.folder / "runs/waves/metrics.jsonl").read_text().splitlines()
    accuracies = [json.loads(line).get("eval/accuracy") for line in lines]
    assert [value for value in accuracies if value is not None][-1] > 0.9
    assert 0 < float((environment.folder / "lowest.txt").read_text()) < 1


def test_a_task_an_optimizer_and_a_schedule_of_a_package_train(environment: Environment) -> None:
    settings = (
        "run.name=more",
        "task={kind: smoothed, smoothing: 0.05}",
        "optimizer={kind: signs, lr: 0.1}",
        "scheduler={kind: halving, steps: 5}",
    )
    done = environment.call("-m", "framework", "render", "waves.yaml", *settings)
    assert done.returncode == 0, done.stderr
    assert not {"optimizer", "scheduler"} & json.loads(done.stdout).keys()
    done = environment.call(str(ROOT / "train.py"), "--config", "waves.yaml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (environment.folder / "runs/more/metrics.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    rates = [point["train/lr"] for point in points if "train/lr" in point]
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] < 0.01
