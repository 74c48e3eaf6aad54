"""Weights that change their flags or their objects in mid-run: changed_weights.py OUT.json [STAGE
...]. Of each case the error, or the largest distance of its losses from plain PyTorch's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import framework
from framework.engine.distributed import process_group
from framework.errors import FrameworkError

STEPS, BATCH, CHANGED_AFTER = 8, 8, 3
QUIET = {"report": False, "tensorboard": False, "csv": False, "progress": "off"}
INPUTS = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()


class Net(nn.Module):
    """Two layers; what `change` does to them happens in forward or by a callback."""

    def __init__(
        self, *, thaws: bool = False, change: Callable[[Net], object] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
        self.first.requires_grad_(not thaws)
        self.change, self.calls = change, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.change is not None and self.calls > CHANGED_AFTER:
            self.change(self)
        return self.second(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


class Switch:
    """A callback that changes the model once."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        self._change = change

    def on_step(self, state: framework.State) -> None:
        if state.step == CHANGED_AFTER:
            self._change(state.model)


def flag(value: bool, model: Net) -> None:
    model.first.requires_grad_(value)


def replaced(model: Net) -> None:
    model.first.bias = nn.Parameter(torch.zeros(8))


def added(model: Net) -> None:
    model.third = nn.Linear(2, 2)


def config(name: str, stage: int, **sections: Any) -> dict[str, Any]:
    """A run of a few steps with every loss logged."""
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {
        "run": {"name": name},
        "batch": {"global_size": BATCH},
        "data": {"shuffle": False},
        "training": {"max_steps": STEPS, "log_every": 1},
        "optimizer": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        "zero": zero,
        "monitors": QUIET,
        **sections,
    }


def losses_of(name: str) -> list[float]:
    """What a run has logged."""
    rows = map(
        json.loads, Path("runs", name, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return [row["train/loss"] for row in rows if "train/loss" in row]


def plain_losses(*, frozen_after: int = STEPS) -> list[float]:
    """Plain PyTorch on whole batches; the first layer may be frozen in mid-run."""
    net, losses = Net(), list[float]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        net.first.requires_grad_(step < frozen_after)
        rows = slice(step * BATCH, step * BATCH + BATCH)
        loss = nn.functional.cross_entropy(net(INPUTS[rows]), LABELS[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fit(name: str, stage: int, build: Callable[[], Net], *callbacks: Any, **sections: Any) -> str:
    """Train; return the error, or an empty text."""
    try:
        framework.fit(
            config(name, stage, **sections),
            model=build,
            train_data=TensorDataset(INPUTS, LABELS),
            callbacks=list(callbacks),
        )
    except FrameworkError as error:
        return str(error)
    return ""


def distance(name: str, expected: list[float]) -> float:
    """How far a run's losses are from these, at most."""
    pairs = zip(losses_of(name), expected, strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def toggled_within_a_step(stage: int, *, order: tuple[bool, bool]) -> float:
    """Two losses in one step, of which one keeps its gradient away from the first layer; beside
    plain PyTorch.
    """
    found, expected, world = list[float](), list[float](), torch.distributed.get_world_size()
    sections = {"batch": {"micro_size": BATCH // world, "accumulation_steps": 2}}
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    values = config(f"toggled{stage}{order[0]}", stage, **sections)
    del values["data"]  # of the loop
    with framework.open_engine(values, model=Net) as engine:
        for step in range(STEPS):
            rows = slice(step * BATCH, step * BATCH + BATCH)
            own = slice(
                rows.start + engine.rank * BATCH // world,
                rows.start + (engine.rank + 1) * BATCH // world,
            )
            optimizer.zero_grad()
            for is_trained in order:
                for model in (net, engine.module):
                    model.first.requires_grad_(is_trained)
                loss = nn.functional.cross_entropy(engine(INPUTS[own]), LABELS[own])
                engine.backward(loss)
                (nn.functional.cross_entropy(net(INPUTS[rows]), LABELS[rows]) / 2).backward()
                for model in (net, engine.module):
                    model.first.requires_grad_(True)
                engine.step()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                expected.append(float(nn.functional.cross_entropy(net(INPUTS[rows]), LABELS[rows])))
                mean = nn.functional.cross_entropy(engine.module(INPUTS[own]), LABELS[own]) / world
                torch.distributed.all_reduce(mean)
                found.append(float(mean))
    return max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True))


def main() -> None:
    found: dict[str, Any] = {}
    with process_group(None):
        for stage in map(int, sys.argv[2:] or "0123"):
            found[f"thawed {stage}"] = fit(
                f"thawed{stage}", stage, partial(Net, thaws=True), Switch(partial(flag, True))
            )
            found[f"frozen {stage}"] = fit(
                f"frozen{stage}", stage, Net, Switch(partial(flag, False))
            )
            if stage > 1:
                forward = partial(Net, thaws=True, change=partial(flag, True))
                found[f"thawed in forward {stage}"] = fit(f"forward{stage}", stage, forward)
            if stage == 2:
                found[f"replaced {stage}"] = fit(f"replaced{stage}", stage, Net, Switch(replaced))
            found[f"added {stage}"] = fit(f"added{stage}", stage, Net, Switch(added))
            found[f"untouched {stage}"] = fit(f"untouched{stage}", stage, Net) or distance(
                f"untouched{stage}", plain_losses()
            )
            for order in ((True, False), (False, True)):
                name = f"toggled {stage} {order[0]}"
                try:
                    found[name] = toggled_within_a_step(stage, order=order)
                except FrameworkError as error:
                    found[name] = str(error)
        if "frozen 0" in found:
            found["frozen 0"] = found["frozen 0"] or distance(
                "frozen0", plain_losses(frozen_after=CHANGED_AFTER)
            )
            half = {"precision": {"dtype": "bf16"}}
            found["frozen half"] = fit("half", 0, Net, Switch(partial(flag, False)), **half)
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
