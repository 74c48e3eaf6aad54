from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from framework.data.splits import Splits, as_splits
from framework.errors import ConfigError

TRAIN, EVALUATION = TensorDataset(torch.zeros(3)), TensorDataset(torch.zeros(2))


class Plain:
    """A map-style dataset that does not inherit from torch's class, as those of other libraries."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def __len__(self) -> int:
        return 1


class Divided(Streamed):
    """As a stream of Hugging Face's that was divided over ranks."""

    _distributed = (0, 2)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (TRAIN, (TRAIN, None)),
        ((TRAIN, EVALUATION), (TRAIN, EVALUATION)),
        ((TRAIN, None), (TRAIN, None)),
        (Splits(TRAIN, EVALUATION), (TRAIN, EVALUATION)),
    ],
)
def test_accepts_a_dataset_a_pair_and_splits(result: Any, expected: tuple[Any, Any]) -> None:
    splits = as_splits(result)
    assert splits.train is expected[0]
    assert splits.evaluation is expected[1]


def test_accepts_streams() -> None:
    class Lines:
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    for stream in (Streamed(), Lines()):
        splits = as_splits((TRAIN, stream))
        assert (splits.num_train, splits.evaluation) == (3, stream)
        assert as_splits(stream).num_train is None


def test_accepts_any_object_with_length_and_items() -> None:
    plain = Plain()
    assert as_splits(plain).train is plain


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "the training set is None, not a dataset"),
        ({"train": TRAIN}, "the training set is a dict, not a dataset"),
        ([TRAIN, EVALUATION], "the training set is a list of TensorDataset, not of samples"),
        ([1.0, 2.0], "is a list of float, not of samples (inputs, target)"),
        ([], "is empty"),
        ((TRAIN, EVALUATION, TRAIN), "a tuple of 3 was returned"),
        ((None, EVALUATION), "the training set is None, not a dataset"),
        (
            iter([1]),
            "the training set is an iterator (builtins.list_iterator), which can be read once",
        ),
        ((number for number in range(3)), "the training set is an iterator (builtins.generator)"),
        ({1, 2}, "the training set is a set, not a dataset"),
        (
            Divided(),
            "was divided over ranks (split_dataset_by_node), which the loader does; return the whole stream",
        ),
        (WithoutLength(), "has no length"),
        (TensorDataset(torch.zeros(0)), "is empty; return at least one sample"),
        (
            (TRAIN, TensorDataset(torch.zeros(0))),
            "return None in its place to train without evaluation",
        ),
        (Splits(TRAIN, "eval"), "the evaluation set is a str, not a dataset"),
    ],
)
def test_refuses_everything_else_and_states_what_is_needed(result: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_splits(result)
    (problem,) = caught.value.problems
    assert reason in str(problem)
    assert str(problem).startswith("data.target: ")
    assert str(problem).endswith("[data-target-result]")


def test_reports_both_sets_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        as_splits((Divided(), WithoutLength()))
    assert [problem.reason.split()[1] for problem in caught.value.problems] == [
        "training",
        "evaluation",
    ]


def test_a_list_of_samples_is_a_dataset() -> None:
    samples = [(torch.zeros(3), 0), (torch.ones(3), 1)]
    assert as_splits(samples).train is samples
    assert as_splits((samples, samples[:1])).evaluation == samples[:1]
