from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.load import config_from_values
from framework.config.training import Parallel
from framework.errors import Problem
from framework.plan.balance import (
    LayerFacts,
    StageTable,
    balanced,
    cut,
    needs_same_groups,
    with_seconds,
)


def facts(*params: int, kinds: str = "") -> list[LayerFacts]:
    return [
        LayerFacts(f"l{n}", (kinds or "B" * len(params))[n], count, 4 * count, 100 + n)
        for n, count in enumerate(params)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_no_cut_has_a_smaller_largest_part(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        return
    bounds = balanced([float(cost) for cost in costs], parts)
    assert bounds is not None
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), parts + 1)
    assert all(start < stop for start, stop in pairwise(bounds))

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, len(costs))))

    every = combinations(range(1, len(costs)), parts - 1)
    assert largest(bounds[1:-1]) == min(map(largest, every))


def test_a_stage_begins_only_where_it_may() -> None:
    assert balanced([1.0] * 4, 2) == (0, 2, 4)
    assert balanced([1.0] * 4, 2, may_start=[True, True, False, True]) in ((0, 1, 4), (0, 3, 4))
    assert balanced([1.0] * 2, 2, may_start=[True, False]) is None


def grouped(*groups: str) -> list[LayerFacts]:
    """m: a matrix of 9 weights, v: a vector of 3."""
    return [
        replace(layer, groups=frozenset(group))
        for layer, group in zip(
            facts(*(9 * group.count("m") + 3 * group.count("v") for group in groups)),
            groups,
            strict=True,
        )
    ]


def test_with_zero_every_stage_gets_weights_of_both_groups() -> None:
    """As in a GPT: embedding and head have a matrix only, and the norm before the head vectors
    only.
    """
    layers = grouped("mmm", "mv", "mv", "v", "mmm")
    table, free = cut(layers, Parallel(pipe=3), same_groups=True), cut(layers, Parallel(pipe=3))
    assert isinstance(table, StageTable)
    assert isinstance(free, StageTable)
    assert (table.bounds, free.bounds) == ((0, 2, 3, 5), (0, 1, 4, 5))
    assert isinstance(
        cut(grouped("m", "m"), Parallel(pipe=2), same_groups=True), StageTable
    )  # the model has one group only
    assert isinstance(cut(grouped(*["mv"] * 400), Parallel(pipe=4), same_groups=True), StageTable)
    for refused in (
        cut(grouped("m", "mv"), Parallel(pipe=2), same_groups=True),
        cut(layers, Parallel(pipe=3, stages=[0, 1, 2, 2, 2]), same_groups=True),
    ):
        assert isinstance(refused, Problem)
        assert refused.kind == "stage-with-one-group"
        assert "stage 0 (l0 .. l0) has only m" in refused.reason


@pytest.mark.parametrize(
    ("dtype", "stage", "decays_on", "expected"),
    [
        ("fp32", 0, "matrices", False),
        ("fp16", 0, "matrices", True),
        ("fp32", 1, "matrices", True),
        ("fp16", 1, "all", False),
    ],
)
def test_the_norm_is_reduced_once_per_group_with_zero_and_in_fp16(
    dtype: str, stage: int, decays_on: str, expected: bool
) -> None:
    optimizer = {"kind": "adamw", "weight_decay": 0.1, "weight_decay_on": decays_on}
    values = {"precision": {"dtype": dtype}, "zero": {"stage": stage}, "optimizer": optimizer}
    assert needs_same_groups(config_from_values(values)) is expected


@pytest.mark.slow
def test_long_lists_do_not_recurse_deeply() -> None:
    assert balanced([1.0] * 600, 4) == (0, 150, 300, 450, 600)


