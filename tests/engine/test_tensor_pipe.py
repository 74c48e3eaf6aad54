"""Stages that tensor groups divide must train like plain PyTorch in one process: fp32 losses and
gradient norms within 1e-5, and resume to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import framework
from framework.commands.export import export
from framework.tasks.classification import logits_of
from tests.engine.pipe_oracle import plain_run
from tests.engine.saved_runs import read_weights
from tests.engine.test_tensor import BERT, CLIP, GPT, LLAMA, text
from tests.launched import ROOT, fewer, rarely, read_metrics, run_ranks, series, train_cases

__all__ = ["text"]  # a fixture

pytestmark = pytest.mark.slow

NUM_STEPS, FEW_STEPS = fewer(5, of=20), fewer(3, of=20)
TOLERANCE = 1e-5
TWO_BLOCKS = {"num_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**GPT, "model": {**GPT["model"], **TWO_BLOCKS}},
    "llama": {**LLAMA, "model": {**LLAMA["model"], **TWO_BLOCKS}},
    "bert": {**BERT, "model": {**BERT["model"], **TWO_BLOCKS}},
    "listed": {**GPT, "model": {"target": "tests.jobs.tensor_parts:staged_llama"}},
    # Of transformers, by import path; untied and tied.
    "theirs": {**GPT, "model": {"target": "tests.jobs.sequence_parts:tiny_llama"}},
    "theirs-tied": {
        **GPT,
        "model": {
            "target": "tests.jobs.sequence_parts:tiny_llama",
            "args": {"tie_word_embeddings": True},
        },
    },
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
    "adamw": {"kind": "adamw", "lr": 1e-3},
}


@dataclass(frozen=True)
class Case:
    """A run of 16 samples per step in micro-batches of 4, on two stages of tensor groups of two."""

    model: str
    stage: int
    kind: str = "sgd"
    tolerance: float = TOLERANCE
    dtype: str = "fp32"
    training: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    steps: int = FEW_STEPS

    @property
    def name(self) -> str:
        further = "".join(f"-{name}" for name in (*self.training, *self.zero, *self.parallel))
        return f"{self.model}-z{self.stage}-{self.kind}-{self.dtype}{further}"


FOUR_RANKS = [
    Case("gpt", 0, steps=NUM_STEPS),
    Case("gpt", 1, "adamw", steps=NUM_STEPS),
    Case("gpt", 1, training={"recompute_every": 1, "ema": {"decay": 0.9}}, steps=NUM_STEPS),
    Case("bert", 0),
    Case("listed", 1),
    Case("theirs", 0, steps=NUM_STEPS),
    Case("theirs-tied", 1, "adamw"),
    Case("gpt", 0, tolerance=0.02, dtype="autocast"),
    Case("gpt", 1, tolerance=0.05, dtype="bf16"),
    Case("gpt", 1, tolerance=0.02, dtype="fp16"),
    Case("gpt", 0, tolerance=0.02, dtype="fp16"),
]
EIGHT_RANKS = [
    Case("gpt", 1, "adamw", steps=NUM_STEPS),
    Case("gpt", 1, parallel={"sequence": 2}),
    Case("theirs", 1, steps=NUM_STEPS),
]
# With --exhaustive: what differs from others in one thing that a third one holds.
_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
RARE_FOUR = [
    Case("gpt", 1, zero=_HOST),
    Case("gpt", 0, "adamw"),
    *(Case("llama", stage) for stage in (0, 1)),
    Case("bert", 1),
    Case("listed", 0),
    Case("theirs", 1, "adamw"),
    Case("theirs-tied", 0),
]
RARE_EIGHT = [Case("gpt", 0), Case("llama", 1), Case("bert", 1), Case("listed", 0)]


def values(case: Case, folder: Path, text: Path, **more: dict[str, Any]) -> dict[str, Any]:
    sections = MODELS[case.model]
    made: dict[str, Any] = {
        "run": {"name": case.name, "output_dir": str(folder)},
        "batch": {"global_size": 16, "micro_size": 4},
        "parallel": {"pipe": 2, "tensor": 2, **case.parallel},
        "precision": {"dtype": case.dtype},
        "zero": {"stage": case.stage, **case.zero},
        "optimizer": OPTIMIZERS[case.kind],
        "training": {
            "max_steps": case.steps,
            "log_every": 1,
            "clip_grad_norm": CLIP,
            **case.training,
        },
        "evaluation": {
            "at_end": case.steps == NUM_STEPS,
            "batch_size": 48,
            "weights": "ema" if "ema" in case.training else "trained",
        },
        "checkpoint": {"at_end": case.steps == NUM_STEPS},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
        "data": {**sections["data"], "path": str(text)},
    }
    return made | {name: {**made.get(name, {}), **section} for name, section in more.items()}


def halves(folder: Path, text: Path, stages: Sequence[int]) -> list[dict[str, Any]]:
    """A run with dropout and an average of the weights in a piece, and one in two."""
    return [
        values(
            Case("gpt", stage),
            folder,
            text,
            run={"name": f"{name}-{stage}"},
            model={"dropout": 0.2},
            training={"max_steps": steps, "ema": {"decay": 0.9}},
            evaluation={"weights": "ema", "at_end": True},
            checkpoint={"every_steps": 2, "resume": "auto"},
        )
        for stage in stages
        for name, steps in (("whole", 4), ("halves", 2), ("halves", 4))
    ]


@pytest.fixture(scope="module")
def four_ranks(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four-ranks")
    listed = [*FOUR_RANKS, *(RARE_FOUR if exhaustive else ())]
    cases = [values(case, folder, text) for case in listed]
    cases += halves(folder, text, (0, 1) if exhaustive else (1,))
    train_cases(cases, num_ranks=4, folder=folder, allow_fp16=True)
    return folder


@pytest.fixture(scope="module")
def eight_ranks(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight-ranks")
    listed = [*EIGHT_RANKS, *(RARE_EIGHT if exhaustive else ())]
    train_cases([values(case, folder, text) for case in listed], num_ranks=8, folder=folder)
    return folder


_plain: dict[str, Any] = {}


def plain(case: Case, text: Path) -> tuple[list[float], list[float], dict[str, float], nn.Module]:
    """Losses, gradient norms, metrics and the model of one process; the stage makes no difference
    there.
    """
    key = f"{case.model}-{case.kind}-{'ema' in case.training}"
    if key not in _plain:
        norms: list[float] = []
        config = values(replace(case, stage=0, dtype="fp32", zero={}, parallel={}), Path(), text)
        losses, metrics, model = plain_run(config, micro_size=4, num_steps=NUM_STEPS, norms=norms)
        _plain[key] = losses, norms, metrics, model
    return _plain[key]  # type: ignore[no-any-return]


def hold(case: Case, run_folder: Path, text: Path) -> None:
    losses, norms, metrics, _ = plain(case, text)
    assert min(norms) > CLIP, "clipping must be at work, or it is not compared"
    for name, expected in (("train/loss", losses), ("train/grad_norm", norms)):
        found = series(run_folder, name)
        assert sorted(found) == list(range(1, case.steps + 1))
        worst = max(abs(value - expected[step - 1]) / value for step, value in found.items())
        assert worst < case.tolerance, f"{name} differs by up to {worst:.1e} of it"
    if case.steps == NUM_STEPS:
        measured = read_metrics(run_folder)[-1]
        for name, value in metrics.items():
            assert measured[f"eval/{name}"] == pytest.approx(value, rel=10 * case.tolerance), name


@pytest.mark.parametrize("case", [*FOUR_RANKS, *rarely(RARE_FOUR)], ids=lambda case: case.name)
def test_two_divided_stages_train_like_plain_pytorch(
    case: Case, four_ranks: Path, text: Path
) -> None:
    hold(case, four_ranks / case.name, text)


@pytest.mark.parametrize("case", [*EIGHT_RANKS, *rarely(RARE_EIGHT)], ids=lambda case: case.name)
def test_two_pipelines_of_divided_stages_train_like_plain_pytorch(
    case: Case, eight_ranks: Path, text: Path
) -> None:
    hold(case, eight_ranks / case.name, text)


@pytest.mark.parametrize(
    "case", [FOUR_RANKS[0], FOUR_RANKS[1], FOUR_RANKS[5]], ids=lambda case: case.name
)
def test_a_checkpoint_is_read_as_one_set_of_weights(
    case: Case, four_ranks: Path, text: Path
) -> None:
    expected = dict(plain(case, text)[-1].named_parameters())
    found = read_weights(str(four_ranks / case.name))
    assert {*found} == {*expected}
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, *rarely((0,))])
def test_a_resumed_run_is_the_unbroken_one(stage: int, four_ranks: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        whole, halved = (series(four_ranks / f"{run}-{stage}", name) for run in ("whole", "halves"))
        assert {step: halved[step] for step in whole} == whole


@pytest.mark.parametrize("case", [EIGHT_RANKS[0], EIGHT_RANKS[2]], ids=lambda case: case.name)
def test_what_three_ways_trained_is_used_as_one_model(
    case: Case, eight_ranks: Path, text: Path, tmp_path: Path
) -> None:
    """Exported under the model's own names, evaluated in one process, and asked."""
    run = eight_ranks / case.name
    _, _, metrics, model = plain(case, text)
    (file,) = export(str(run), tmp_path / "out")
    exported = load_file(tmp_path / "out" / file)
    expected = {name: weight.detach() for name, weight in model.named_parameters()}
    assert set(exported) <= set(model.state_dict())
    for name in exported.keys() & expected.keys():
        torch.testing.assert_close(exported[name], expected[name], rtol=1e-4, atol=1e-5)
    measured = tmp_path / "measured"
    words = ["evaluate", str(run), "--trust", str(run)]
    (tmp_path / "jobs.json").write_text(json.dumps([[str(measured), words]]), encoding="utf-8")
    run_ranks(
        ROOT / "tests/jobs/run_commands.py",
        str(tmp_path / "jobs.json"),
        num_ranks=1,
        cwd=tmp_path,
    )
    found = json.loads(measured.read_text(encoding="utf-8"))["metrics"]
    for name, value in metrics.items():
        assert found[f"eval/{name}"] == pytest.approx(value, rel=10 * case.tolerance), name
    tokens = torch.arange(40).view(2, 20)
    loaded = framework.load(run, trust=True).eval()
    with torch.no_grad():
        logits, of_plain = (logits_of(one(tokens)) for one in (loaded, model.eval()))
    torch.testing.assert_close(logits, of_plain, rtol=1e-3, atol=1e-4)
    if case.model == "gpt":
        (row,) = framework.predict(run, ["the "], max_new_tokens=8, temperature=0.0)
        assert row
