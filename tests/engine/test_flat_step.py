"""Steps in few passes have the numbers of DeepSpeed's own, and cost less: nothing in doubles, no
pass that only multiplies or joins, one sum of the norm, one read where a step may be left out.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.step_passes import CASES
from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow

FLAT = [name for name in CASES if not name.startswith("z0")]


def found_by(num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = found_by_ranks(
        "step_passes.py", num_ranks=num_ranks, folder=folder
    )
    return reports


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by case."""
    return found_by(2, tmp_path_factory.mktemp("passes"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank has found, by case."""
    return found_by(1, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("name", CASES)
def test_weights_norms_and_scales_are_those_of_deepspeeds_own_step(
    found: list[dict[str, Any]], name: str
) -> None:
    for report in found:
        case = report[name]
        ours, theirs = case["ours"], case["theirs"]
        assert case["distance"] <= (1e-6 if "fp32" in name else 2e-3)  # a bit of bf16
        assert ours["scales"] == theirs["scales"]
        assert ours["skipped"] == theirs["skipped"]
        if name != "z0-fp16":  # whose norm DeepSpeed leaves multiplied
            assert ours["norms"] == pytest.approx(theirs["norms"], rel=2e-4)
    if "fp16" in name:
        skipped = found[0][name]["ours"]["skipped"]
        scales = found[0][name]["ours"]["scales"]
        assert skipped[-1] > 0
        assert any(later > earlier for earlier, later in pairwise(scales))


@pytest.mark.parametrize("name", CASES)
def test_a_value_is_read_where_a_step_may_be_left_out(
    found: list[dict[str, Any]], name: str
) -> None:
    may_be_left_out = name.endswith(("fp16", "fp32", "checked"))
    for report in found:
        assert report[name]["ours"]["reads"] == int(may_be_left_out)
        if name.startswith("z0"):
            assert report[name]["theirs"]["reads"] > 6  # one for each weight, and further ones


@pytest.mark.parametrize("name", FLAT)
def test_the_norm_is_one_sum_and_gradients_are_made_fp32_in_one_pass(
    found: list[dict[str, Any]], name: str
) -> None:
    groups = 2 if "groups" in name else 1
    for report in found:
        ours, theirs = report[name]["ours"], report[name]["theirs"]
        assert ours["messages"] == {"all_reduce": 1, "all_gather_into_tensor": groups}
        assert ours["doubles"] == 0
        assert theirs["doubles"] > 0
        assert sum(ours["large"].values()) < sum(theirs["large"].values())
        if "fused" in name:
            # one makes gradients fp32, one copies weights back; the others compare what was written
            # into weights
            copies = {"_to_copy": 3, "eq": 1, "where": 1, "copy_": 1, "_allgather_base_": 1}
            assert ours["large"] == copies


@pytest.mark.parametrize("name", FLAT)
def test_one_rank_copies_no_gradients_and_sends_nothing(alone: dict[str, Any], name: str) -> None:
    case = alone[name]
    ours, theirs = case["ours"], case["theirs"]
    # DeepSpeed rounds sums in fp32 of half precision once more, as it would send them
    assert case["distance"] <= (1e-6 if "fp32" in name else 2e-3)
    assert (ours["scales"], ours["skipped"]) == (theirs["scales"], theirs["skipped"])
    assert ours["messages"] == {}
    assert theirs["messages"]
    assert ours["copies"] < theirs["copies"]
    if "sums" not in name and "two" not in name:
        assert ours["copies"] == 0


@pytest.mark.parametrize("name", FLAT)
def test_no_weight_is_searched_for_in_the_graph(
    found: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    assert [report[name]["ours"]["searches"] for report in (*found, alone)] == [0, 0, 0]