@pytest.mark.parametrize(
    ("changes", "bounds"),
    [
        ({"partition": "parameters"}, (0, 1, 4)),
        ({"partition": "uniform"}, (0, 2, 4)),
        ({"partition": "type:x"}, (0, 2, 4)),
        ({"stages": [0, 0, 0, 1]}, (0, 3, 4)),
        ({"partition": "measured"}, (0, 1, 4)),
    ],
)
def test_every_way_to_cut(changes: dict[str, Any], bounds: tuple[int, ...]) -> None:
    table = cut(facts(9, 1, 1, 1, kinds="ZXYX"), Parallel(pipe=2, **changes))
    assert isinstance(table, StageTable)
    assert table.bounds == bounds


def test_measured_times_move_the_cut() -> None:
    layers = with_seconds(facts(9, 1, 1, 1), [1.0, 1.0, 1.0, 3.0])
    table = cut(layers, Parallel(pipe=2, partition="measured"))
    assert isinstance(table, StageTable)
    assert table.bounds == (0, 3, 4)
    assert [stage.seconds for stage in table.stages()] == [3.0, 3.0]


def test_the_table_counts_tied_weights_once_on_each_stage() -> None:
    layers = [
        LayerFacts("embed", "E", 10, 40, 8, tied="e"),
        LayerFacts("block", "B", 3, 12, 8),
        LayerFacts("head", "E", 10, 40, 9, tied="e"),
    ]
    one, two = StageTable(tuple(layers), (0, 3)), StageTable(tuple(layers), (0, 1, 3))
    assert [stage.num_params for stage in one.stages()] == [13]
    assert [stage.num_params for stage in two.stages()] == [10, 13]
    assert [stage.output_bytes for stage in two.stages()] == [8, None]
    assert list(two.lines()) == [
        "stage 0: 1 layer (embed), 10 parameters, 0.0 MB, sends 0.00 MB per micro-batch",
        "stage 1: 2 layers (block .. head), 13 parameters, 0.0 MB",
    ]


@pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        ({"pipe": 5}, "pipe-exceeds-layers"),
        ({"pipe": 2, "stages": [0, 1]}, "stages-differ-from-layers"),
        ({"pipe": 2, "stages": [0, 1, 0, 1]}, "stages-out-of-order"),
        ({"pipe": 2, "stages": [0, 0, 0, 0]}, "stages-out-of-order"),
        ({"pipe": 2, "stages": [0, 0, 0, 2]}, "stages-out-of-order"),
        ({"pipe": 2, "partition": "type:["}, "bad-pattern"),
        ({"pipe": 2, "partition": "type:Q"}, "type-matches-too-few"),
        ({"pipe": 2, "stages": [0, 0, 0, 1]}, "stage-without-parameters"),
    ],
)
def test_what_cannot_be_cut_is_refused(parallel: dict[str, Any], kind: str) -> None:
    found = cut(facts(5, 1, 1, 0), Parallel(**parallel))
    assert isinstance(found, Problem)
    assert found.kind == kind


def test_an_explicit_stage_may_not_begin_where_it_cannot() -> None:
    layers = facts(1, 1, 1)
    layers[1] = LayerFacts("tail", "B", 1, may_start_stage=False)
    found = cut(layers, Parallel(pipe=2, stages=[0, 1, 1]))
    assert isinstance(found, Problem)
    assert found.kind == "stage-cannot-start"


def test_what_was_not_timed_is_estimated_by_its_flops() -> None:
    layers = [
        replace(layer, flops=flops)
        for layer, flops in zip(facts(9, 1, 1), (10, 20, 10), strict=True)
    ]
    stated = list(StageTable(tuple(layers), (0, 1, 3)).lines())
    assert [line.split(", ")[3] for line in stated] == [
        "25% of the computation by its FLOPs",
        "75% of the computation by its FLOPs",
    ]
    timed = StageTable(tuple(with_seconds(layers, [1.0, 1.0, 1.0])), (0, 1, 3))
    assert "FLOPs" not in "".join(timed.lines())
    assert [stage.flops for stage in timed.stages()] == [10, 30]
