"""Messages of a step, against DeepSpeed's rules by hand."""

from __future__ import annotations

from framework.plan import messages


def test_weights_join_until_there_are_enough() -> None:
    assert messages.filled([3, 4, 5, 1], 6) == [7, 6]
    assert messages.filled([3, 4, 5, 1], 8) == [12, 1]
    assert messages.filled([3, 4], 0) == [3, 4]
    assert messages.filled([], 5) == []


def test_a_bucket_holds_whole_weights() -> None:
    assert messages.bounded([3, 4, 5, 1], 7) == [7, 6]
    assert messages.bounded([3, 9, 1], 7) == [3, 9, 1]
    assert messages.bounded([], 7) == []


def test_flat_messages_and_their_sums_fit_in_a_bucket() -> None:
    assert messages.flat(23, 10) == [5, 5, 5, 5, 3]
    assert messages.flat(10, 10) == [5, 5]


def test_small_weights_are_gathered_once_and_large_ones_ahead() -> None:
    sizes = [100, 7, 200, 7]
    assert messages.ahead(sizes, prefetch=150, live=10**9, persistent=7) == [300]
    assert messages.ahead(sizes, prefetch=150, live=50, persistent=7) == [100, 200]
    assert messages.ahead(sizes, prefetch=150, live=10**9, persistent=100) == [200]
    assert messages.small(sizes, 7) == [14]
    assert messages.small(sizes, 6) == []
