"""``lr-range``: the same losses at the same rates as plain PyTorch, on two ranks; what it suggests
from them.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from framework.cli import main
from framework.commands.lr_range import RangeTest
from framework.errors import EXIT_USAGE
from tests.commands.test_after_training import run_jobs
from tests.engine.oracle import digit_batches, plain_losses


def found(losses: list[float]) -> RangeTest:
    """Take losses until they explode, over rates of two steps to a power of ten."""
    result = RangeTest()
    for step, loss in enumerate(losses):
        if not result.exploded:
            result.add(10 ** (step / 2 - 6), loss)
    return result


FALLING = [2.0] * 10 + [1.8, 1.4, 0.7, 0.4, 0.3, 0.3, 0.4]


class TestSuggestions:
    def test_of_a_loss_that_falls_and_explodes(self) -> None:
        result = found([*FALLING, 1.5, 9.0, 50.0, 60.0])
        assert (result.exploded, len(result.rates)) == (True, 19), "nothing after it is trained"
        assert (result.steepest, result.minimum) == (11, 14)
        lines = result.sentences()
        assert lines[0].startswith("19 steps from 1e-06 to 1e+03, where the loss exploded")
        assert [line.split("  ")[0] for line in lines[1:]] == [
            "optimizer.lr: 0.32",
            "optimizer.lr: 1",
        ]

    def test_a_loss_that_is_no_number_ends_it_and_counts_nothing(self) -> None:
        result = found([*FALLING, math.nan, 1.0])
        assert (result.exploded, len(result.rates)) == (True, 18)
        assert all(math.isfinite(mean) for mean, _ in result.smoothed.values())
        assert (result.steepest, result.minimum) == (11, 14)

    @pytest.mark.parametrize(
        "losses", [[2.0 + 0.1 * step for step in range(20)], [2.0] * 20, [2.0, math.nan]]
    )
    def test_of_a_loss_that_never_falls_there_are_none(
        self, losses: list[float], tmp_path: Path
    ) -> None:
        result = found(losses)
        (line,) = result.sentences()
        assert "the loss falls at no rate" in line
        assert len(result.write(tmp_path)) == 2

    def test_one_that_still_falls_is_reported(self) -> None:
        assert "still falls: go on beyond it with --to" in found(FALLING[:13]).sentences()[0]

    def test_a_loss_below_zero_explodes_too(self) -> None:
        result = found([-1.0] * 11 + [-0.9, -0.8, 4.0, 9.0])
        assert (result.exploded, len(result.rates)) == (True, 15)


def test_rates_that_do_not_grow_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-range", "run.yaml", "--from", "1", "--to", "0.1"]) == EXIT_USAGE
    assert (
        "lr-range: --from 1 --to 0.1: the rates are to grow, from more than 0"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_losses_are_those_of_plain_pytorch_at_the_same_rates(tmp_path: Path) -> None:
    groups = [{"match": ".*bias", "lr": 0.2, "weight_decay": 0.0}]
    config = {
        "run": {"name": "digits", "output_dir": str(tmp_path / "runs")},
        "batch": {"global_size": 32},
        "zero": {"stage": 2},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
        "scheduler": {"kind": "cosine", "warmup_steps": 5},
        "training": {"ema": {}},
        "evaluation": {"every_steps": 1, "weights": "ema"},
        "checkpoint": {"every_steps": 1},
    }
    files = {
        "plain": config,
        "groups": {**config, "optimizer": {**config["optimizer"], "groups": groups}},
    }
    words = ["training.clip_grad_norm=2", "--from", "0.001", "--to", "1", "--steps", "20"]
    jobs = []
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
        jobs.append([f"{name}.out", ["lr_range", f"{name}.json", f"run.name={name}", *words]])
    run_jobs(tmp_path, "range", jobs)
    rates = [0.001 * 1000 ** (step / 19) for step in range(20)]
    expected = plain_losses(
        digit_batches(global_size=32, num_steps=20),
        make_optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        clip=2.0,
        lr_of_step=rates.__getitem__,
        num_parts=2,
    )
    for name in files:
        folder = tmp_path / f"runs/{name}-lr-range"
        rows = list(csv.DictReader((folder / "metrics.csv").open()))
        assert [float(row["train/lr"]) for row in rows] == pytest.approx(rates)
        losses = [float(row["train/loss"]) for row in rows]
        assert (losses == pytest.approx(expected, rel=2e-5)) is (name == "plain"), (
            "groups keep their shares"
        )
        assert "learning rate</text>" in (folder / "lr-range.svg").read_text()
        printed = (tmp_path / f"{name}.out").read_text().splitlines()
        assert printed[-2:] == [str(folder / "metrics.csv"), str(folder / "lr-range.svg")]
        assert sum(line.startswith("optimizer.lr: ") for line in printed) == 2
        assert not [*folder.glob("checkpoints/*")]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "groups-lr-range",
        "plain-lr-range",
    ]
