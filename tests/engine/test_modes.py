"""`model.train()` comes before the first step and behind every evaluation, as in plain loops."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.jobs.mode_cases import CASES, NUM_RANKS, STEPS, plain_losses
from tests.launched import ROOT, run_ranks

pytestmark = pytest.mark.slow
TRAINED = {"built": STEPS, "layer-built": STEPS, "rests-later": 3, "layer-rests": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("modes")
    out = folder / "found.json"
    stated = run_ranks(ROOT / "tests/jobs/mode_cases.py", str(out), num_ranks=NUM_RANKS, cwd=folder)
    return json.loads(out.read_text(encoding="utf-8")), stated


# Each rank has running statistics of its own batches, until an evaluation.
COMPARED = [case for case in CASES if case != "rests-later-z2"]


@pytest.mark.parametrize("case", COMPARED)
def test_losses_are_those_of_a_plain_loop(runs: tuple[dict[str, Any], str], case: str) -> None:
    name, sections = CASES[case]
    num_parts = 1 if "parallel" in sections else NUM_RANKS
    expected = plain_losses(name, num_parts=num_parts)
    assert runs[0][case]["losses"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_batch_norms_count_the_batches_of_training_mode_alone(
    runs: tuple[dict[str, Any], str], case: str
) -> None:
    assert runs[0][case]["batches"] == TRAINED.get(CASES[case][0], 0)


def test_modules_that_were_built_in_evaluation_mode_are_named_once(
    runs: tuple[dict[str, Any], str],
) -> None:
    notes = [
        line for line in runs[1].splitlines() if line.startswith("note: the model was built with")
    ]
    left = [
        case
        for case, (name, _) in CASES.items()
        if name in ("built", "rests", "rests-later", "layer-built")
    ]
    assert len(notes) == len(left)
    assert all(
        "3 modules in evaluation mode (body is the first)" in line
        for line in notes[: len(left) - 1]
    )
    assert "(0 is the first)" in notes[-1]
    assert "override train()" in notes[-1]
