"""Trains models whose graph differs between ranks, with DeepSpeed's engine as the framework makes
it and in plain PyTorch.

Usage: routed_models.py OUT.json. Rank 0 writes {case: largest difference of a weight, or what was
refused}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from framework.engine.distributed import gather, process_group, rank
from framework.engine.model_build import build_model
from framework.engine.workarounds.gradient_order import keep_gradient_order
from framework.errors import TrainingError

NUM_STEPS, NUM_EXPERTS, WIDTH = 10, 5, 6


class Experts(nn.Module):
    """Two of five, or all of them in another order."""

    def __init__(self, *, order_only: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))
        self.num_chosen = NUM_EXPERTS if order_only else 2

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        for number in range(self.num_chosen):
            x = x + torch.tanh(self.experts[(choice + number) % NUM_EXPERTS](x))
        return x


class Routed(nn.Module):
    """Experts chosen by the data: the first number of a batch says which, the second one the
    step.
    """

    def __init__(self, *, from_step: int = 0, order_only: bool = False) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(WIDTH, WIDTH), Experts(order_only=order_only)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, 1)
        self.from_step = from_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = int(x[0, 0]) if int(x[0, 1]) >= self.from_step else 0
        return self.after(self.block(torch.tanh(self.before(x[:, 2:])), choice))


class Aside(nn.Module):
    """Twelve layers, and one that is called last and leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(12)])
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x[:, 2:])
        self.pooler(x)
        return x


def batch(step: int, of_rank: int, micro: int) -> torch.Tensor:
    """Samples of one rank, with its choice and the step in front."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + of_rank)
    x = torch.randn(4, WIDTH + 2, generator=generator)
    x[:, 0] = (3 * step + 2 * of_rank + micro) % NUM_EXPERTS
    x[:, 1] = step
    return x


def routed_samples() -> torch.utils.data.TensorDataset:
    """For runs of the framework: each sample names an expert, and the first of a batch chooses."""
    x = torch.randn(64, WIDTH + 2, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.arange(64) * 7 % NUM_EXPERTS
    return torch.utils.data.TensorDataset(x, x[:, 2:].sum(1, keepdim=True))


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return (outputs - targets).square().mean()


def make(kind: str) -> nn.Module:
    """The model of a case."""
    torch.manual_seed(0)
    return {
        "routed": Routed,
        "late": lambda: Routed(from_step=7),
        "order": lambda: Routed(order_only=True),
        "twice": lambda: Routed(from_step=100),
        "aside": Aside,
    }[kind]()


def plain(kind: str, optimizer: str, accumulation: int, world: int) -> dict[str, torch.Tensor]:
    """Plain PyTorch on the batches of all ranks; a weight that no rank used has a gradient of zero,
    as with ZeRO.
    """
    model = make(kind)
    step = OPTIMIZERS[optimizer](model.parameters())
    for number in range(NUM_STEPS):
        step.zero_grad()
        for of_rank in range(world):
            for micro in range(accumulation):
                loss = model(batch(number, of_rank, micro)).square().mean()
                if kind == "twice":
                    loss = loss + model(batch(number, of_rank, micro + 2)).square().mean()
                (loss / world / accumulation).backward()
        for parameter in model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        step.step()
    return {name: value.detach() for name, value in model.named_parameters()}


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


WAITING: list[int] = []


def watch_waiting(engine: deepspeed.DeepSpeedEngine) -> None:
    """Note how many gradients wait for others."""
    order = engine.optimizer.reduce_ready_partitions_and_remove_grads.__self__
    pass_on_next = order._pass_on_next

    def noted() -> None:
        pass_on_next()
        WAITING.append(len(order._waiting))

    order._pass_on_next = noted


def train(
    kind: str,
    stage: int,
    optimizer: str,
    accumulation: int,
    *,
    keeps_order: bool = True,
    **zero: Any,
) -> dict[str, torch.Tensor]:
    """The same with DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 100,
        }
        | zero,
        "zero_allow_untested_optimizer": True,
    }
    model = build_model(lambda: make(kind), ds_config=config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=OPTIMIZERS[optimizer],
        config=config,
        dist_init_required=False,
    )
    if keeps_order:
        keep_gradient_order(engine)
    if kind == "aside":
        watch_waiting(engine)
    for number in range(NUM_STEPS):
        for micro in range(accumulation):
            loss = engine(batch(number, rank(), micro)).square().mean()
            # two forward passes before a backward pass, and one of an evaluation between
            if kind == "twice":
                with torch.no_grad():
                    engine(batch(number, rank(), micro + 1))
                loss = loss + engine(batch(number, rank(), micro + 2)).square().mean()
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    return weights


def cases() -> Iterator[tuple[str, int, str, int, dict[str, Any]]]:
    """Model, stage, optimizer, accumulation and further keys."""
    for stage in (0, 1, 2):
        yield "routed", stage, "sgd", 1, {}
        yield "routed", stage, "adamw", 2, {}
    for stage in (1, 2):
        yield "routed", stage, "adamw", 2, {"overlap_comm": True}
        yield "late", stage, "sgd", 1, {}
        yield "order", stage, "sgd", 1, {}
    yield "routed", 3, "sgd", 1, {"leaf_module": {"names": ["block"]}}
    yield "twice", 3, "sgd", 1, {}
    for stage in (2, 3):
        yield "aside", stage, "sgd", 1, {}
    yield (
        "late",
        3,
        "adamw",
        2,
        {"leaf_module": {"classes": ["tests.jobs.routed_models.Experts", "__main__.Experts"]}},
    )


def main(out: Path, *refused: str) -> None:
    """Run all cases, the one that is refused, or with ``unkept`` one in DeepSpeed's own order."""
    found: dict[str, Any] = {}
    with process_group(None):
        world = len(gather(0))
        if refused == ("unkept",):
            expected, weights = (
                plain("order", "sgd", 1, world),
                train("order", 2, "sgd", 1, keeps_order=False),
            )
            difference = max(float((expected[one] - weights[one]).abs().max()) for one in expected)
            if rank() == 0:
                out.write_text(json.dumps(difference), encoding="utf-8")
            return
        if refused:
            try:
                train(refused[0], 3, "sgd", 1)
            except TrainingError as error:
                out.with_suffix(f".{rank()}").write_text(str(error), encoding="utf-8")
            os._exit(0)  # its other ranks may be gone
        for kind, stage, optimizer, accumulation, zero in cases():
            weights = train(kind, stage, optimizer, accumulation, **zero)
            if rank() > 0:
                continue
            expected = plain(kind, optimizer, accumulation, world)
            name = f"{kind} at stage {stage}, {optimizer}, accumulation {accumulation} {zero or ''}".strip()
            found[name] = max(float((expected[one] - weights[one]).abs().max()) for one in expected)
        if rank() == 0:
            found["most gradients waiting"] = max(WAITING)
            out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
