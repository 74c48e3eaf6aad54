"""Pairs of the bandwidth measurement: each once, and nobody in two at a time."""

from __future__ import annotations

from itertools import combinations

import pytest

pytestmark = pytest.mark.slow  # imports torch


@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_once_and_no_rank_twice_at_a_time(count: int) -> None:
    from framework.engine.link_bench import rounds

    played = list(rounds(count))
    assert sorted(pair for together in played for pair in together) == sorted(
        combinations(range(count), 2)
    )
    for together in played:
        assert len({one for pair in together for one in pair}) == 2 * len(together)
