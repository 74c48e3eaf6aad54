"""Runs whose code writes into weights, beside plain PyTorch: write_weights.py OUT.json CASE ...

A case is a function of this file, or one with a ZeRO stage and a precision behind colons:
``clamp:2:bf16``. Rank 0 writes for each what it has found, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import framework
from framework.engine.distributed import process_group
from framework.errors import FrameworkError
from tests.jobs.half_on_cpu import allow_fp16

Write = Callable[[nn.Module, int], None]
STEPS, BATCH = 6, 16
QUIET = {"report": False, "tensorboard": False, "csv": False, "progress": "off"}
torch.manual_seed(0)
INPUTS = torch.randn(256, 12)
LABELS = (INPUTS.sum(1) > 0).long()
DATA = torch.utils.data.TensorDataset(INPUTS, LABELS)


class Plain(nn.Sequential):
    """Three layers, of which code elsewhere writes the weights."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2))


class Bounded(nn.Module):
    """A layer that clamps its own weight where it is used."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.3)

    def forward(self, values: Tensor) -> Tensor:
        """Clamp, as code of the WGAN paper does."""
        self.weight.data.clamp_(-0.1, 0.1)
        found: Tensor = linear(values, self.weight)
        return found


class Clamping(nn.Sequential):
    """Layers that write themselves."""

    def __init__(self) -> None:
        super().__init__(Bounded(12, 16), nn.Tanh(), Bounded(16, 2))


class Taught(nn.Module):
    """A student and a frozen mean of it, which forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Plain(), Plain()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        """Move the teacher, and add what it sees."""
        for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.data.mul_(0.8).add_(weight.data, alpha=0.2)
        with torch.no_grad():
            seen = self.teacher(values)
        found: Tensor = self.student(values) + 0.5 * seen
        return found


