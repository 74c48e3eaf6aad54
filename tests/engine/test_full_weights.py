"""Whole weights, gradients and optimizer states are those of plain PyTorch, and what is set there
is what plain PyTorch trains on from, at every ZeRO stage; a call that not all ranks make ends.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.engine.full_shares import RankShares
from tests.launched import run_ranks
from tests.places import ROOT
from tests.warm_ranks import session_ranks

SAME = [
    *(f"fit:{stage}" for stage in (0, 1, 2, 3)),
    "accumulated:2",
    "accumulated:3",
    "host:2",
    "host:3",
    "loop:0",
    "loop:2",
    "loop:3",
    "pipe:0",
    "pipe:1",
    "tensor:0",
    "tensor:1",
    "counted:0",
    "counted:2",
    "resumed:2",
    "resumed:3",
    "tied:3",
    "experts:1",
]
HALF = ["halved:2:bf16", "fit:0:bf16", "fit:2:bf16", "fit:3:bf16", "fit:1:fp16", "pipe:1:bf16"]
REFUSED = {
    "differing:1": r"rank 0 calls full_weight\('0.weight'\) and rank 1 full_weight\('2.weight'\): "
    r".* \[not-on-every-rank\]",
    "values:2": r"set_full_weight\('0.weight'\): .* \[weight-differs-between-ranks\]",
    "unknown:3": r"full_weight\('0.weigth'\): the model has no such weight; did you mean "
    r"'0.weight'\? \[full-weight-unavailable\]",
    "late:2": r"full_gradient\('0.weight'\): gradients are complete between .* "
    r"\[full-weight-unavailable\]",
    "key:1": r"full_optimizer_state\('0.weight', 'momentum_buffer'\): of every number the optimizer "
    r"keeps exp_avg, exp_avg_sq \[full-weight-unavailable\]",
    "shape:0": r"set_full_weight\('0.weight'\): the value has the shape \(3,\), and the weight "
    r"\(14, 12\) \[full-weight-unavailable\]",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("full")
    script = ROOT / "tests/jobs/full_weights.py"
    run_ranks(script, "out.json", *SAME, *HALF, *REFUSED, num_ranks=2, cwd=folder)
    values: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME)
def test_what_is_read_and_set_is_plain_pytorchs(found: dict[str, Any], case: str) -> None:
    assert isinstance(found[case], float), found[case]
    assert found[case] < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF)
def test_in_half_precision_it_is_within_its_rounding(found: dict[str, Any], case: str) -> None:
    assert isinstance(found[case], float), found[case]
    assert found[case] < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_named(found: dict[str, Any], case: str) -> None:
    assert re.search(REFUSED[case], str(found[case])), found[case]


class Drive:
    """An optimizer of stage 3 whose states lie in files, and what is asked of it."""

    swap_optimizer = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _swappable_optimizer_subgroup(self, number: int) -> bool:
        return number == 3

    def _optimizer_states_and_gradient_swap_in(self, number: int) -> None:
        self.calls.append(f"read {number}")

    def _optimizer_states_and_gradient_swap_out(self, number: int) -> None:
        self.calls.append(f"write {number}")

    def _writeback_swap_state(
        self, number: int, *, write_opt_state: bool, write_gradients: bool
    ) -> None:
        self.calls.append(f"write gradients {number}: {write_opt_state} {write_gradients}")

    def _release_swap_buffers(self, number: int) -> None:
        self.calls.append(f"release {number}")


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({}, "release 3"),
        ({"writes": True}, "write 3"),
        ({"writes": True, "gradients": True}, "write gradients 3: False True"),
    ],
)
def test_what_lies_in_a_file_is_read_and_written_back(options: dict[str, bool], last: str) -> None:
    drive = Drive()
    full: Any = SimpleNamespace(
        _optimizer=drive,
        _views=SimpleNamespace(piece_of=lambda weight: weight),
        _number_of=lambda piece: 3,
    )
    with pytest.raises(LookupError), RankShares.in_memory(full, object(), **options):  # type: ignore[arg-type]
        raise LookupError
    assert drive.calls == ["read 3", last]


@pytest.mark.slow
def test_a_call_of_one_rank_alone_ends_with_the_ranks_that_did_not_come(tmp_path: Path) -> None:
    script = ROOT / "tests/jobs/full_weights.py"
    job = session_ranks().start(
        ["out.txt", "alone"], num_ranks=2, folder=tmp_path / "said", script=script, cwd=tmp_path
    )
    assert all(job.wait(100))
    error = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert re.search(
        r"rank 0: full_weight\('0.weight'\): 1 rank \(1\) did not call it .* "
        r"\[not-on-every-rank\]",
        error,
    ), error
