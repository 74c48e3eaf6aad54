"""global_size = micro_size x accumulation_steps x data-parallel size, and fixes that really fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.training import Batch
from framework.errors import Problem
from framework.plan.layout import (
    DEFAULT_MICRO_SIZE,
    Layout,
    implied_data_parallel_size,
    largest_global_size,
    make_layout,
)

SIZES = st.integers(1, 600)
FEW = st.integers(1, 16)
BATCHES = st.builds(
    Batch,
    global_size=st.none() | SIZES,
    micro_size=st.none() | FEW,
    accumulation_steps=st.none() | FEW,
)


def holds(layout: Layout, batch: Batch, world_size: int) -> None:
    """The equation, and everything that was asked for."""
    assert (
        layout.global_size
        == layout.micro_size * layout.accumulation_steps * layout.data_parallel_size
    )
    assert layout.world_size == layout.data_parallel_size == world_size
    assert min(layout.global_size, layout.micro_size, layout.accumulation_steps) >= 1
    for name in ("global_size", "micro_size", "accumulation_steps"):
        if getattr(batch, name) is not None:
            assert getattr(layout, name) == getattr(batch, name)


@given(batch=BATCHES, world_size=FEW)
def test_a_layout_holds_or_the_problem_states_what_does(batch: Batch, world_size: int) -> None:
    found = make_layout(batch, world_size=world_size)
    if isinstance(found, Layout):
        holds(found, batch, world_size)
        return
    assert found.kind == "batch-not-divisible"
    for number in suggested_sizes(found):
        fixed = batch.model_copy(update={"global_size": number})
        layout = make_layout(fixed, world_size=world_size)
        assert isinstance(layout, Layout), str(found)
        holds(layout, fixed, world_size)
    if match := re.search(r"use (\d+) devices?$", found.fix):
        layout = make_layout(batch, world_size=int(match[1]))
        assert isinstance(layout, Layout), str(found)
        holds(layout, batch, int(match[1]))


def suggested_sizes(problem: Problem) -> list[int]:
    match = re.search(r"set batch\.global_size: (\d+)(?: or (\d+))?", problem.fix)
    assert match, str(problem)
    return [int(number) for number in match.groups() if number]


@given(micro=FEW, accumulation=FEW, world_size=FEW)
def test_any_one_of_three_may_be_left_out(micro: int, accumulation: int, world_size: int) -> None:
    whole = {
        "global_size": micro * accumulation * world_size,
        "micro_size": micro,
        "accumulation_steps": accumulation,
    }
    expected = make_layout(Batch(**whole), world_size=world_size)
    assert isinstance(expected, Layout)
    for left_out in whole:
        given_two = {name: value for name, value in whole.items() if name != left_out}
        assert make_layout(Batch(**given_two), world_size=world_size) == expected


@given(batch=BATCHES, world_size=FEW, at_most=st.integers(0, 2000))
def test_the_largest_global_size_fits(batch: Batch, world_size: int, at_most: int) -> None:
    largest = largest_global_size(batch, parallel=world_size, at_most=at_most)
    assert 0 <= largest <= at_most
    both = batch.micro_size is not None and batch.accumulation_steps is not None
    if largest and not both:
        fixed = batch.model_copy(update={"global_size": largest})
        assert isinstance(make_layout(fixed, world_size=world_size), Layout)


@given(batch=BATCHES)
def test_three_numbers_imply_the_number_of_devices(batch: Batch) -> None:
    devices = implied_data_parallel_size(batch)
    if devices is not None:
        assert isinstance(make_layout(batch, world_size=devices), Layout)


def test_nothing_given() -> None:
    assert make_layout(Batch(), world_size=4) == Layout(
        4, 4, 4 * DEFAULT_MICRO_SIZE, DEFAULT_MICRO_SIZE, 1
    )


@pytest.mark.parametrize(
    ("batch", "world_size", "line"),
    [
        (
            Batch(global_size=7),
            2,
            "7 samples cannot be split evenly over 2 devices; set batch.global_size: 6 or 8",
        ),
        (
            Batch(global_size=1),
            8,
            "1 sample cannot be split evenly over 8 devices; set batch.global_size: 8",
        ),
        (
            Batch(global_size=24, accumulation_steps=5),
            2,
            "24 samples cannot be split over 2 devices x 5 accumulation steps; set batch.global_size: 20 or 30",
        ),
        (
            Batch(global_size=4, micro_size=8),
            1,
            "4 samples cannot be split over 1 device x micro-batches of 8; set batch.global_size: 8",
        ),
        (
            Batch(global_size=64, micro_size=8, accumulation_steps=2),
            8,
            "64 is not micro_size 8 x accumulation_steps 2 x 8 devices; set batch.global_size: 128, or leave one of "
            "the three out, or use 4 devices",
        ),
    ],
)
def test_the_sentence(batch: Batch, world_size: int, line: str) -> None:
    found = make_layout(batch, world_size=world_size)
    assert isinstance(found, Problem)
    assert str(found) == f"batch.global_size = {batch.global_size}: {line} [batch-not-divisible]"


def test_a_layout_in_words() -> None:
    assert (
        str(Layout(4, 4, 64, 8, 2)) == "64 samples per step = 8 x 2 accumulation x 4 data-parallel"
    )


def test_a_model_that_is_divided_both_ways_has_its_ranks_written_out() -> None:
    layout = Layout(8, 2, global_size=8, micro_size=1, accumulation_steps=4, pipe_size=2)
    assert layout.places() == ""
    divided = replace(layout, tensor_size=2)
    assert divided.places() == (
        "stage 0 on 0 to 3, stage 1 on 4 to 7; tensor groups side by side: 0 to 1, 2 to 3, ..."
    )
    assert [divided.stage_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [divided.tensor_rank(rank) for rank in range(8)] == [0, 1] * 4
    many = replace(layout, world_size=24, pipe_size=6, tensor_size=2)
    assert many.places().startswith("stage 0 on 0 to 3, stage 1 on 4 to 7, stage 2 on 8 to 11, ...")