class Renormed(nn.Module):
    """An embedding that torch shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(9, 8, max_norm=0.5), nn.Linear(8, 2)

    def forward(self, values: Tensor) -> Tensor:
        """Look up whole numbers made of the inputs."""
        found = (values.float() * 2).round().clamp(-4, 4).long() + 4
        logits: Tensor = self.head(self.rows(found).mean(1))
        return logits


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


class Writer:
    """A callback that writes after some steps, and keeps the weights of the end."""

    def __init__(self, write: Write, *, at_start: bool, gathers: bool) -> None:
        self.write, self.at_start, self.gathers = write, at_start, gathers
        self.weights: dict[str, Tensor] = {}

    def on_start(self, state: framework.State) -> None:
        if self.at_start:
            self._write(state)

    def on_step(self, state: framework.State) -> None:
        if not self.at_start:
            self._write(state)

    def on_end(self, state: framework.State) -> None:
        with state.gathered():
            self.weights = {
                name: tensor.clone() for name, tensor in state.model.state_dict().items()
            }

    def _write(self, state: framework.State) -> None:
        if not self.gathers:
            self.write(state.model, state.step)
            return
        with state.gathered():
            self.write(state.model, state.step)


@torch.no_grad()
def clamp(model: nn.Module, step: int) -> None:
    for weight in model.parameters():
        weight.clamp_(-0.1, 0.1)


def clamp_data(model: nn.Module, step: int) -> None:
    for weight in model.parameters():
        weight.data.clamp_(-0.1, 0.1)


def rebind(model: nn.Module, step: int) -> None:
    for weight in model.parameters():
        weight.data = weight.data.clamp(-0.1, 0.1)


def weight_of(model: nn.Module, layer: int) -> nn.Parameter:
    weight: nn.Parameter = model.get_parameter(f"{layer}.weight")
    return weight


def zero_head(model: nn.Module, step: int) -> None:
    if step == 3:
        weight_of(model, 2).data.zero_()


def load(model: nn.Module, step: int) -> None:
    torch.manual_seed(5)
    model.load_state_dict(Plain().state_dict())


def redraw_unlike(model: nn.Module, step: int) -> None:
    if step == 2:
        torch.manual_seed(torch.distributed.get_rank())
        weight_of(model, 0).data[3].normal_()


def draw(model: nn.Module, step: int) -> None:
    weight_of(model, 0).data.normal_(std=0.1)


def set_fp32(model: nn.Module, step: int) -> None:
    if step == 3:
        for weight in model.parameters():
            if hasattr(weight, "_hp_mapping") or hasattr(weight, "ds_id"):
                whole = deepspeed.utils.safe_get_full_fp32_param(weight)
                deepspeed.utils.safe_set_full_fp32_param(weight, whole.mul(0.5))
            else:
                weight.data.mul_(0.5)


def nothing(model: nn.Module, step: int) -> None:
    pass


def config(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    values: dict[str, Any] = {
        "run": {"name": name},
        "batch": {"global_size": BATCH},
        "data": {"shuffle": False},
        "training": {"max_steps": STEPS, "log_every": 1},
        "optimizer": {"kind": "adamw", "lr": 2e-2, "weight_decay": 0.0},
        "monitors": QUIET,
        "zero": zero | sections.pop("zero", {}),
    }
    if dtype != "fp32":
        values["precision"] = {"dtype": dtype}
    training = values["training"] | sections.pop("training", {})
    return {**values, **sections, "training": training}


def plain_loop(model: nn.Module, write: Write, *, at_start: bool) -> list[float]:
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad], lr=2e-2, weight_decay=0.0
    )
    losses = []
    if at_start:
        write(model, 0)
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH)
        loss = cross_entropy(model(INPUTS[rows]), LABELS[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not at_start:
            write(model, step + 1)
        losses.append(loss.item())
    return losses


def fitted(
    name: str,
    stage: int,
    dtype: str,
    *,
    write: Write = nothing,
    kind: type[nn.Module] = Plain,
    at_start: bool = False,
    gathers: bool = True,
    **sections: Any,
) -> dict[str, Any]:
    """Fit, and compare with the plain loop: losses, and weights in memory and in the checkpoint."""
    writer, asked = (
        Writer(write, at_start=at_start, gathers=gathers),
        config(name, stage, dtype, sections),
    )
    framework.fit(asked, model=lambda: built(kind), train_data=DATA, callbacks=[writer])
    return compared(
        name, writer.weights, kind, lambda model: plain_loop(model, write, at_start=at_start)
    )


def compared(
    name: str,
    weights: dict[str, Tensor],
    kind: type[nn.Module],
    loop: Callable[[nn.Module], list[float]],
) -> dict[str, Any]:
    if torch.distributed.get_rank() != 0:
        return {}
    plain, saved = (
        built(kind),
        framework.load(f"runs/{name}", model=lambda: built(kind)).state_dict(),
    )
    losses = loop(plain)
    lines = Path(f"runs/{name}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ours = [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]
    ends = plain.state_dict()
    return {
        "loss": max(abs(one - other) for one, other in zip(losses, ours, strict=True)),
        "saved": max(float((ends[name] - saved[name].float()).abs().max()) for name in ends),
        "memory": max(
            float((one - saved[name].to(one)).abs().max()) for name, one in weights.items()
        ),
        "largest": max(float(one.abs().max()) for one in saved.values()),
    }


def clamping_loop(name: str, stage: int, dtype: str) -> dict[str, Any]:
    """A loop of one's own that clamps after each step, as a critic of a WGAN."""
    weights = dict[str, Tensor]()
    asked = {key: value for key, value in config(name, stage, dtype, {}).items() if key != "data"}
    with framework.open_engine(asked, model=lambda: built(Plain)) as engine:
        for step in range(STEPS):
            rows = torch.arange(step * BATCH, (step + 1) * BATCH)
            mean = BATCH // engine.world_size
            rows = rows[engine.rank * mean : (engine.rank + 1) * mean]
            loss = cross_entropy(engine(INPUTS[rows]), LABELS[rows])
            engine.backward(loss)
            engine.step()
            with engine.gathered():
                for weight in engine.module.parameters():
                    weight.data.clamp_(-0.05, 0.05)
            mean_loss = loss.detach() / engine.world_size
            torch.distributed.all_reduce(mean_loss)
            engine.log({"train/loss": mean_loss})
        with engine.gathered() as module:
            weights = {key: one.clone() for key, one in module.state_dict().items()}

    def write(model: nn.Module, step: int) -> None:
        for weight in model.parameters():
            weight.data.clamp_(-0.05, 0.05)

    return compared(name, weights, Plain, lambda model: plain_loop(model, write, at_start=False))


