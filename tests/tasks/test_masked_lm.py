from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from framework.errors import ConfigError
from framework.tasks.masked_lm import MaskedLM
from framework.tasks.task import Positions
from tests.tasks.value import value_of

TASK = MaskedLM()
VOCAB = 11


def outputs_and_targets(num_predicted: tuple[int, ...] = (1, 3)) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    batch = len(num_predicted)
    labels = torch.full((batch, 6), -100)
    for row, count in enumerate(num_predicted):
        labels[row, :count] = torch.randint(VOCAB, (count,), generator=generator)
    logits = torch.randn(batch, 6, VOCAB, generator=generator)
    return (logits, torch.randn(batch, 2, generator=generator)), (labels, torch.arange(batch) % 2)


def test_inputs_and_targets() -> None:
    fields = [*(torch.full((2, 6), number) for number in range(4)), torch.tensor([0, 1])]
    inputs, targets = TASK.split(fields)
    assert [int(field[0, 0]) for field in inputs] == [0, 1, 2]
    assert targets[0] is fields[3]
    assert targets[1] is fields[4]
    assert TASK.num_samples(targets) == 2


@pytest.mark.parametrize("batch", [(1, 2), torch.zeros(5), {"ids": 1}])
def test_another_batch_is_refused(batch: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"set data: \{kind: text_pairs\}, or yield these five \[task-batch\]"
    ):
        TASK.split(batch)


def test_the_loss_is_the_sum_of_two_means() -> None:
    outputs, targets = outputs_and_targets()
    predicted = targets[0] != -100
    mlm = cross_entropy(outputs[0][predicted], targets[0][predicted])
    nsp = cross_entropy(outputs[1], targets[1])
    loss = value_of(TASK.loss(outputs, targets))
    assert float(loss) == pytest.approx(float(mlm + nsp), rel=1e-6)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    halves = tuple(output.bfloat16() for output in outputs)
    assert value_of(TASK.loss(halves, targets)).dtype == torch.float32


def test_metrics_of_one_batch_are_those_of_the_loss() -> None:
    outputs, targets = outputs_and_targets()
    measured = TASK.measure(outputs, targets)
    metrics = {name: float(ratio.total) / float(ratio.count) for name, ratio in measured.items()}
    metrics |= TASK.derive(metrics)
    assert set(metrics) - {"perplexity"} == {
        "loss",
        "mlm_loss",
        "accuracy",
        "nsp_loss",
        "nsp_accuracy",
    }
    assert metrics["loss"] == pytest.approx(float(value_of(TASK.loss(outputs, targets))), rel=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["mlm_loss"] + metrics["nsp_loss"], rel=1e-9)
    assert (int(measured["accuracy"].count), int(measured["nsp_accuracy"].count)) == (4, 2)
    right = (outputs[1].argmax(-1) == targets[1]).double().mean()
    assert metrics["nsp_accuracy"] == float(right)


def test_the_loss_over_uneven_batches_is_exact() -> None:
    """One prediction in the first batch, five in the second: the mean over batches is not the mean
    over tokens.
    """
    (logits, nsp_logits), (labels, label) = outputs_and_targets((1, 5))
    sums: dict[str, list[float]] = {}
    for row in (slice(0, 1), slice(1, 2)):
        for name, ratio in TASK.measure(
            (logits[row], nsp_logits[row]), (labels[row], label[row])
        ).items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(ratio.total)
            pair[1] += float(ratio.count)
    metrics = {name: total / count for name, (total, count) in sums.items()}
    whole = float(value_of(TASK.loss((logits, nsp_logits), (labels, label))))
    metrics |= TASK.derive(metrics)
    assert metrics["loss"] == pytest.approx(whole, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["mlm_loss"]))
    assert TASK.derive({}) == {}


def test_shared_pairs_count_once() -> None:
    """The label where [CLS] is; all ranks read the whole mask."""
    ids = torch.arange(16).view(2, 8)
    inputs, targets = (ids, ids % 2, ids.clamp(max=1)), (ids, torch.tensor([0, 1]))
    parts = [MaskedLM().share(inputs, targets, Positions(rank, 2)) for rank in (0, 1)]
    assert [part[0][2].shape for part in parts] == [(2, 8)] * 2
    assert [part[1][1].tolist() for part in parts] == [[0, 1], [-100, -100]]
    counts = [MaskedLM().count(part[1]) for part in parts]
    assert [int(sum(each)) for each in zip(*counts, strict=True)] == [16, 2]
