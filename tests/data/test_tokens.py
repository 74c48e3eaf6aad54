from __future__ import annotations

import pytest

from framework.data.tokens import EvaluationShare


def dealt(sizes: list[int], fraction: float) -> list[int]:
    """Numbers of the documents that evaluation gets."""
    share = EvaluationShare(fraction)
    return [number for number, size in enumerate(sizes) if share.takes(size)]


def test_every_tenth_document() -> None:
    assert dealt([500] * 45, 0.1) == [9, 19, 29, 39]
    assert dealt([500] * 9, 0.25) == [3, 7]
    assert dealt([500] * 100, 0.0) == []


def test_sizes_are_not_preferred() -> None:
    """Small and large documents alternate in a pattern of their own; evaluation gets both as
    often.
    """
    sizes = [100 if number % 20 < 10 else 150 for number in range(2000)]
    taken = [sizes[number] for number in dealt(sizes, 0.1)]
    assert taken.count(100) == taken.count(150) == 100


def test_a_document_that_is_too_large_is_passed_over() -> None:
    sizes = [100] * 9 + [100_000] + [100] * 10
    assert dealt(sizes, 0.1) == [10, 19]


def test_empty_documents_do_not_count() -> None:
    assert dealt([0, 100] * 10, 0.1) == [19]


@pytest.mark.parametrize(
    ("num_train", "num_evaluation", "moved"),
    [(1000, 0, 100), (960, 40, 60), (950, 50, 0), (800, 200, 0), (4, 0, 0)],
)
def test_what_the_end_of_training_makes_up(num_train: int, num_evaluation: int, moved: int) -> None:
    assert EvaluationShare(0.1).tokens_to_move(num_train, num_evaluation) == moved
