"""Gradients of ZeRO 1 and 2 are added up from flat tensors, equal to the bit to DeepSpeed's buckets
on two ranks, in one message for a step where nothing asks for more.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.flat_shares import CASES
from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow

COALESCED = [name for name in CASES if name.startswith("coalesced")]
IN_MESSAGES = ("z1-messages", "coalesced-fp32")
# of DeepSpeed's own: too large for half a bucket within the pass, or beside the pass
OWN = ("z2-large", "coalesced-overlap")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by case."""
    folder = tmp_path_factory.mktemp("shares")
    reports: list[dict[str, Any]] = found_by_ranks("flat_shares.py", num_ranks=2, folder=folder)
    return reports


@pytest.mark.parametrize("name", CASES)
def test_shares_are_equal_to_the_bit_to_those_of_deepspeeds_buckets(
    found: list[dict[str, Any]], name: str
) -> None:
    for report in found:
        sides = report[name]
        assert sides["deepspeed"]["size"] > 0
        if name in COALESCED:
            # two roundings of sums in another order, in bf16 or fp32
            bound = 1e-6 if "fp32" in name else 2**-7
            assert sides["deepspeed"]["distance"] <= bound * sides["deepspeed"]["size"]
            assert sides["stage 1"]["distance"] == 0
        else:
            assert sides["deepspeed"]["distance"] == 0


@pytest.mark.parametrize("name", ["coalesced-fp32", "coalesced-bf16"])
def test_coalesced_shares_are_those_of_deepspeeds_own_context(
    found: list[dict[str, Any]], name: str
) -> None:
    assert [report[name]["context"]["distance"] for report in found] == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_one_message_and_copies_no_gradient(
    found: list[dict[str, Any]], name: str
) -> None:
    for report in found:
        ours, theirs = report[name]["ours"], report[name]["deepspeed"]
        waits = name.startswith(("z1", "coalesced"))
        *early, last = ours["messages"]
        assert early == [0 if waits else 1] * len(early)
        if name in IN_MESSAGES:
            assert last == theirs["messages"][-1] > 1
        elif name not in OWN:
            assert last == 1
        assert sum(ours["messages"]) <= sum(theirs["messages"])
        if name not in OWN:
            assert ours["moves"] < theirs["moves"]
            assert not ours["hooks"]
            assert theirs["hooks"]


@pytest.mark.parametrize("name", COALESCED)
def test_coalesced_sums_are_one_for_each_step_and_not_for_each_micro_batch(
    found: list[dict[str, Any]], name: str
) -> None:
    for report in found:
        sides = report[name]
        assert sides["ours"]["messages"][0] == 0
        assert sides["deepspeed"]["messages"][0] > 0
        assert sides["ours"]["messages"] == sides["stage 1"]["messages"]
