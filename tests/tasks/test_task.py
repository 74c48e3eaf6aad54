from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.errors import ConfigError
from framework.tasks.classification import Classification
from framework.tasks.task import Task
from tests.tasks.value import value_of


class Squares(Task):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - targets).square().mean()


class Recorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_a_pair_is_inputs_and_targets() -> None:
    assert Squares().split(["x", "y"]) == ("x", "y")
    assert Squares().split(("x", "y")) == ("x", "y")


def test_of_more_elements_the_last_is_the_targets() -> None:
    assert Squares().split(["ids", "mask", "y"]) == (("ids", "mask"), "y")


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ({"x": 1}, "a dict per batch"),
        (torch.zeros(4, 2), "a Tensor per batch"),
        ([torch.zeros(4)], "a list of 1 per batch"),
        ("xy", "a str per batch"),
    ],
)
def test_another_batch_asks_for_an_own_split(batch: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Squares().split(batch)
    text = str(caught.value)
    assert what in text
    assert "overrides split(batch)" in text
    assert text.startswith("task = Squares: ")
    assert text.endswith("[task-batch]")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("x", (("x",), {})),
        (("x", "y"), (("x", "y"), {})),
        (["x", "y"], ((["x", "y"],), {})),
        ({"ids": "x", "mask": "y"}, ((), {"ids": "x", "mask": "y"})),
    ],
)
def test_forward_spreads_tuples_and_mappings(inputs: Any, expected: Any) -> None:
    assert Squares().forward(Recorder(), inputs) == expected


def test_measures_summed_over_uneven_batches_are_the_loss_of_all() -> None:
    task = Squares()
    outputs, targets = torch.randn(11, 3), torch.randn(11, 3)
    ratios = [
        task.measure(outputs[part], targets[part])["loss"] for part in (slice(0, 8), slice(8, 11))
    ]
    exact = torch.stack([ratio.total for ratio in ratios]).sum() / sum(
        ratio.count for ratio in ratios
    )
    torch.testing.assert_close(exact.float(), value_of(task.loss(outputs, targets)))


def test_a_measure_is_detached_and_keeps_digits() -> None:
    outputs = torch.randn(4, requires_grad=True)
    total = Squares().measure(outputs, torch.zeros(4))["loss"].total
    assert (total.dtype, total.ndim, total.requires_grad) == (torch.float64, 0, False)


@pytest.mark.parametrize(
    "targets",
    [
        torch.zeros(5, 2),
        {"labels": torch.zeros(5), "mask": torch.zeros(5)},
        (torch.zeros(5, 3), torch.zeros(5)),
        [{"boxes": None}] * 5,
    ],
)
def test_samples_are_counted_in_any_kind_of_targets(targets: Any) -> None:
    assert Squares().num_samples(targets) == 5


def test_a_task_without_a_loss_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]


def test_nothing_is_derived_by_default() -> None:
    assert Classification().derive({"loss": 1.0}) == {}
