"""Models whose weights have several names, no elements or no gradient: trained, resumed and moved
to another stage; and optimizers that hold other weights than those that are trained, with what each
is refused with.

Usage: held_cases.py OUT.json, on two ranks. `plain_run` is the same in plain PyTorch.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.data import TensorDataset

import framework
from framework.checkpoint.manifest import seal
from framework.checkpoint.names import MANIFEST
from framework.checkpoint.state.checkpoint_engine import read_file
from framework.engine.distributed import process_group
from framework.errors import FrameworkError
from framework.system.files import hash_file

HALF_WAY, STEPS, GLOBAL_SIZE, NUM_RANKS = 3, 6, 8, 2
STAGES = (0, 1, 2, 3)
STILL = r"still\..*"


class Shares(nn.Module):
    """A module in two places, a weight in two modules, a frozen one, one that is None, and one
    without elements, which DeepSpeed does not gather at stage 3 (0.19.8, partition_parameters.py).
    """

    def __init__(self, *, has_empty: bool = False) -> None:
        super().__init__()
        block = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block, block])
        self.first, self.still, self.head = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6, bias=False),
        )
        self.head.weight = self.first.weight
        self.out = nn.Linear(6, 3)
        if has_empty:
            self.nothing = nn.Parameter(torch.zeros(0, 6))
        self.out.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(torch.tanh(self.still(self.first(x))))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def sgd(weights: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(weights), lr=0.2, momentum=0.9)


def lacks_first(weights: Iterable[Any]) -> torch.optim.Optimizer:
    return sgd(list(weights)[2:])


def lacks_all_but_last(weights: Iterable[Any]) -> torch.optim.Optimizer:
    return sgd(list(weights)[-1:])


def holds_twice(weights: Iterable[Any]) -> torch.optim.Optimizer:
    own = list(weights)
    return sgd([*own, own[0]])


def holds_copies(weights: Iterable[Any]) -> torch.optim.Optimizer:
    return sgd([nn.Parameter(weight.detach().clone()) for weight in weights])


def holds_more(weights: Iterable[Any]) -> torch.optim.Optimizer:
    return sgd([*weights, nn.Parameter(torch.zeros(3))])


def by_name(named_parameters: list[tuple[str, Any]]) -> torch.optim.Optimizer:
    """As `configure_optimizers` of a Lightning module makes its groups."""
    biases = [weight for name, weight in named_parameters if name.endswith("bias")]
    others = [weight for name, weight in named_parameters if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.3}, {"params": biases, "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9)


NAMED: dict[str, dict[str, Any]] = {
    **{f"named-z{stage}": {"zero": {"stage": stage}} for stage in (0, 2, 3)},
    "named-pipe": {"parallel": {"pipe": 2}},
}


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


LORA = {"training": {"lora": {"target_modules": ["0", "2"], "r": 2}}}
# What holds other weights -> optimizer and sections.
REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    **{f"lacks-z{stage}": (lacks_first, {"zero": {"stage": stage}}) for stage in (0, 2, 3)},
    "last-z3": (lacks_all_but_last, {"zero": {"stage": 3}}),
    "twice-z1": (holds_twice, {"zero": {"stage": 1}}),
    "copies-z0": (holds_copies, {}),
    "more-z0": (holds_more, {}),
    "lacks-pipe": (lacks_all_but_last, {"parallel": {"pipe": 2}}),
    "none-pipe": (lacks_first, {"parallel": {"pipe": 2}}),
    "lacks-lora": (lacks_first, {"zero": {"stage": 3}, **LORA}),
}


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(64, 6, generator=draw), torch.randint(3, (64,), generator=draw)
    )


def shares(*, has_empty: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Shares(has_empty=has_empty)


def config(name: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": "runs"},
        "data": {"shuffle": False},
        "batch": {"global_size": GLOBAL_SIZE},
        "training": {"max_steps": HALF_WAY, "log_every": 1},
        "checkpoint": {"keep_last": 9},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }
    return base | {key: base.get(key, {}) | section for key, section in sections.items()}


def plain_losses_by_name() -> list[float]:
    """Losses of the model of layers with groups by name."""
    model = layers()
    return _plain_run(model, by_name(list(model.named_parameters())), HALF_WAY)[0]


def plain_run() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses of all steps, and the weights half-way and at the end."""
    model = shares()
    model.still.requires_grad_(False)
    return _plain_run(model, sgd(one for one in model.parameters() if one.requires_grad), STEPS)


