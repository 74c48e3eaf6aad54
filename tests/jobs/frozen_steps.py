"""Runs whose weights are frozen in some steps (`training.freeze`): frozen_steps.py OUT.json. Of
each case the largest distance of its losses and last weights from plain PyTorch's; of resumed runs
from the unbroken one's.
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
from tests.jobs.changed_weights import QUIET

STEPS, BATCH, UNTIL, SINCE = 9, 16, 4, 8
INPUTS = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()
FREEZE = [
    "0.bias",
    {"match": r"2\..*", "until_step": UNTIL},
    {"match": ["4.weight", "4.bias"], "from_step": SINCE},
]
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "adamw": (
        {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    ),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = [(6, 8), (8, 8), (8, 8), (8, 2)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def config(name: str, stage: int, optimizer: str, **sections: Any) -> dict[str, Any]:
    """A run with clipping, accumulation and every loss logged."""
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {
        "run": {"name": name},
        "batch": {"global_size": BATCH, "accumulation_steps": 2},
        "data": {"shuffle": False},
        "training": {"max_steps": STEPS, "log_every": 1, "clip_grad_norm": 0.5, "freeze": FREEZE},
        "optimizer": OPTIMIZERS[optimizer][0],
        "zero": zero,
        "monitors": QUIET,
        **sections,
    }


def fit(values: dict[str, Any], **parts: Any) -> list[float]:
    """Train; return all losses that the run has logged."""
    framework.fit(values, model=net, train_data=TensorDataset(INPUTS, LABELS), **parts)
    path = Path("runs", values["run"]["name"], "metrics.jsonl")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def plain(
    make: Callable[..., torch.optim.Optimizer],
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that anyone would write: all weights in the optimizer, flags and gradients set at
    these steps.
    """
    model, losses = net(), list[float]()
    optimizer = make(model.parameters())
    for step in range(1, STEPS + 1):
        frozen = {0: True, 2: step <= UNTIL, 4: step >= SINCE}
        model[0].bias.requires_grad_(False)
        for number in (2, 4):
            model[number].requires_grad_(not frozen[number])
        optimizer.zero_grad(set_to_none=True)
        rows = slice((step - 1) * BATCH, step * BATCH)
        loss = nn.functional.cross_entropy(model(INPUTS[rows]), LABELS[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: one.detach() for name, one in model.named_parameters()}


def distance(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected), (len(found), len(expected))
    return max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True))


def distance_of_weights(name: str, expected: dict[str, torch.Tensor]) -> float:
    found = framework.load(f"runs/{name}", model=net).state_dict()
    return max(float((found[key] - value).abs().max()) for key, value in expected.items())


def resumed(
    name: str, stage: int, optimizer: str, at: int, expected: list[float], **sections: Any
) -> float:
    """The distance of a run that goes on from a checkpoint of another, as an unbroken one."""
    checkpoint = {"resume": f"runs/{name}/checkpoints/global_step{at}", "at_end": False}
    own = f"{name}-from{at}-at{stage}"
    rest = fit(config(own, stage, optimizer, checkpoint=checkpoint, **sections))
    return distance(rest, expected[at:])


def joined(groups: Any) -> torch.optim.Optimizer:
    """An optimizer that drops the groups that it is given."""
    return torch.optim.SGD([one for group in groups for one in group["params"]], lr=0.1)


def refusal_of(values: dict[str, Any], **parts: Any) -> str:
    try:
        fit(values, **parts)
    except FrameworkError as error:
        return str(error)
    return ""


def main() -> None:
    found: dict[str, Any] = {}
    kept = {"every_steps": 2, "keep_last": 99}
    with process_group(None):
        sgd, sgd_weights = plain(OPTIMIZERS["sgd"][1])
        adam, expected = plain(OPTIMIZERS["adamw"][1])
        for stage in range(4):
            name = f"adamw{stage}"
            own = fit(config(name, stage, "adamw", checkpoint=kept))
            found[f"{name} losses"] = distance(own, adam)
            found[f"{name} weights"] = distance_of_weights(name, expected)
            # Before a step that trains other weights, and right behind it.
            for at in (UNTIL, SINCE):
                found[f"{name} resumed at {at}"] = resumed(name, stage, "adamw", at, own)
            for at in (2, 6) if stage in (0, 3) else ():
                found[f"{name} moved at {at}"] = resumed(name, (stage + 2) % 4, "adamw", at, own)
            half = {"precision": {"dtype": "bf16"}}
            found[f"{name} half"] = distance(
                fit(config(f"{name}half", stage, "adamw", **half)), adam
            )
        for stage in (0, 2):
            found[f"sgd{stage} losses"] = distance(fit(config(f"sgd{stage}", stage, "sgd")), sgd)
            found[f"sgd{stage} weights"] = distance_of_weights(f"sgd{stage}", sgd_weights)
        piped = config("piped", 0, "adamw", parallel={"pipe": 2}, checkpoint=kept)
        own = fit(piped)
        found["piped losses"] = distance(own, adam)
        found["piped weights"] = distance_of_weights("piped", expected)
        found["piped moved"] = resumed("piped", 2, "adamw", UNTIL, own)
        own_optimizer = config("own", 1, "sgd")
        del own_optimizer["optimizer"]
        found["own losses"] = distance(fit(own_optimizer, optimizer=OPTIMIZERS["sgd"][1]), sgd)
        found["joined"] = refusal_of(own_optimizer, optimizer=joined)
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
