"""A run that goes on with settings that its checkpoint has otherwise (`checkpoint.allow_changed`):
the moments stay, and every later step is that of a run in which the setting changed then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.report.figures import summary
from framework.report.records import read_run
from framework.setup.trained import find_source
from tests.launched import series, train_cases

pytestmark = pytest.mark.slow

TOTAL, STOP, RATE = 12, 6, 4e-3
COSINE = {"kind": "cosine", "total_steps": TOTAL}
DECAY = {"kind": "warmup_decay", "warmup_steps": 3, "total_steps": TOTAL}
HALVED = {"target": "tests.jobs.parts:HalvesRate", "args": {"at": STOP}}


def config(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [32]},
        "batch": {"global_size": 120},
        "optimizer": {"kind": "adamw", "lr": RATE},
        "zero": {"stage": 1},
        "training": {"max_steps": TOTAL, "log_every": 1},
        "monitors": {"tensorboard": False, "progress": "off", "report": False},
    }
    return base | sections


def going_on(source: str, name: str, folder: Path, *keys: str, **sections: Any) -> dict[str, Any]:
    """A run of another name, which goes on from `source` with these keys changed."""
    path = folder / source / "checkpoints" / f"global_step{STOP}"
    checkpoint = {"resume": str(path), "allow_changed": list(keys)}
    return config(name, folder, checkpoint=checkpoint, **sections)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    short = {"training": {"max_steps": STOP, "log_every": 1}}
    sgd = {"kind": "sgd", "lr": 0.1, "momentum": 0.9}
    half = {"optimizer": {"kind": "adamw", "lr": RATE / 2}}
    tight = {"training": {"max_steps": TOTAL, "log_every": 1, "clip_grad_norm": 1e-9}}
    still = {"kind": "sgd", "lr": 0.1, "momentum": 0.0}
    both = {"optimizer": {"kind": "adamw", "lr": RATE / 2, "weight_decay": 0.5}}
    cases = [
        config("short", folder, **short),
        config("short-sgd", folder, **short, optimizer=sgd),
        config("halved", folder, callbacks=[HALVED]),
        config("cosine", folder, scheduler=COSINE),
        config("decay", folder, scheduler=DECAY),
        going_on("short", "half", folder, "optimizer.lr", **half),
        going_on("short", "half-3", folder, "optimizer.lr", **half, zero={"stage": 3}),
        going_on("short", "to-cosine", folder, "scheduler", scheduler=COSINE),
        going_on("short", "to-decay", folder, "scheduler", scheduler=DECAY),
        going_on("short", "to-decay-0", folder, "scheduler", scheduler=DECAY, zero={"stage": 0}),
        going_on("decay-short", "from-decay", folder, "scheduler", "optimizer.lr", **half),
        going_on("short", "decayed", folder, "optimizer.lr", "optimizer.weight_decay", **both),
        going_on(
            "short-sgd",
            "clipped",
            folder,
            "optimizer.momentum",
            "training.clip_grad_norm",
            optimizer=still,
            **tight,
        ),
        going_on("short", "not-named", folder, "scheduler", **half),
    ]
    cases.insert(5, config("decay-short", folder, **short, scheduler=DECAY))
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


def values(folder: Path, run: str, name: str) -> list[float]:
    return list(series(folder / run, name).values())


def rates(folder: Path, run: str) -> list[float]:
    return values(folder, run, "train/lr")


def test_another_rate_is_as_if_the_run_had_changed_it(runs: Path) -> None:
    assert rates(runs, "half") == [RATE / 2] * (TOTAL - STOP)
    losses = values(runs, "halved", "train/loss")[STOP:]
    assert values(runs, "half", "train/loss") == losses
    assert values(runs, "half-3", "train/loss") == pytest.approx(losses, abs=1e-6)
    assert rates(runs, "half-3") == [RATE / 2] * (TOTAL - STOP)


@pytest.mark.parametrize(
    ("changed", "whole"), [("to-cosine", "cosine"), ("to-decay", "decay"), ("to-decay-0", "decay")]
)
def test_another_schedule_is_at_the_place_of_the_step(runs: Path, changed: str, whole: str) -> None:
    assert rates(runs, changed) == rates(runs, whole)[STOP:]


def test_a_schedule_that_is_gone_leaves_the_rate_of_the_config(runs: Path) -> None:
    assert rates(runs, "from-decay") == [RATE / 2] * (TOTAL - STOP)


def test_other_options_and_clipping_hold(runs: Path) -> None:
    half = values(runs, "half", "train/loss")
    decayed = values(runs, "decayed", "train/loss")
    assert (decayed[0], len(decayed)) == (half[0], len(half))
    assert decayed[-1] != half[-1]
    # With a norm of 1e-9 and without momentum the weights stand still.
    before = find_source(str(runs / "short-sgd"), step=str(STOP))
    after = find_source(str(runs / "clipped"), step=str(TOTAL))
    for name, weight in weights(before).items():
        assert (weight - weights(after)[name]).abs().max() < 1e-8


def weights(checkpoint: Any) -> dict[str, torch.Tensor]:
    from framework.engine.weights import checkpoint_weights

    return {name: value.float() for name, value in checkpoint_weights(checkpoint).items()}


def test_events_and_report_show_what_has_changed(runs: Path) -> None:
    lines = (runs / "half/events.jsonl").read_text(encoding="utf-8").splitlines()
    changes = [event for event in map(json.loads, lines) if event["kind"] == "changed"]
    assert [(event["step"], event["changes"]) for event in changes] == [
        (STOP, [f"optimizer.lr: {RATE} -> {RATE / 2}"])
    ]
    assert summary(read_run(runs / "half"))["changes"] == [
        {"step": STOP, "changes": [f"optimizer.lr: {RATE} -> {RATE / 2}"]}
    ]


def test_what_is_not_named_is_refused_with_the_door(runs: Path) -> None:
    text = (runs / "not-named.error").read_text(encoding="utf-8")
    assert "checkpoint.allow_changed: [optimizer.lr], which keeps the moments" in text
    assert "[resume-config-differs]" in text
