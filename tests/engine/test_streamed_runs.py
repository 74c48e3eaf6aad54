"""Runs on a stream, through DeepSpeed: the losses of plain PyTorch, and the same after a resume on
other ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import framework
from framework.recipes.image_sets.digits import build
from tests.engine.oracle import Batch, plain_losses
from tests.launched import read_metrics, series, train_cases

pytestmark = pytest.mark.slow
STEPS, GLOBAL, SAVED = 96, 24, 80


def batches() -> list[Batch]:
    """Four samples of every lane per step, lanes beginning anew after their 239 or 240."""
    train: Any = build(28).train
    lanes = [range(len(train))[lane::6] for lane in range(6)]
    chosen = [
        [lane[(4 * step + number) % len(lane)] for lane in lanes for number in range(4)]
        for step in range(STEPS)
    ]
    return [
        (
            torch.stack([train[index][0] for index in one]),
            torch.tensor([int(train[index][1]) for index in one]),
        )
        for one in chosen
    ]


def case(folder: Path, name: str, micro: int, **sections: Any) -> dict[str, Any]:
    target = {
        "target": "tests.jobs.stream_parts:digit_streams",
        "args": {"notes": str(folder / "notes")},
    }
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "lenet", "num_classes": 10, "in_channels": 1, "image_size": 28},
        "data": target | {"num_workers": 1},
        "batch": {"global_size": GLOBAL, "micro_size": micro},
        "precision": {"dtype": "fp32"},
        "optimizer": {"kind": "adamw", "implementation": "torch", "lr": 1e-3, "weight_decay": 0.01},
        "scheduler": {"kind": "constant"},
        "training": {"max_steps": STEPS, "log_every": 1},
        "evaluation": {"batch_size": 16},
        "monitors": {"tensorboard": False, "csv": False, "report": False},
        **sections,
    }


def test_losses_are_those_of_plain_pytorch_and_a_resume_on_other_ranks_goes_on(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    often = {"checkpoint": {"every_steps": SAVED, "at_end": False, "mode": "async"}}
    train_cases(
        [case(tmp_path, "whole", 4, zero={"stage": 2}, **often)], num_ranks=2, folder=tmp_path
    )
    losses = series(tmp_path / "whole", "train/loss")
    expected = plain_losses(batches(), num_parts=6)
    assert [losses[step + 1] for step in range(STEPS)] == pytest.approx(expected, rel=2e-4)
    assert expected[-1] < 0.5 * expected[0]

    begun = (tmp_path / "notes").read_text(encoding="utf-8").split()
    assert begun == ["0"] * 12, "every lane twice: its second pass begins with step 60"
    start = {
        "checkpoint": {
            "resume": str(tmp_path / "whole/checkpoints" / f"global_step{SAVED}"),
            "at_end": False,
        }
    }
    train_cases(
        [case(tmp_path, "resumed", 2, zero={"stage": 2}, **start)], num_ranks=3, folder=tmp_path
    )
    resumed = series(tmp_path / "resumed", "train/loss")
    assert [*resumed] == [*range(SAVED + 1, STEPS + 1)]
    assert [resumed[step] for step in resumed] == pytest.approx(
        [losses[step] for step in resumed], rel=2e-4
    )
    places = list(map(int, (tmp_path / "notes").read_text(encoding="utf-8").split()[12:]))
    assert len(places) == 6
    # A lane whose state was asked for late, as states may take a twentieth of the time, is read
    # from its beginning.
    assert sum(place > 0 for place in places) >= 4, places
    both = [read_metrics(tmp_path / name)[-1] for name in ("whole", "resumed")]
    assert both[0]["eval/accuracy"] == pytest.approx(both[1]["eval/accuracy"], abs=0.01)
    assert both[0]["eval/loss"] < 1


def test_stages_of_a_pipeline_read_one_stream_and_measure_several_sets(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    steps, saved = 24, 10

    def piped(name: str, **checkpoint: Any) -> dict[str, Any]:
        made = case(tmp_path, name, 4, parallel={"pipe": 2}, checkpoint=checkpoint)
        made["data"]["target"] = "tests.jobs.stream_parts:with_two_sets"
        return made | {"training": {"max_steps": steps, "log_every": 1}}

    start = str(tmp_path / "piped/checkpoints" / f"global_step{saved}")
    train_cases(
        [piped("piped", every_steps=saved), piped("again", resume=start)],
        num_ranks=2,
        folder=tmp_path,
    )
    losses = series(tmp_path / "piped", "train/loss")
    expected = plain_losses(batches()[:steps], num_parts=6)
    assert [*losses.values()] == pytest.approx(expected, abs=1e-5)
    again = series(tmp_path / "again", "train/loss")
    assert again == {step: losses[step] for step in range(saved + 1, steps + 1)}

    measured = read_metrics(tmp_path / "piped")[-1]
    model, samples = framework.load(tmp_path / "piped"), build(28).evaluation
    with torch.no_grad():
        logits = model(torch.stack([image for image, _ in samples]))
    labels = torch.tensor([int(label) for _, label in samples])
    whole = torch.nn.functional.cross_entropy(logits, labels).item()
    first = torch.nn.functional.cross_entropy(logits[:50], labels[:50]).item()
    assert measured["eval/streamed/loss"] == pytest.approx(whole, abs=1e-5)
    assert measured["eval/first/loss"] == pytest.approx(first, abs=1e-5)
