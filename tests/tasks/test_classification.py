from __future__ import annotations

import math

import pytest
import torch

from framework.tasks.classification import Classification


def test_loss_is_the_mean_negative_log_probability() -> None:
    logits, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    by_hand = (
        -sum(
            math.log(torch.softmax(row, 0)[target])
            for row, target in zip(logits, targets, strict=True)
        )
        / 6
    )
    assert Classification().loss(logits, targets).value.item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_outputs_give_the_float32_loss(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(64, 10).to(dtype).requires_grad_(), torch.randint(10, (64,))
    loss = Classification(label_smoothing=0.1).loss(logits, targets).value
    assert (loss.dtype, loss.ndim) == (torch.float32, 0)
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits.detach().float(), targets)
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def test_smoothing_changes_the_loss_and_not_the_measure() -> None:
    logits, targets = torch.randn(8, 5), torch.randint(5, (8,))
    plain, smooth = Classification(), Classification(label_smoothing=0.3)
    assert plain.loss(logits, targets).value != smooth.loss(logits, targets).value
    assert plain.measure(logits, targets) == smooth.measure(logits, targets)


def test_measures_over_uneven_batches_equal_the_metrics_of_all() -> None:
    logits, targets = torch.randn(101, 7), torch.randint(7, (101,))
    task = Classification()
    parts = [
        task.measure(logits[part], targets[part])
        for part in (slice(0, 64), slice(64, 100), slice(100, 101))
    ]
    exact = {
        name: sum(float(part[name].total) for part in parts)
        / sum(int(part[name].count) for part in parts)
        for name in ("loss", "accuracy")
    }
    assert exact["accuracy"] == pytest.approx(
        (logits.argmax(1) == targets).double().mean().item(), rel=1e-12
    )
    assert exact["loss"] == pytest.approx(
        task.loss(logits.double(), targets).value.item(), rel=1e-6
    )


def test_every_pixel_counts_in_segmentation() -> None:
    targets = torch.randint(3, (2, 4, 4))
    logits = torch.nn.functional.one_hot(targets, 3).permute(0, 3, 1, 2) * 9.0
    accuracy = Classification().measure(logits, targets)["accuracy"]
    assert (float(accuracy.total), accuracy.count) == (32.0, 32)


def test_neither_loss_nor_measure_waits_for_the_device() -> None:
    """Meta tensors have no values, so any read of one raises."""
    logits, targets = (
        torch.zeros(4, 3, device="meta"),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    )
    task = Classification(label_smoothing=0.1)
    assert task.loss(logits, targets).value.shape == ()
    assert set(task.measure(logits, targets)) == {"loss", "accuracy"}


def test_targets_that_are_ignored_count_in_neither_loss_nor_metrics() -> None:
    logits, targets = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    targets[:, 1:] = 255
    task = Classification(ignore_index=255)
    right = (logits.argmax(1) == targets)[targets != 255].double().mean()
    metrics = {
        name: float(ratio.total / ratio.count)
        for name, ratio in task.measure(logits, targets).items()
    }
    expected = float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=255))
    assert float(task.loss(logits, targets).value) == pytest.approx(expected, rel=1e-6)
    assert metrics == {
        "loss": pytest.approx(expected, rel=1e-6),
        "accuracy": pytest.approx(float(right)),
    }
    assert int(task.count(targets)) == 8
