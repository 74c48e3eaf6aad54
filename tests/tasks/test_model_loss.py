"""The loss that a model returns, as a sum over what it is a mean of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.errors import ConfigError
from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import Classification
from framework.tasks.model_loss import ModelLoss

LABELS = torch.tensor([[1, 2, -100], [-100, 3, 4]])


@pytest.mark.parametrize(
    ("mean_over", "count"), [("samples", 2), ("labels", 4), ("next_labels", 3)]
)
@pytest.mark.parametrize(
    "outputs",
    [
        {"loss": torch.tensor(2.0)},
        (torch.tensor(2.0), None),
        torch.tensor(2.0),
        (torch.zeros(2, 3), torch.tensor(2.0)),
        (torch.tensor(2.0), torch.tensor(7.0)),
    ],
    ids=["key", "first", "alone", "the only 0-d tensor", "first of two"],
)
def test_a_mean_becomes_a_sum(mean_over: Any, count: int, outputs: Any) -> None:
    task = ModelLoss(mean_over=mean_over)
    inputs, targets = task.split({"x": torch.zeros(2), "labels": LABELS})
    assert set(inputs) == {"x", "labels"}
    loss = task.loss(outputs, targets)
    assert (float(loss.total), int(loss.count), int(task.count(targets))) == (
        2.0 * count,
        count,
        count,
    )


def test_a_batch_without_labels_adds_nothing() -> None:
    task = ModelLoss(mean_over="labels")
    loss = task.loss({"loss": torch.tensor(float("nan"))}, torch.full((2, 3), -100))
    assert (float(loss.total), int(loss.count)) == (0.0, 0)


def test_a_tuple_ends_with_the_labels_and_goes_whole_to_the_model() -> None:
    """As ``logits, loss = model(x, y)`` of minGPT and nanoGPT."""
    task = ModelLoss(mean_over="labels")
    inputs, targets = task.split([torch.zeros(2), LABELS])
    assert targets is LABELS

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x, (y > 0).sum() + x.sum()

    loss = task.loss(task.forward(Model(), inputs), targets)
    assert (float(loss.value), int(loss.count)) == (4.0, 4)


@pytest.mark.parametrize("batch", [(torch.zeros(2), [1, 2]), (LABELS,), {"x": torch.zeros(2)}])
def test_what_has_no_labels_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"a mapping with labels.*\[task-batch\]"):
        ModelLoss(mean_over="samples").split(batch)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the model returned no loss, but dict.*\[task-loss-result\]"
    ):
        ModelLoss(mean_over="samples").loss({"logits": torch.zeros(2)}, LABELS)


def test_named_tasks_take_mappings_with_labels() -> None:
    batch = {"input_ids": LABELS.abs(), "labels": torch.tensor([0, 1])}
    inputs, targets = Classification().split(batch)
    assert (list(inputs), targets.tolist()) == (["input_ids"], [0, 1])
    inputs, targets = CausalLM().split({"input_ids": LABELS.abs(), "labels": LABELS})
    assert targets.tolist() == [[2, -100, -100], [3, 4, -100]], (
        "moved by one, as transformers' models do"
    )


PADDED = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 3], [4, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mean_over", "count"), [("samples", 3), ("labels", 7), ("next_labels", 4)]
)
def test_another_label_may_be_ignored(mean_over: Any, count: int) -> None:
    task = ModelLoss(mean_over=mean_over, ignore_index=0)
    loss = task.loss({"loss": torch.tensor(2.0)}, PADDED)
    assert (float(loss.total), int(task.count(PADDED))) == (2.0 * count, count)


@pytest.mark.parametrize(
    ("labels", "options", "is_named"),
    [
        (PADDED, {"mean_over": "labels"}, True),
        (PADDED.flip(1), {"mean_over": "next_labels"}, True),
        (PADDED, {"mean_over": "labels", "ignore_index": 0}, False),
        (PADDED, {"mean_over": "samples"}, False),
        (LABELS, {"mean_over": "labels"}, False),
        (torch.arange(12).view(3, 4), {"mean_over": "labels"}, False),
        (torch.arange(3), {"mean_over": "labels"}, False),
    ],
)
def test_padding_that_is_counted_is_mentioned_once(
    labels: Any, options: dict[str, Any], is_named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ModelLoss(**options)
    for _ in range(40):
        task.look_at({"labels": labels})
    stated = capsys.readouterr().err
    assert stated.count("[no-label-ignored]") == is_named
    assert ("set task.ignore_index: 0" in stated) == is_named
