"""Gradients of stage 0, summed while the backward pass goes on, are those of one process with all batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launched import ROOT, run_ranks

pytestmark = pytest.mark.slow

KINDS = ("plain", "branch", "checkpointed_twice", "thawed", "froze")
CASES = [f"{kind}-{task}-{steps}" for kind in KINDS for task in ("SquaresThatCount", "MeanSquares") for steps in (1, 3)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("overlapped")
    run_ranks(ROOT / "tests/jobs/overlapped_sums.py", str(folder / "found.json"), num_ranks=2, cwd=folder)
    found: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_weights_and_losses_are_those_of_one_process(trained: dict[str, dict[str, Any]], case: str) -> None:
    assert trained[case]["weights"] < 1e-6
    assert trained[case]["losses"] < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_sent_before_the_backward_pass_has_ended(trained: dict[str, dict[str, Any]], case: str) -> None:
    steps, events = int(case.rpartition("-")[2]), trained[case]["events"]
    assert events[: steps - 1] == ["ended"] * (steps - 1)  # only the last micro-batch's pass sends anything
    num_sent = len(events) - steps
    assert num_sent > 2
    assert events[steps - 1 :] == ["sent"] * num_sent + ["ended"]
