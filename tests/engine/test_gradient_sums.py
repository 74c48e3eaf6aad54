"""Gradients of stage 0, summed while the backward pass goes on, are those of one process with all
batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow

KINDS = ("plain", "branch", "unused", "checkpointed_twice", "twice_and_branch", "own_pass", "froze")
CASES = [
    f"{kind}-{task}-{steps}"
    for kind in KINDS
    for task in ("SquaresThatCount", "MeanSquares")
    for steps in ((1, 3) if kind != "own_pass" else (1,))
]


def train(num_ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = found_by_ranks(
        "overlapped_sums.py", num_ranks=num_ranks, folder=folder
    )
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return train(2, tmp_path_factory.mktemp("overlapped"))


def test_one_rank_alone_sums_nothing(tmp_path: Path) -> None:
    for case, found in train(1, tmp_path).items():
        if "weights" in found:
            assert max(found["weights"], found["losses"]) < 1e-6, case
            assert found["events"] == [], case
        else:
            assert found == {"ways": [False, False], "equal": True}, case


@pytest.mark.parametrize("case", CASES)
def test_weights_and_losses_are_those_of_one_process(
    trained: dict[str, dict[str, Any]], case: str
) -> None:
    assert trained[case]["weights"] < 1e-6
    assert trained[case]["losses"] < 1e-6


@pytest.mark.parametrize("precision", ["bf16", "bf16-reduced-in-fp32", "fp16", "autocast"])
def test_half_precision_gives_the_bits_of_deepspeeds_own_sums(
    trained: dict[str, dict[str, Any]], precision: str
) -> None:
    assert trained[precision] == {"ways": [True, False], "equal": True}


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_sent_before_the_backward_pass_has_ended(
    trained: dict[str, dict[str, Any]], case: str
) -> None:
    steps, events = int(case.rpartition("-")[2]), trained[case]["events"]
    # only the last micro-batch's pass sends anything
    assert events[: steps - 1] == ["ended"] * (steps - 1)
    last = events[steps - 1 :]
    # Sent when the pass has ended: what takes no part, with all that follow it, and what may get
    # more from a next pass.
    if case.startswith(("unused", "checkpointed_twice", "twice_and_branch")):
        assert last == ["ended"] + ["sent"] * (len(last) - 1)
    else:
        assert last == ["sent"] * (len(last) - 2) + ["ended", "sent"], (
            "all but the last, which ends with the pass"
        )
    assert last.count("sent") > 2
