"""Metrics over all samples, on ranks with unlike numbers of them, against scikit-learn and
torchmetrics in one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import framework
from framework.report.page import write_page
from tests.commands.test_after_training import run_jobs
from tests.jobs.gathered_parts import PROMPT, digits, generated, prompts, scores, texts, words_of
from tests.launched import read_metrics, train_cases

pytestmark = pytest.mark.slow
torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

OF_CLASSES = {"task": "multiclass", "num_classes": 10}
METRICS = {
    "tm_auroc": {"target": "torchmetrics:AUROC", "args": OF_CLASSES},
    "tm_f1": {"target": "torchmetrics:F1Score", "args": {**OF_CLASSES, "average": "macro"}},
    "tm_ap": {"target": "torchmetrics:AveragePrecision", "args": OF_CLASSES},
    "tm_confusion": {"target": "torchmetrics:ConfusionMatrix", "args": OF_CLASSES},
}


def case(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [32]},
        "data": {"target": "tests.jobs.gathered_parts:digits", "random_samples": False},
        "task": {"target": "tests.jobs.gathered_parts:Scores"},
        "batch": {"global_size": 30},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {"max_steps": 4, "log_every": 2},
        "evaluation": {"every_steps": 2, "batch_size": 7, "metrics": METRICS},
        "checkpoint": {"every_steps": 2, "keep_best": "eval/all/auroc", "best_is": "max"},
        "callbacks": [{"kind": "early_stopping", "metric": "eval/few/samples", "patience": 9}],
        "monitors": {"tensorboard": False, "progress": "off", "report": False},
    }
    return base | sections


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathered")
    train_cases([case(folder, "ranks1")], num_ranks=1, folder=folder)
    pipe = {"parallel": {"pipe": 2}, "batch": {"global_size": 30, "micro_size": 15}}
    words = ["evaluate", "ranks2", "--trust", "ranks2"]
    jobs = [
        case(folder, "ranks2"),
        ["ranks2.json", words],
        case(folder, "z3", zero={"stage": 3}),
        case(folder, "pipe", **pipe),
    ]
    run_jobs(folder, "two", jobs)
    train_cases([case(folder, "ranks3", zero={"stage": 2})], num_ranks=3, folder=folder)
    return folder


def of_one_process(run: Path, part: str) -> dict[str, float]:
    """Compute every metric of the trained model from its whole outputs."""
    _, sets = digits()
    images, targets = default_collate([sets[part][number] for number in range(len(sets[part]))])
    with torch.no_grad():
        logits = framework.load(run, trust=True)(images)
    truth = targets.long()
    place = torch.arange(1, len(truth) + 1, dtype=torch.float64)
    found = {"order": float((place * truth).sum()), "samples": float(len(truth))}
    if part == "few":
        return found
    found |= scores({"probabilities": logits.softmax(1), "truth": truth})
    for name, section in METRICS.items():
        metric = getattr(torchmetrics, section["target"].split(":")[1])(**section["args"])
        metric.update(logits, truth)
        found[name] = metric.compute()
    return found


@pytest.mark.parametrize("name", ["ranks1", "ranks2", "ranks3", "z3", "pipe"])
def test_are_those_of_one_process(runs: Path, name: str) -> None:
    rows = [row for row in read_metrics(runs / name) if "eval/all/loss" in row]
    assert [row["step"] for row in rows] == [2, 4]
    for part in ("all", "few"):
        for metric, value in of_one_process(runs / name, part).items():
            if "confusion" in metric:
                continue
            assert rows[-1][f"eval/{part}/{metric}"] == pytest.approx(float(value), abs=1e-6), (
                metric
            )
    assert rows[-1]["eval/few/samples"] == 2


def test_evaluate_prints_the_same(runs: Path) -> None:
    printed = json.loads((runs / "ranks2.json").read_text())
    last = [row for row in read_metrics(runs / "ranks2") if "eval/all/loss" in row][-1]
    assert printed["metrics"] == {
        key: value for key, value in last.items() if key.startswith("eval/")
    }
    tables = json.loads((runs / "ranks2" / "tables.json").read_text())
    assert printed["tables"] == {name: entry["rows"] for name, entry in tables.items()}


@pytest.mark.parametrize("name", ["ranks1", "ranks3", "pipe"])
def test_matrices_are_in_the_folder_and_in_the_report(runs: Path, name: str) -> None:
    found = of_one_process(runs / name, "all")
    tables = json.loads((runs / name / "tables.json").read_text())
    for metric in ("confusion", "tm_confusion"):
        assert tables[f"eval/all/{metric}"] == {
            "step": 4,
            "rows": torch.as_tensor(found[metric]).double().tolist(),
        }
    write_page(runs / name, runs / f"{name}.html")
    assert "eval/all/confusion at step 4" in (runs / f"{name}.html").read_text()


TOKENS: dict[str, Any] = {
    "model": {
        "kind": "gpt",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "max_positions": 24,
        "vocab_size": 262,
        "dropout": 0.0,
    },
    "data": {"target": "tests.jobs.gathered_parts:texts"},
    "task": {"target": "tests.jobs.gathered_parts:Tokens"},
    "batch": {"global_size": 8, "micro_size": 2},
    "training": {"max_steps": 1, "log_every": 1},
    "evaluation": {
        "batch_size": 2,
        "metrics": {
            "tm_accuracy": {
                "target": "torchmetrics:Accuracy",
                "args": {"task": "multiclass", "num_classes": 262},
            }
        },
    },
    "checkpoint": {},
    "callbacks": [],
}


def test_ranks_that_share_sequences_tensors_and_stages(tmp_path: Path) -> None:
    """Rows are whole, in the order of the data; the sums of `measure` are the oracle."""
    named = {"task": {"kind": "causal_lm"}}
    cases = [
        case(tmp_path, "sequence", **TOKENS | {"parallel": {"sequence": 2}}),
        case(tmp_path, "tensor-pipe", **TOKENS | {"parallel": {"tensor": 2, "pipe": 2}}),
        case(tmp_path, "parts", **TOKENS | named | {"parallel": {"tensor": 2}}),
    ]
    train_cases(cases, num_ranks=4, folder=tmp_path)
    rows = torch.stack([targets for _, targets in texts()[1]])
    place = torch.arange(1, rows.numel() + 1, dtype=torch.float64).view_as(rows)
    for name in ("sequence", "tensor-pipe", "parts"):
        last = read_metrics(tmp_path / name)[-1]
        assert last["eval/tm_accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-6)
        if name != "parts":
            assert last["eval/share_right"] == pytest.approx(last["eval/accuracy"], abs=1e-9)
            assert last["eval/order"] == float((place * rows * (rows != -100)).sum())
            assert last["eval/width"] == rows.shape[1]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    cases = []
    for task in ("FailsInFinish", "UnlikeRows", "NoMatrix"):
        cases.append(case(folder, task, task={"target": f"tests.jobs.gathered_parts:{task}"}))
    metrics = {"image": {"target": "torchmetrics:MeanSquaredError"}}
    cases.append(
        case(
            folder, "wrong-metric", task={"kind": "classification"}, evaluation={"metrics": metrics}
        )
    )
    cases.append(case(folder, "Large", task={"target": "tests.jobs.gathered_parts:Large"}))
    for one in cases:
        one |= {"checkpoint": {}, "callbacks": []}
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("FailsInFinish", "FailsInFinish.finish raised KeyError: 'probability' ("),
        ("UnlikeRows", "torch.float32 (1,) under 'rows' on one rank and of torch.float32 (2,) on"),
        ("Large", "kB to rank 0, and 4 kB is the most (50% of its"),
        ("wrong-metric", "image: update(float32 (15, 10), int64 (15,)) raised RuntimeError: Pred"),
        ("NoMatrix", "NoMatrix.finish returned a str for the metric 'best'"),
    ],
)
def test_what_is_wrong_ends_the_run_before_the_first_step(
    refused: Path, name: str, reported: str
) -> None:
    line = (refused / f"{name}.error").read_text(encoding="utf-8")
    assert reported in line, line
    assert "first_step" not in (refused / name / "events.jsonl").read_text(encoding="utf-8")


def test_text_that_is_generated_has_its_bleu(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    bleu = {"target": "torchmetrics.text:BLEUScore", "args": {"n_gram": 2}}
    sections: dict[str, Any] = {
        "model": {"target": "tests.jobs.gathered_parts:llama_of_words"},
        "data": {"target": "tests.jobs.gathered_parts:prompts"},
        "task": {"target": "tests.jobs.gathered_parts:Answers"},
        "batch": {"global_size": 16},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "training": {"max_steps": 12},
        "evaluation": {"batch_size": 3, "metrics": {"bleu": bleu}},
        "callbacks": [],
    }
    save: dict[str, Any] = {"checkpoint": {"keep_best": "eval/bleu", "best_is": "max"}}
    cases = [
        case(tmp_path, f"z{stage}", zero={"stage": stage}, **sections | save) for stage in (1, 3)
    ]
    train_cases(cases, num_ranks=2, folder=tmp_path)
    tokens = torch.stack([row["input_ids"] for row in prompts()[1]])
    for name in ("z1", "z3"):
        model = framework.load(tmp_path / name, trust=True)
        score = torchmetrics.text.BLEUScore(n_gram=2)
        score.update(
            words_of(generated(model, tokens)), [[row] for row in words_of(tokens[:, PROMPT:])]
        )
        assert read_metrics(tmp_path / name)[-1]["eval/bleu"] == pytest.approx(
            score.compute().item()
        )
        assert score.compute() > 0
