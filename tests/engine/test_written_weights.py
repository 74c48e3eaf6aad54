"""What code of a run writes into weights is what plain PyTorch trains on from there, evaluates and
saves, at every ZeRO stage; where it cannot be, the weight is named.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.engine import written_weights
from tests.launched import run_ranks
from tests.places import ROOT

KEPT = [
    *(f"clamp:{stage}" for stage in (0, 1, 3)),
    "rebind:2",
    "zero_head:2",
    "zero_head:3",
    "load:3",
    "set_fp32:2",
    "set_fp32:3",
    "forward:2",
    "forward_twice:3",
    "teacher:3",
    "small:3",
    "average:3",
    "pipe:1",
    "loop:2",
    "loop:3",
]
HALF = ["zero_head:0:bf16", "clamp:2:bf16", "rebind:1:bf16", "forward:3:bf16", "clamp:0:fp16"]
SPREAD = {
    "spread:3": "step 1: callback Writer 0: on_step: weight 0.weight",
    "spread_draw:3": "step 1: callback Writer 0: on_step: weight 0.weight",
    "spread_load:3": "step 0: callback Writer 0: on_start: weight 0.weight",
    "spread_teacher:3": "rank .: weight teacher.0.weight or student.0.weight",
    "spread_loop:3": "rank .: weight 0.weight",
}
REFUSED = {
    "unlike:2": r"steps 1 to 4: weight 0.weight was written, and not alike .* \[weight-differs-between-ranks\]",
    "unlike:3": r"steps 1 to 4: weight 0.weight was written, and not alike .* \[weight-differs-between-ranks\]",
    "max_norm:0": r"model: rows has max_norm, .* or train on one rank \[weight-differs-between-ranks\]",
}
ALONE = ["max_norm:1", "max_norm:3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, script = tmp_path_factory.mktemp("written"), ROOT / "tests/jobs/write_weights.py"
    alone = tmp_path_factory.mktemp("alone")
    run_ranks(script, "out.json", *KEPT, *HALF, *SPREAD, *REFUSED, num_ranks=2, cwd=folder)
    run_ranks(script, "out.json", *ALONE, num_ranks=1, cwd=alone)
    return read(folder / "out.json") | {
        f"{case}-alone": each for case, each in read(alone / "out.json").items()
    }


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


@pytest.mark.slow
class TestInARun:
    @pytest.mark.parametrize("case", [*KEPT, *(f"{case}-alone" for case in ALONE)])
    def test_the_run_is_the_plain_loop_and_its_memory_the_checkpoint(
        self, found: dict[str, Any], case: str
    ) -> None:
        assert isinstance(found[case], dict), found[case]
        assert found[case]["loss"] < 1e-6
        assert found[case]["saved"] < 2e-6
        assert found[case]["memory"] == 0

    @pytest.mark.parametrize("case", HALF)
    def test_in_half_precision_memory_is_the_checkpoint_rounded(
        self, found: dict[str, Any], case: str
    ) -> None:
        assert isinstance(found[case], dict), found[case]
        assert found[case]["loss"] < 3e-3
        assert found[case]["saved"] < 1e-2
        assert found[case]["memory"] == 0

    def test_a_spread_weight_is_named_where_it_is_written(self, found: dict[str, Any]) -> None:
        for case, line in SPREAD.items():
            assert re.fullmatch(
                rf"{line} is written, .* has spread it .* \[weight-written\]", found[case]
            ), found[case]

    def test_what_cannot_be_kept_is_named(self, found: dict[str, Any]) -> None:
        for case, line in REFUSED.items():
            assert re.fullmatch(line, found[case]), found[case]


class TestComparison:
    def test_the_modules_number_is_taken_where_it_is_not_the_rounded_copy(self) -> None:
        copies = [
            torch.randn(40),
            torch.randn(3, 5),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        ]
        lows = [copy.to(torch.bfloat16) for copy in copies]
        wanted = [copy.clone() for copy in copies]
        lows[0][7], wanted[0][7] = 0.25, 0.25
        lows[1][2].zero_()
        wanted[1][2].zero_()
        lows[2][1, 1, 2, 3], wanted[2][1, 1, 2, 3] = -2.0, -2.0
        for some in written_weights._batches(list(zip(lows, copies, strict=True))):
            written_weights._take_over(some)
        for copy, value in zip(copies, wanted, strict=True):
            assert torch.equal(copy, value)
