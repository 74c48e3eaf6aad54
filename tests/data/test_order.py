from __future__ import annotations

import tracemalloc
from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data.order import ComputedOrder, MicroBatchSampler, Share, epoch_order


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(micro_size, accumulation_steps, world_size, num_samples), an epoch having one step or
    more.
    """
    micro, accumulation, world = (draw(st.integers(1, limit)) for limit in (4, 3, 4))
    return micro, accumulation, world, draw(st.integers(micro * accumulation * world, 120))


def sampler(
    micro: int, accumulation: int, world: int, num_samples: int, *, rank: int, start: int
) -> MicroBatchSampler:
    share = Share(micro * accumulation * world, micro, accumulation, rank, world)
    return MicroBatchSampler(num_samples, share=share, seed=5, shuffle=True, start_step=start)


def indices_of(sampler: MicroBatchSampler, count: int) -> list[list[int]]:
    """Sample indices of the first micro-batches."""
    return [[index for _, index in keys] for keys in islice(sampler, count)]


@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_an_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed=seed, epoch=epoch, shuffle=True)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(num_samples))


def test_orders_differ_between_epochs_and_seeds_and_repeat_otherwise() -> None:
    orders = {
        tuple(epoch_order(50, seed=seed, epoch=epoch, shuffle=True).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16
    torch.manual_seed(7)
    again = tuple(epoch_order(50, seed=3, epoch=2, shuffle=True).tolist())
    assert again in orders


def test_unshuffled_order_is_the_dataset_s() -> None:
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_ranks_together_take_the_first_samples_of_the_order_exactly_once(
    layout: tuple[int, int, int, int],
) -> None:
    micro, accumulation, world, num_samples = layout
    global_size = micro * accumulation * world
    steps = num_samples // global_size
    seen: list[int] = []
    for rank in range(world):
        micro_batches = indices_of(sampler(*layout, rank=rank, start=0), steps * accumulation)
        assert all(len(indices) == micro for indices in micro_batches)
        seen += [index for indices in micro_batches for index in indices]
    order = epoch_order(num_samples, seed=5, epoch=0, shuffle=True)
    assert sorted(seen) == sorted(order[: steps * global_size].tolist())


@given(layouts(), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(
    layout: tuple[int, int, int, int], step: int
) -> None:
    micro, accumulation, world, num_samples = layout
    several = [
        index
        for rank in range(world)
        for indices in indices_of(sampler(*layout, rank=rank, start=step), accumulation)
        for index in indices
    ]
    whole = sampler(micro * accumulation * world, 1, 1, num_samples, rank=0, start=step)
    [alone] = indices_of(whole, 1)
    assert several == alone


@given(layouts(), st.integers(0, 12), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_stream_from_any_step_is_the_tail_of_the_whole(
    layout: tuple[int, int, int, int], start: int, rank: int
) -> None:
    _, accumulation, world, _ = layout
    rank %= world
    whole = list(islice(sampler(*layout, rank=rank, start=0), (start + 6) * accumulation))
    tail = list(islice(sampler(*layout, rank=rank, start=start), 6 * accumulation))
    assert tail == whole[start * accumulation :]


def test_the_remainder_left_out_differs_between_epochs() -> None:
    left_out = {
        tuple(epoch_order(10, seed=0, epoch=epoch, shuffle=True)[8:].tolist()) for epoch in range(5)
    }
    assert len(left_out) > 1


def test_keys_carry_the_epoch_of_their_step() -> None:
    micro_batches = list(islice(sampler(2, 1, 1, 5, rank=0, start=1), 4))  # two steps an epoch
    assert [[epoch for epoch, _ in keys] for keys in micro_batches] == [
        [0, 0],
        [1, 1],
        [1, 1],
        [2, 2],
    ]


def test_a_share_that_does_not_multiply_out_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="global batch 8 != 6"):
        Share(8, 2, 1, 0, 3)
    with pytest.raises(AssertionError, match="rank 3 of 3"):
        Share(6, 2, 1, 3, 3)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 100, 101, 1024, 9999, 65_537])
def test_a_computed_order_is_a_permutation(num_samples: int) -> None:
    order = ComputedOrder(num_samples, seed=3, epoch=1)
    places = np.arange(num_samples)
    whole = order[places]
    assert sorted(whole.tolist()) == places.tolist()
    part = places[::-3].reshape(-1, 1)
    assert np.array_equal(order[part], whole[part]), "any part is the part of the whole"


def test_a_computed_order_mixes_like_a_random_one() -> None:
    """Of 20,000 places: where they come from, how far they move, and what stands beside them."""
    count = 20_000
    orders = [
        ComputedOrder(count, seed=seed, epoch=epoch)[np.arange(count)]
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for order in orders:
        by_part = np.histogram2d(np.arange(count), order, bins=20)[0]  # 400 cells of 50 each
        chi_square = float(((by_part - 50) ** 2 / 50).sum())
        assert 260 < chi_square < 470, "361 degrees of freedom: 361 +- 27"
        moved = np.abs(order - np.arange(count)).mean() / count
        assert moved == pytest.approx(1 / 3, abs=0.01)
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
        assert (np.abs(np.diff(order)) == 1).sum() < 12, (
            "neighbours that stay neighbours: 2 of a random order"
        )
    pairs = [(a, b) for a in range(4) for b in range(a)]
    assert all((orders[a] == orders[b]).sum() < 10 for a, b in pairs), (
        "another seed or epoch is another order"
    )


@pytest.mark.slow
def test_every_order_of_four_comes_equally_often() -> None:
    found = Counter(
        tuple(ComputedOrder(4, seed=seed, epoch=0)[np.arange(4)].tolist()) for seed in range(4800)
    )
    assert len(found) == 24
    assert all(120 < times < 290 for times in found.values()), found  # 200 +- 14


def test_large_data_has_a_computed_order_and_old_runs_keep_theirs() -> None:
    count = 1 << 20
    share = Share(global_size=64, micro_size=8, accumulation_steps=2, rank=1, world_size=4)
    sampler = partial(MicroBatchSampler, count, share=share, seed=5, shuffle=True, start_step=70)
    computed = ComputedOrder(count, seed=5, epoch=0)
    starts = [70 * 64 + 16, 70 * 64 + 24, 71 * 64 + 16, 71 * 64 + 24]
    assert indices_of(sampler(), 4) == [
        computed[np.arange(start, start + 8)].tolist() for start in starts
    ]
    in_memory = epoch_order(count, seed=5, epoch=0, shuffle=True)
    assert indices_of(sampler(version=1), 4) == [
        in_memory[start : start + 8].tolist() for start in starts
    ]


def test_a_computed_order_needs_no_memory() -> None:
    tracemalloc.start()
    stream = iter(
        MicroBatchSampler(
            10**12, share=Share(1024, 8, 2, 63, 64), seed=0, shuffle=True, start_step=10**6
        )
    )
    first = next(stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(index for _, index in first) < 10**12
    assert peak < 2_000_000, f"{peak} bytes for a part of an order of 1e12"
