"""Trains models whose backward passes are not all alike at stage 0: overlapped_sums.py OUT.json.

Of each case: the largest distance of the weights and of the logged losses from plain PyTorch's in
one process, which sees the batches of all ranks at once, and what was sent before the backward pass
had ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.config.load import config_from_values
from framework.engine import gradient_sums, plain_engine
from framework.engine.distributed import process_group, rank
from framework.engine.gradient_sums import GradientSums
from framework.engine.plain_engine import PlainEngine, build_engine
from framework.setup.prepare_run import prepare
from framework.tasks.task import Ratio, Task
from tests.jobs.half_on_cpu import allow_fp16

STEPS, WIDTH = 5, 16
LR, DECAY = 0.5, 0.1
KINDS = ("plain", "branch", "unused", "checkpointed_twice", "twice_and_branch", "own_pass", "froze")


class Net(nn.Module):
    """Two blocks, a head, and a branch that only some samples take; the first block may be used
    twice.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.steps = kind, 0
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind in ("branch", "froze", "unused", "twice_and_branch"):
            self.branch = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        first: Callable[[torch.Tensor], torch.Tensor] = self.first
        # a step along the sign of the input's gradient (Goodfellow et al. 2015)
        if self.kind == "own_pass":
            inputs = inputs.detach().requires_grad_()
            self.head(self.second(self.first(inputs).tanh())).sum().backward()
            inputs = (inputs + 0.1 * inputs.grad.sign()).detach()
            self.zero_grad()
        if self.kind in ("checkpointed_twice", "twice_and_branch"):
            values = checkpoint(self.second, inputs.requires_grad_(), use_reentrant=True).tanh()
            values = checkpoint(first, values, use_reentrant=True).tanh()
            values = checkpoint(self.second, values, use_reentrant=True).tanh()
        else:
            values = self.second(first(inputs).tanh()).tanh()
        if self.kind in ("branch", "twice_and_branch") and inputs[0, 0] > 0:
            values = values + self.branch(values)
        if self.kind == "froze" and self.steps > 3:
            self.branch.requires_grad_(False)
        elif self.kind == "froze":
            values = values + self.branch(values)
        output: torch.Tensor = self.head(values)
        return output


class SquaresThatCount(Task):
    """Squared errors over the samples that have a target."""

    def loss(self, outputs: Any, targets: Any) -> Ratio:
        known = ~targets.isnan()
        errors = (outputs.squeeze(1) - targets.nan_to_num()).square() * known
        return Ratio(errors.sum(), known.sum())

    def count(self, targets: Any) -> torch.Tensor:
        return (~targets.isnan()).sum()


