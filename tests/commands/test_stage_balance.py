"""`plan` tells where a pipeline's model would be cut, by a child that imports torch in its place.
Here it is started once, and answers otherwise in this process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.cli import main
from framework.commands import plan_question, stage_balance
from framework.commands.stage_balance import find_stage_balance
from framework.config.load import Source, config_from_values, load_config
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from tests.commands.children import answering_here
from tests.places import ROOT

OWN = """
from torch import nn
import torch

def build(width=4, size=6):
    print("user code prints")
    return nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 2))

def data():
    return torch.utils.data.TensorDataset(torch.randn(64, 6), torch.zeros(64).long())
"""
CONFIG = """
run: {name: own}
model: {target: "own:build", args: {width: 8}}
data: {target: "own:data"}
parallel: {pipe: 2}
batch: {global_size: 8, micro_size: 2}
"""


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of the user's and a config that names it."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(plan_question, "find_own_work", lambda *_: None)  # another child's answer
    # The working folder of these tests is not the checkout.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with answering_here(stage_balance, folder, monkeypatch):
        yield


def plan(**sections: Any) -> Plan:
    values = {
        "model": {"target": "own:build"},
        "data": {"target": "own:data"},
        "parallel": {"pipe": 2},
        "batch": {"global_size": 8, "micro_size": 2},
        **sections,
    }
    return make_plan(config_from_values(values), Cluster(devices_per_host=2))


def test_every_stage_is_a_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert main(["plan", "own.yaml", "--num_gpus", "2"]) == 0
    stated = capsys.readouterr()
    # 6 x 8 + 8 parameters of four bytes; 2 samples of 8 numbers cross the cut.
    assert [line for line in stated.out.splitlines() if line.startswith("stage ")] == [
        "stage 0: 1 layer (0), 56 parameters, 0.0 MB, 75% of the computation by its FLOPs, sends 0.00 MB per "
        "micro-batch",
        "stage 1: 2 layers (1 .. 2), 18 parameters, 0.0 MB, 25% of the computation by its FLOPs",
    ]
    assert stated.err == ""
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before


@pytest.mark.usefixtures("here")
def test_tools_get_what_the_run_will_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "own.yaml", "--num_gpus", "2", "--json", "parallel.partition=measured"]) == 0
    )
    reported = json.loads(capsys.readouterr().out)
    assert reported["pipeline"]["bounds"] == [0, 1, 3]
    assert [
        (stage["num_params"], stage["output_bytes"]) for stage in reported["pipeline"]["stages"]
    ] == [
        (56, 64),
        (18, None),
    ]
    (found,) = [one for one in reported["findings"] if one["kind"] == "stages-measured-at-start"]
    assert (found["severity"], found["file"]) == ("note", "command line")


@pytest.mark.usefixtures("here")
def test_what_cannot_be_cut_is_refused_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "own.yaml", "--num_gpus", "4", "parallel.pipe=4"]) == 78
    stated = capsys.readouterr()
    assert stated.out == ""
    assert stated.err == (
        "command line: parallel.pipe = 4: the model has only 3 layers; set parallel.pipe: 3 or less "
        "[pipe-exceeds-layers]\n"
    )
    assert main(["plan", "own.yaml", "--num_gpus", "2", "model.args.size=5"]) == 78
    line = capsys.readouterr().err
    assert line.startswith(
        "own.yaml:3: model = 0 (Linear): the layer fails on the output of the layer before"
    )
    assert line.endswith("[layer-failed]\n")


@pytest.mark.usefixtures("here")
def test_a_named_models_stages_are_those_of_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a child process the same is known as a child with torch counts."""
    named = make_plan(load_config(str(ROOT / "ds_configs/lenet_pipeline.yaml")), Cluster(1, 2))
    known = find_stage_balance(named, source=Source())
    monkeypatch.setattr(stage_balance, "_known_layers", lambda plan: [])
    assert find_stage_balance(named, source=Source()) == known
    assert known.pipeline is not None


