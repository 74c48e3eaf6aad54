"""Which losses are sums over a batch, and which only look like one; losses without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from framework.errors import ConfigError
from framework.tasks.from_callable import as_task
from framework.tasks.loss_checks import is_sum, refuse_first_sum, refuse_without_graph
from framework.tasks.model_loss import ModelLoss
from framework.tasks.task import Ratio, Task

Loss = Callable[[Tensor, Tensor], Any]
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.3])
NET = nn.Linear(8, 4)


def entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(outputs, targets, **options)


def normed(targets: Tensor) -> Tensor:
    return WEIGHT[targets] / WEIGHT[targets].sum()


SUMS: dict[str, Loss] = {
    "torch": lambda o, t: entropy(o, t, reduction="sum"),
    "smoothed": lambda o, t: entropy(o, t, reduction="sum", label_smoothing=0.1),
    "weighted": lambda o, t: entropy(o, t, reduction="sum", weight=WEIGHT),
    "by hand": lambda o, t: -o.log_softmax(1).gather(1, t[:, None]).sum(),
    "autoencoder": lambda o, t: (
        functional.binary_cross_entropy(o.sigmoid(), torch.ones_like(o), reduction="sum")
        - 0.5 * torch.sum(1 + o - o.pow(2) - o.exp())
    ),
    "half the squares": lambda o, t: 0.5 * ((o - 1) ** 2).sum(),
    "einsum": lambda o, t: torch.einsum("ij,ij->", o, o),
    "a loop": lambda o, t: sum(entropy(o[i], t[i]) for i in range(len(o))),
    "in doubles": lambda o, t: ((o.double() - 1) ** 2).sum().float(),
}
NO_SUMS: dict[str, Loss] = {
    "mean": entropy,
    "mean of sums": lambda o, t: ((o - 1) ** 2).sum(1).mean(),
    "sum of means": lambda o, t: ((o - 1) ** 2).mean(0).sum(),
    "by a constant": lambda o, t: entropy(o, t, reduction="sum") / 7,
    "times a constant": lambda o, t: entropy(o, t, reduction="sum") * (1 / 7),
    "by the batch": lambda o, t: entropy(o, t, reduction="sum") / len(t),
    "by the labels": lambda o, t: (entropy(o, t, reduction="none") * (t > 0)).sum() / (t > 0).sum(),
    "contrastive": lambda o, t: entropy(o @ o.T, torch.arange(len(o))),
    "contrastive sum": lambda o, t: entropy(o @ o.T, torch.arange(len(o)), reduction="sum"),
    "normed weights": lambda o, t: (entropy(o, t, reduction="none") * normed(t)).sum(),
    "class weights": lambda o, t: entropy(o, t, weight=WEIGHT),
    "ignored": lambda o, t: entropy(o, t, ignore_index=0),
    "with a penalty": lambda o, t: entropy(o, t) + (NET.weight**2).sum(),
    "only a penalty": lambda o, t: (NET.weight**2).sum(),
    "norm": lambda o, t: (o - 1).norm(),
    "nothing": lambda o, t: (o * 0).sum(),
}


def batch(size: int = 7) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return NET(torch.randn(size, 8, generator=draw)), torch.randint(4, (size,), generator=draw)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_refused(name: str) -> None:
    outputs, targets = batch()
    task = as_task(SUMS[name])
    with pytest.raises(ConfigError, match=r"a sum over the batch.*\[task-loss-result\]"):
        refuse_first_sum(task, task.loss(outputs, targets), outputs, targets)


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_is_not(name: str) -> None:
    outputs, targets = batch()
    assert not is_sum(NO_SUMS[name], NO_SUMS[name](outputs, targets), outputs, targets)


def test_a_task_that_names_its_count_may_sum() -> None:
    class Summed(Task):
        def loss(self, outputs: Any, targets: Any) -> Ratio:
            return Ratio(entropy(outputs, targets, reduction="sum"), len(targets))

        def count(self, targets: Any) -> int:
            return len(targets)

    outputs, targets = batch()
    refuse_first_sum(Summed(), Summed().loss(outputs, targets), outputs, targets)


def test_a_mean_is_computed_once_and_no_generator_is_moved() -> None:
    calls = []

    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        return (
            (outputs + torch.rand(())).square().sum()
            if len(calls) > 1
            else entropy(outputs, targets)
        )

    outputs, targets = batch()
    loss = noisy(outputs, targets)
    assert not is_sum(noisy, loss, outputs, targets)
    assert calls == [7]
    loss, before = noisy(outputs, targets), torch.get_rng_state()
    is_sum(noisy, loss, outputs, targets)
    assert torch.equal(torch.get_rng_state(), before)
    assert calls == [7, 7, 3, 4]


def test_the_loss_of_a_model_may_not_be_torchs_sum() -> None:
    outputs, targets = batch()
    task = ModelLoss(mean_over="samples")
    task.loss({"loss": entropy(outputs, targets)}, targets)
    with pytest.raises(ConfigError, match=r"a sum over the batch"):
        task.loss({"loss": entropy(outputs, targets, reduction="sum")}, targets)


@pytest.mark.parametrize(
    ("loss_of", "named"),
    [
        (
            lambda outputs, targets: (outputs.argmax(1) != targets).float().mean(),
            "between the model's outputs and",
        ),
        (
            lambda outputs, targets: torch.tensor(entropy(outputs, targets).item()),
            "between the model's outputs and",
        ),
        (
            lambda outputs, targets: entropy(outputs, targets).detach(),
            "between the model's outputs and the loss",
        ),
    ],
)
def test_a_loss_without_a_graph_is_named(loss_of: Loss, named: str) -> None:
    outputs, targets = batch()
    with pytest.raises(ConfigError, match=rf"^task: .*{named}.*\[loss-without-graph\]$"):
        refuse_without_graph(loss_of(outputs, targets), outputs)
    with pytest.raises(
        ConfigError,
        match=r"^model: the model's outputs depend on no weight.*\[loss-without-graph\]$",
    ):
        refuse_without_graph(loss_of(outputs.detach(), targets), outputs.detach())
