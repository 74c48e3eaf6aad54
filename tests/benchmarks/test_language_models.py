"""The arithmetic of benchmarks/language_models.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.language_models import (
    SETTINGS,
    curve,
    entropy_of,
    first_below,
    unigram_entropy,
    verdict,
)
from benchmarks.records import ROOT
from framework.data.tokens import Tokens


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_page_names_what_was_not_as_in_the_shipped_config(kind: str) -> None:
    row = next(
        line
        for line in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| `ds_configs/{kind}_tiny.yaml`")
    )
    assert [
        setting
        for setting in SETTINGS[kind]
        if setting not in row and not setting.startswith("evaluation.")
    ] == []


def test_entropy() -> None:
    assert unigram_entropy([7, 0, 7]) == pytest.approx(math.log(2))
    assert unigram_entropy([5]) == 0.0
    assert unigram_entropy([1, 2, 1]) == pytest.approx(1.5 * math.log(2))


def test_end_tokens_are_no_text() -> None:
    tokens = Tokens(np.array([1, 2, 256, 2, 1, 256], dtype=np.uint16), np.array([0, 3, 6]))
    assert entropy_of(tokens) == pytest.approx(math.log(2))


def test_a_curve_holds_the_rows_that_have_the_metric() -> None:
    rows = [
        {"step": 1, "time": 160.0, "train/loss": 3.0},
        {"step": 2, "time": 220.0, "eval/loss": 2.5},
        {"step": 4, "time": 400.0, "eval/loss": 1.9},
    ]
    points = curve(rows, "eval/loss", started=100.0)
    assert points == [
        {"step": 2, "minutes": 2.0, "loss": 2.5},
        {"step": 4, "minutes": 5.0, "loss": 1.9},
    ]
    assert first_below(points, 2.0) == 5.0
    assert first_below(points, 1.9) is None


@pytest.mark.parametrize(("minutes", "reached"), [(9.9, True), (10.1, False)])
def test_the_minutes_count(minutes: float, reached: bool) -> None:
    found = {
        "over_time": [
            {"step": 1, "minutes": 1.0, "loss": 2.4},
            {"step": 2, "minutes": minutes, "loss": 1.9},
        ]
    }
    assert verdict("gpt", found)["reached"] is reached


def test_a_target_that_was_never_reached_has_no_minutes() -> None:
    found = verdict("gpt", {"over_time": [{"step": 1, "minutes": 1.0, "loss": 2.4}]})
    assert (found["minutes_to_target"], found["reached"]) == (None, False)


@pytest.mark.parametrize(("loss", "reached"), [(2.5, True), (2.9, False)])
def test_masked_tokens_are_held_against_the_unigram_entropy(loss: float, reached: bool) -> None:
    found = verdict("bert", {"unigram_entropy_nats": 3.3, "final_loss_nats": loss})
    assert found["reached"] is reached
