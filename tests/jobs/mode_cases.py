"""Trains models that keep a part in evaluation mode, or were built with one in it, and writes each
run's losses and the modes that its last step had.

Usage: mode_cases.py OUT.json, on two ranks. `plain_losses` is the same in plain PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import framework
from framework.engine.distributed import gather, process_group

STEPS, GLOBAL_SIZE, NUM_RANKS = 6, 8, 2


class Body(nn.Module):
    """A batch norm whose statistics are far from those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.norm.running_mean.fill_(0.5)
        self.norm.running_var.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


class Net(nn.Module):
    """A head on a body that the factory left in evaluation mode, as `from_pretrained` does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body().eval(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


class Keeps(Net):
    """The body stays in evaluation mode: the usual way to fine-tune with a frozen batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body.train()

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self.body.eval()
        return self


class KeptBody(Body):
    """A layer that keeps its own norm in evaluation mode."""

    def train(self, mode: bool = True) -> KeptBody:
        super().train(mode)
        self.norm.eval()
        return self


class ListsLayers(Keeps):
    """The same model, which a pipeline and recomputation take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("body", self.body), ("tanh", self.tanh), ("head", self.head)]


class Rests:
    """A callback that puts the body into evaluation mode behind step `at`; 0: before the first."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def on_start(self, state: Any) -> None:
        if self.at == 0:
            part_of(state.model).eval()

    def on_step(self, state: Any) -> None:
        if state.step == self.at:
            part_of(state.model).eval()


def part_of(model: nn.Module) -> nn.Module:
    """The norm, of a stage of a pipeline as well; a stage without one has another part."""
    return next(
        (part for part in model.modules() if isinstance(part, nn.BatchNorm1d)), nn.Identity()
    )


def in_layers(body: nn.Module) -> nn.Sequential:
    return nn.Sequential(body, nn.Tanh(), nn.Linear(8, 3))


# Model, callback, and how it is run; names of cases end with what is the same arithmetic.
MODELS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "built": (Net, None),
    "keeps": (Keeps, None),
    "rests": (Net, 0),
    "rests-later": (Net, 3),
    "layer-keeps": (lambda: in_layers(KeptBody()), None),
    "layer-built": (lambda: in_layers(Body().eval()), None),
    "root-keeps": (ListsLayers, None),
    "layer-rests": (lambda: in_layers(Body()), 3),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"built-z{stage}": ("built", {"zero": {"stage": stage}}) for stage in (0, 3)},
    **{f"keeps-z{stage}": ("keeps", {"zero": {"stage": stage}}) for stage in (0, 1, 2, 3)},
    **{f"rests-z{stage}": ("rests", {"zero": {"stage": stage}}) for stage in (1, 3)},
    "rests-later-z2": ("rests-later", {"zero": {"stage": 2}}),
    "root-keeps-recomputed": ("root-keeps", {"training": {"recompute_every": 1}}),
    **{
        f"{name}-pipe": (name, {"parallel": {"pipe": 2}})
        for name in ("layer-keeps", "layer-built", "root-keeps", "layer-rests")
    },
}


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(64, 6, generator=draw), torch.randint(3, (64,), generator=draw)
    )


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]()


def config(name: str, sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": "runs"},
        "data": {"shuffle": False},
        "batch": {"global_size": GLOBAL_SIZE},
        "optimizer": {"kind": "sgd", "lr": 0.3, "momentum": 0.9},
        "training": {"max_steps": STEPS, "log_every": 1},
        "evaluation": {"every_steps": 2, "at_start": True, "batch_size": 8},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
    }
    return base | {key: base.get(key, {}) | section for key, section in sections.items()}


def plain_losses(name: str, *, num_parts: int) -> list[float]:
    """Losses of the steps; each batch in so many parts, as ranks compute with statistics of their
    own.
    """
    model, at = built(name), MODELS[name][1]
    images, labels = data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    model.train()
    if at == 0:
        part_of(model).eval()
    for step in range(STEPS):
        at_step = slice(step * GLOBAL_SIZE, (step + 1) * GLOBAL_SIZE)
        total = torch.zeros(())
        for x, wanted in zip(
            images[at_step].chunk(num_parts), labels[at_step].chunk(num_parts), strict=True
        ):
            total = total + nn.functional.cross_entropy(model(x), wanted) / num_parts
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
        if step + 1 == at:
            part_of(model).eval()
    return losses


def main() -> None:
    found: dict[str, Any] = {}
    with process_group(None):
        for case, (name, sections) in CASES.items():
            model, at = built(name), MODELS[name][1]
            callbacks = [] if at is None else [Rests(at)]
            framework.fit(
                config(case, sections),
                model=model,
                train_data=data(),
                eval_data=data(),
                task=nn.functional.cross_entropy,
                callbacks=callbacks,
            )
            moved = gather(int(part_of(model).num_batches_tracked))
            rows = Path("runs", case, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            losses = [row["train/loss"] for row in map(json.loads, rows) if "train/loss" in row]
            found[case] = {"losses": losses, "batches": moved[0]}
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
