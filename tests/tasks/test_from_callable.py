from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from framework.errors import ConfigError
from framework.tasks.classification import Classification
from framework.tasks.from_callable import as_task
from tests.tasks.value import value_of, value_of_step


def test_a_task_is_returned_as_it_is() -> None:
    task = Classification()
    assert as_task(task) is task


@pytest.mark.parametrize(
    "loss", [mse_loss, nn.MSELoss(), lambda outputs, targets: (outputs - targets).pow(2).mean()]
)
def test_functions_and_loss_modules_become_tasks(loss: Any) -> None:
    task = as_task(loss)
    outputs, targets = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.0, 4.0])
    assert value_of(task.loss(outputs, targets)).item() == 2.5
    ratio = task.measure(outputs, targets)["loss"]
    assert (ratio.total.item(), ratio.count) == (5.0, 2)
    value_of(task.loss(outputs, targets)).backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [1.0, -2.0]


def test_outputs_arrive_in_float32_wherever_they_are() -> None:
    seen: list[Any] = []

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        seen.append(outputs)
        return torch.zeros((), dtype=torch.bfloat16)

    low = torch.zeros(2, dtype=torch.bfloat16)
    ids = torch.zeros(2, dtype=torch.int64)
    result = value_of(as_task(loss).loss({"logits": low, "hidden": [low, (low, ids)]}, ids))
    assert result.dtype == torch.float32
    assert (
        seen[0]["logits"].dtype
        == seen[0]["hidden"][0].dtype
        == seen[0]["hidden"][1][0].dtype
        == torch.float32
    )
    assert seen[0]["hidden"][1][1].dtype == torch.int64


WEIGHT = torch.tensor([0.5, 2.0, 1.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1, label_smoothing=0.1),
        partial(cross_entropy, weight=WEIGHT, ignore_index=255),
        partial(nn.CrossEntropyLoss(weight=WEIGHT)),
        nn.NLLLoss(weight=WEIGHT, ignore_index=255),
        cross_entropy,
    ],
)
def test_the_cross_entropy_of_torch_is_a_sum_over_what_it_counts(loss: Any) -> None:
    """Pixels of three images, many of them ignored: the mean over all is no mean of the images'
    means.
    """
    ignored = getattr(loss, "ignore_index", getattr(loss, "keywords", {}).get("ignore_index", -100))
    outputs, targets = torch.randn(3, 3, 4, 4).log_softmax(1), torch.randint(3, (3, 4, 4))
    targets[0, 1:], targets[2] = ignored, ignored
    task = as_task(loss)
    parts = [task.loss(outputs[i : i + 1].bfloat16().float(), targets[i : i + 1]) for i in range(3)]
    assert [float(part.count) for part in parts] == [
        float(task.count(targets[i : i + 1])) for i in range(3)
    ]  # type: ignore[union-attr, arg-type]
    expected = float(loss(outputs.bfloat16().float(), targets))
    assert float(value_of_step(parts)) == pytest.approx(expected, rel=1e-6)
    measured = task.measure(outputs.bfloat16(), targets)["loss"]
    assert float(measured.total / measured.count) == pytest.approx(expected, rel=1e-6)


def test_targets_that_are_probabilities_count_once_each() -> None:
    outputs, targets = torch.randn(4, 3, 2), torch.randn(4, 3, 2).softmax(1)
    loss = as_task(nn.CrossEntropyLoss(weight=WEIGHT)).loss(outputs, targets)
    assert float(value_of(loss)) == pytest.approx(
        float(cross_entropy(outputs, targets, weight=WEIGHT)), rel=1e-6
    )


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(reduction="sum"),
        partial(cross_entropy, reduction="sum"),
        partial(partial(mse_loss, reduction="sum")),
        partial(nn.L1Loss(reduction="sum")),
    ],
)
def test_a_loss_that_is_set_to_sum_is_refused(loss: Any) -> None:
    with pytest.raises(
        ConfigError, match=r'^task = reduction="sum": .*return the mean.*\[task-loss-result\]$'
    ):
        as_task(loss, handed_over=True)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "None was returned; return a Task or a callable loss(outputs, targets)"),
        (3, "a int was returned"),
        (nn.MSELoss, "the class torch.nn.modules.loss.MSELoss was returned; return an instance"),
        (Classification, "the class framework.tasks.classification.Classification was returned"),
    ],
)
def test_anything_else_is_refused(result: object, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_task(result)
    assert reason in str(caught.value)
    assert str(caught.value).endswith("[task-target-result]")


def test_a_loss_with_parameters_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the loss Linear has parameters.*\[task-loss-parameters\]"
    ):
        as_task(nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (nn.MSELoss(reduction="none"), r"a tensor of shape \(2,\)"),
        (lambda outputs, targets: 1.0, "a float"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"returned {what}, .*\[task-loss-result\]"):
        as_task(loss).loss(torch.zeros(2), torch.zeros(2))