def _plain_run(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    images, labels = data().tensors
    losses, states = list[float](), list[dict[str, torch.Tensor]]()
    for step in range(steps):
        at_step = slice(step * GLOBAL_SIZE, (step + 1) * GLOBAL_SIZE)
        loss = nn.functional.cross_entropy(model(images[at_step]), labels[at_step])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step + 1 in (HALF_WAY, STEPS):
            states.append({name: one.detach().clone() for name, one in model.state_dict().items()})
    return losses, states


def fit(name: str, model: Any, optimizer: Any, **sections: Any) -> Any:
    loss = nn.functional.cross_entropy
    return framework.fit(
        config(name, **sections), model=model, train_data=data(), task=loss, optimizer=optimizer
    )


def thaw_and_save() -> str:
    """A weight that is thawed in mid-run is neither stepped nor frozen at stage 3."""
    sections = {
        "zero": {"stage": 3},
        "training": {"freeze": [STILL]},
        "checkpoint": {"at_end": False},
    }
    parts = {
        "model": shares(),
        "train_data": data(),
        "task": nn.functional.cross_entropy,
        "optimizer": sgd,
    }
    try:
        with framework.open_engine(config("thawed", **sections), **parts) as engine:
            engine.module.still.requires_grad_(True)
            engine.save()
    except FrameworkError as error:
        return str(error)
    return ""


def lose_still() -> str:
    """Take the frozen weight out of the files of a checkpoint of stage 3, and seal them anew;
    returns its folder.
    """
    folder = Path("runs", "lost", "checkpoints", f"global_step{HALF_WAY}").absolute()
    if os.environ["RANK"] == "0":
        shutil.copytree(Path("runs", "shares-z3", "checkpoints", folder.name), folder)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for file in folder.glob("*_model_states.pt"):
            content = read_file(file)
            del (
                content["frozen_param_shapes"]["still.weight"],
                content["frozen_param_fragments"]["still.weight"],
            )
            torch.save(content, file)
            manifest["files"][file.name] = asdict(hash_file(file))
        (folder / MANIFEST).write_text(seal(manifest), encoding="utf-8")
    torch.distributed.barrier()
    return str(folder)


def main() -> None:
    found: dict[str, str] = {}
    frozen = {"max_steps": HALF_WAY, "freeze": [STILL]}
    with process_group(None):
        for stage in STAGES:
            fit(
                f"shares-z{stage}",
                shares(has_empty=stage < 2),
                sgd,
                zero={"stage": stage},
                training=frozen,
            )
        longer = frozen | {"max_steps": STEPS}
        for name, stage in (("resumed", 3), ("moved", 1), ("back", 3)):
            start = {"resumed": "shares-z3", "moved": "shares-z3", "back": "shares-z2"}[name]
            resume = {
                "resume": str(
                    Path("runs", start, "checkpoints", f"global_step{HALF_WAY}").absolute()
                )
            }
            fit(name, shares(), sgd, zero={"stage": stage}, training=longer, checkpoint=resume)
        for name, sections in NAMED.items():
            fit(name, layers(), by_name, **sections)
        for name, (optimizer, sections) in REFUSED.items():
            try:
                fit(name, layers(), optimizer, **sections)
            except FrameworkError as error:
                found[name] = str(error)
        found["thawed"] = thaw_and_save()
        lost = {"resume": lose_still()}
        for name, stage in (("lost-resumed", 3), ("lost-moved", 2)):
            try:
                fit(name, shares(), sgd, zero={"stage": stage}, training=longer, checkpoint=lost)
            except FrameworkError as error:
                found[name] = str(error)
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