def text_model(kind: str, stages: list[int], data: dict[str, Any]) -> Plan:
    model = {"kind": kind, "vocab_size": 261, "max_positions": 128, "hidden_size": 32}
    config = {
        "model": model | {"num_layers": 2, "num_heads": 4},
        "data": data | {"sequence_length": 128},
        "task": {"kind": "causal_lm" if kind == "gpt" else "masked_lm"},
        "parallel": {"pipe": stages[-1] + 1, "stages": stages},
        "batch": {"global_size": 4, "micro_size": 2},
    }
    return make_plan(config_from_values(config), Cluster(1, stages[-1] + 1))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "named",
    [
        text_model("bert", [0, 1, 2, 3, 4, 4, 4], {"kind": "text_pairs"}),
        text_model("gpt", [0, 1, 2, 3, 4, 5], {"kind": "conversations", "packing": True}),
    ],
    ids=["masks", "packed"],
)
def test_what_goes_along_with_the_values_is_sent(
    named: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments, masks and the places of packed tokens."""
    sent = []
    for _ in range(2):
        pipeline = find_stage_balance(named, source=Source()).pipeline
        assert pipeline is not None
        keys = ("num_params", "param_bytes", "output_bytes")
        sent.append([[stage[key] for key in keys] for stage in pipeline["stages"]])
        monkeypatch.setattr(stage_balance, "_known_layers", lambda plan: [])
    assert sent[0] == sent[1]


@pytest.mark.usefixtures("here")
def test_a_task_of_ones_own_is_looked_at(folder: Path) -> None:
    """A child with torch finds that a pipeline cannot call its `forward`, which no config tells."""
    text = "from framework.tasks.classification import Classification\n\n"
    text += "class Own(Classification):\n    def forward(self, model, inputs): ...\n"
    (folder / "own_task.py").write_text(text, encoding="utf-8")
    config = load_config(str(ROOT / "ds_configs/lenet_pipeline.yaml")).to_dict()
    config["task"] = {"target": "own_task:Own"}
    named = make_plan(config_from_values(config), Cluster(1, 2))
    with pytest.raises(ConfigError, match="task-forward-with-pipeline"):
        find_stage_balance(named, source=Source())


def unknown(plan: Plan, **limits: float) -> str:
    """The note that nothing is known."""
    balance = find_stage_balance(plan, source=Source(), **limits)
    assert (balance.lines, balance.pipeline) == ((), None)
    (note,) = balance.notes
    assert (note.kind, note.severity) == ("stages-unknown", "note")
    assert "\n" not in str(note)
    return note.reason


@pytest.mark.usefixtures("here")
def test_what_this_machine_cannot_know_is_a_note() -> None:
    assert "[dataset-not-found]" in unknown(plan(data={"kind": "fashion_mnist", "root": "nowhere"}))
    assert "[target-not-found]" in unknown(plan(model={"target": "nowhere:build"}))


@pytest.mark.parametrize(
    ("does", "seconds", "words"),
    [
        (
            "echo first >&2; echo last words >&2; exit 3",
            120.0,
            "looking at the model ended with code 3: last words",
        ),
        ("exec sleep 60", 0.3, "it took more than 0.3 s"),
    ],
    ids=["dies", "lasts"],
)
def test_a_child_that_gives_no_answer_is_a_note(
    does: str, seconds: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    assert words in unknown(plan(), longest_seconds=seconds)


def test_without_torch_the_start_of_the_run_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # nothing is started
    (note,) = find_stage_balance(plan(), source=Source()).notes
    assert "torch, which is not installed" in note.reason
    monkeypatch.setattr(importlib.util, "find_spec", real)
    (note,) = find_stage_balance(plan(), source=Source()).notes
    assert "/nowhere/python cannot be started" in note.reason


def test_check_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.run", None)
    assert main(["check", "own.yaml", "--num_gpus", "2"]) == 0
    assert "2 pipeline stages" in capsys.readouterr().out