def spread_loop(name: str, stage: int, dtype: str) -> dict[str, Any]:
    """The same without a thought of stage 3."""
    asked = {key: value for key, value in config(name, stage, dtype, {}).items() if key != "data"}
    with framework.open_engine(asked, model=lambda: built(Plain)) as engine:
        engine.backward(cross_entropy(engine(INPUTS[:8]), LABELS[:8]))
        engine.step()
        for weight in engine.module.parameters():
            weight.data.clamp_(-0.05, 0.05)
    return {}


SMALL = {"stage3_param_persistence_threshold": 100000}
AWAY = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
CASES: dict[str, Callable[[str, int, str], dict[str, Any]]] = {
    "nothing": fitted,
    "clamp": partial(fitted, write=clamp),
    "clamp_data": partial(fitted, write=clamp_data),
    "rebind": partial(fitted, write=rebind),
    "zero_head": partial(fitted, write=zero_head),
    "load": partial(fitted, write=load, at_start=True),
    "set_fp32": partial(fitted, write=set_fp32, gathers=False),
    "forward": partial(fitted, kind=Clamping),
    "forward_twice": partial(
        fitted, kind=Clamping, batch={"global_size": BATCH, "accumulation_steps": 2}
    ),
    "teacher": partial(fitted, kind=Taught, zero=SMALL),
    "max_norm": partial(fitted, kind=Renormed),
    "small": partial(fitted, write=clamp_data, gathers=False, zero=SMALL),
    "watched": partial(fitted, write=clamp_data, training={"bad_steps": "skip"}),
    "offload": partial(fitted, write=clamp_data, zero=AWAY),
    "average": partial(
        fitted,
        write=clamp,
        training={"ema": {"decay": 0.5}},
        evaluation={"every_steps": 2, "weights": "ema"},
    ),
    "saved": partial(fitted, write=clamp, checkpoint={"every_steps": 2, "mode": "async"}),
    "pipe": partial(fitted, write=clamp_data, parallel={"pipe": 2}),
    "loop": clamping_loop,
    "spread": partial(fitted, write=clamp_data, gathers=False),
    "spread_draw": partial(fitted, write=draw, gathers=False),
    "spread_load": partial(fitted, write=load, at_start=True, gathers=False),
    "spread_teacher": partial(fitted, kind=Taught),
    "spread_loop": spread_loop,
    "unlike": partial(fitted, write=redraw_unlike, training={"log_every": 4}),
}


def answer(out: str, cases: list[str], of_case: Callable[[str, str, int, str], Any]) -> None:
    """Write what `of_case` returns for each case ``NAME:STAGE[:DTYPE]``, or the text of its error,
    and end the process.

    Args:
        out: JSON file, written by rank 0.
        cases: in order.
        of_case: takes the name, that of the run, the stage and the type of numbers.
    """
    found = dict[str, Any]()
    allow_fp16()
    with process_group(None):
        for case in cases:
            name, stage, *precision = case.split(":")
            dtype = precision[0] if precision else "fp32"
            try:
                found[case] = of_case(name, case.replace(":", "_"), int(stage), dtype)
            except FrameworkError as error:
                found[case] = str(error)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2:], lambda name, *rest: CASES[name](*rest))