class MeanSquares(Task):
    """Squared errors, averaged."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return (outputs.squeeze(1) - targets.nan_to_num()).square().mean()


HALF: dict[str, tuple[dict[str, Any], Task]] = {
    "bf16": ({"dtype": "bf16"}, SquaresThatCount()),
    "bf16-reduced-in-fp32": ({"dtype": "bf16", "grad_reduction": "fp32"}, SquaresThatCount()),
    "fp16": ({"dtype": "fp16"}, SquaresThatCount()),
    # a count would be divided by at another time
    "autocast": ({"dtype": "autocast"}, MeanSquares()),
}


def batch(step: int, micro: int, of_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four samples, of which one rank's have no branch and some lack a target, another number on
    each rank.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + of_rank)
    inputs = torch.randn(4, WIDTH, generator=generator)
    inputs[0, 0] = 1.0 if of_rank == 0 else -1.0
    targets = torch.randn(4, generator=generator)
    if of_rank == 1:
        targets[: 1 + step % 3] = float("nan")
    return inputs, targets


def trained_alone(kind: str, task: Task, accumulation: int) -> tuple[Net, list[float]]:
    """Plain PyTorch in one process, on the batches of all ranks."""
    net, losses = Net(kind), []
    optimizer = torch.optim.SGD(
        [one for one in net.parameters() if one.requires_grad], lr=LR, weight_decay=DECAY
    )
    for step in range(STEPS):
        total: Any = 0.0
        count: Any = 0.0
        net.steps = step * accumulation
        for micro in range(accumulation):
            for of_rank in range(torch.distributed.get_world_size()):
                inputs, targets = batch(step, micro, of_rank)
                net.steps = step * accumulation + micro
                loss = task.loss(net(inputs), targets)
                total = total + (loss.total if isinstance(loss, Ratio) else loss)
                count = count + (loss.count if isinstance(loss, Ratio) else 1)
        net.zero_grad()
        (total / count).backward()
        for parameter in net.parameters():  # DeepSpeed gives zeros to what took no part
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total / count))
    return net, losses


def trained_together(engine: PlainEngine, accumulation: int) -> tuple[list[float], list[str]]:
    """Return the logged losses and, of the last step, in which order buckets were sent and backward
    passes ended.
    """
    losses, order = [], [""]
    with (
        mock.patch.object(
            gradient_sums._Bucket, "send", _noting("sent", gradient_sums._Bucket.send, order)
        ),
        mock.patch.object(GradientSums, "__call__", _noting("ended", GradientSums.__call__, order)),
    ):
        for step in range(STEPS):
            order.clear()
            stream = (batch(step, micro, rank()) for micro in range(accumulation))
            losses.append(engine.train_step(stream).read()["train/loss"])
    return losses, order


def _noting(event: str, function: Callable[..., Any], order: list[str]) -> Callable[..., Any]:
    def noting(*arguments: Any) -> Any:
        order.append(event)
        return function(*arguments)

    return noting


def main() -> None:
    found: dict[str, Any] = {}
    # A bucket for every weight.
    with mock.patch.object(gradient_sums, "DDP_BUCKET", 100), process_group(None):
        for kind in KINDS:
            for task in (SquaresThatCount(), MeanSquares()):
                # it drops what was accumulated
                for accumulation in (1, 3) if kind != "own_pass" else (1,):
                    name = f"{kind}-{type(task).__name__}-{accumulation}"
                    found[name] = _case(kind, task, accumulation)
        allow_fp16()
        for name, (precision, task) in HALF.items():
            found[name] = _beside_deepspeeds_own(precision, task)
        is_first = rank() == 0
    if is_first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def _beside_deepspeeds_own(precision: dict[str, Any], task: Task) -> dict[str, Any]:
    """Train twice in half precision: two ranks add in any order to the same bits, so none may
    differ.
    """
    values = {
        "model": {"kind": "mlp"},
        "batch": {"micro_size": 4, "accumulation_steps": 2},
        "precision": precision,
        "training": {"clip_grad_norm": 1.0},
    }
    prepared, weights = prepare(config_from_values(values)), []
    for way in (plain_engine._sum_gradients, lambda engine: None):
        with mock.patch.object(plain_engine, "_sum_gradients", way):
            engine = build_engine(
                prepared.plan, ds_config=prepared.ds_config, model=Net("branch"), task=task
            )
        ours = isinstance(engine.engine.allreduce_gradients, GradientSums)
        losses, _ = trained_together(engine, 2)
        weights.append([ours, losses, [one.tolist() for one in engine.engine.module.parameters()]])
        engine.close()
    (is_ours, *found), (is_theirs, *expected) = weights
    return {"ways": [is_ours, is_theirs], "equal": found == expected}


def _case(kind: str, task: Task, accumulation: int) -> dict[str, Any]:
    values = {
        "model": {"kind": "mlp"},
        "batch": {"micro_size": 4, "accumulation_steps": accumulation},
        "optimizer": {"kind": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": DECAY},
    }
    prepared = prepare(config_from_values(values))
    engine = build_engine(prepared.plan, ds_config=prepared.ds_config, model=Net(kind), task=task)
    losses, events = trained_together(engine, accumulation)
    net, expected = trained_alone(kind, task, accumulation)
    pairs = zip(engine.engine.module.parameters(), net.parameters(), strict=True)
    distance = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    engine.close()
    of_losses = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    return {"weights": distance, "losses": of_losses, "events": events}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
