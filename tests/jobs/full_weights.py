"""Runs whose callbacks and loops read and set whole weights, gradients and optimizer states, beside
plain PyTorch: full_weights.py OUT.json CASE ...

A case is ``NAME:STAGE:PRECISION``. Rank 0 writes for each the largest differences of all ranks, or
the error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import framework
from framework.engine import rank_meeting
from framework.engine.distributed import gather, process_group
from framework.engine_protocol import FullTensors
from framework.errors import FrameworkError
from tests.jobs.write_weights import DATA, INPUTS, LABELS, QUIET, answer

STEPS: Final = 6
BATCH: Final = 16
FIRST: Final = "0.weight"
LAST: Final = "2.weight"


class Plain(nn.Sequential):
    """Two layers with weights that two ranks cut in the middle of a row."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(12, 14), nn.Tanh(), nn.Linear(14, 2))


class PlainFullTensors:
    """The oracle: a plain module with its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._weights = dict(model.named_parameters())
        self._optimizer = optimizer

    def weight_names(self) -> list[str]:
        return list(self._weights)

    def full_weight(self, name: str) -> Tensor:
        return self._weights[name].detach().clone()

    def set_full_weight(self, name: str, value: Tensor) -> None:
        self._weights[name].data.copy_(value)

    def full_gradient(self, name: str) -> Tensor:
        gradient = self._weights[name].grad
        assert gradient is not None
        return gradient.clone()

    def set_full_gradient(self, name: str, value: Tensor) -> None:
        self._weights[name].grad = value.clone()

    def full_optimizer_state(self, name: str, key: str) -> Tensor:
        state: Tensor = self._optimizer.state[self._weights[name]][key]
        return state.clone()

    def set_full_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        self._optimizer.state[self._weights[name]][key].copy_(value)


class Acts:
    """What a run does through its doors, and what it has read there."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def before_step(self, doors: FullTensors) -> None:
        """Clip each number of one gradient, and double another."""
        for name in doors.weight_names():
            self.read.append(doors.full_gradient(name))
        doors.set_full_gradient(FIRST, doors.full_gradient(FIRST).clamp(-0.02, 0.02))
        doors.set_full_gradient("2.bias", doors.full_gradient("2.bias") * 2)

    def after_step(self, doors: FullTensors, step: int) -> None:
        """Clip a weight, and halve a moment of the optimizer."""
        for name in doors.weight_names():
            self.read.append(doors.full_weight(name))
            self.read.append(doors.full_optimizer_state(name, "exp_avg"))
        if step == 2:
            doors.set_full_weight(FIRST, doors.full_weight(FIRST).clamp(-0.1, 0.1))
        if step == 3:
            moment = doors.full_optimizer_state(LAST, "exp_avg_sq")
            doors.set_full_optimizer_state(LAST, "exp_avg_sq", moment * 4)
        if step == 4:
            doors.set_full_weight("2.bias", torch.tensor([0.25, -0.5]))


class Acting(Acts):
    """The acts as a callback."""

    def on_gradients(self, state: framework.State) -> None:
        self.before_step(state)

    def on_step(self, state: framework.State) -> None:
        self.after_step(state, state.step)


def known_loss(outputs: Tensor, labels: Tensor) -> framework.Ratio:
    """Return the loss of the samples of class 0 alone: ranks have other numbers of them."""
    known = labels == 0
    losses = cross_entropy(outputs, labels, reduction="none")
    return framework.Ratio((losses * known).sum(), known.sum())


class Known(framework.Task):
    """The same as a task."""

    def loss(self, outputs: Tensor, targets: Tensor) -> framework.Ratio:
        return known_loss(outputs, targets)

    def count(self, targets: Tensor) -> Tensor:
        return (targets == 0).sum()


class Tied(nn.Module):
    """Two layers that are one, with a frozen one before them."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 2)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.frozen(values)
        outputs: Tensor = self.head(self.second(self.first(hidden).tanh()).tanh())
        return outputs


def plain_run(*, loss_of: Any = cross_entropy) -> Acts:
    """Train the plain model with the same acts."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    doors = PlainFullTensors(model, optimizer)
    acts = Acts()
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        loss = loss_of(model(INPUTS[rows]), LABELS[rows])
        loss = getattr(loss, "value", loss)
        loss.backward()
        acts.before_step(doors)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        acts.after_step(doors, step + 1)
    return acts


def config(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 20  # biases stay whole
    values: dict[str, Any] = {
        "run": {"name": name},
        "batch": {"global_size": BATCH},
        "data": {"shuffle": False},
        "training": {"max_steps": STEPS, "log_every": 1, "clip_grad_norm": 0.1},
        "optimizer": {"kind": "adamw", "lr": 2e-2, "weight_decay": 0.0},
        "monitors": QUIET,
    }
    if dtype != "fp32":
        values["precision"] = {"dtype": dtype}
    return values | sections | {"zero": zero | sections.get("zero", {})}


def difference(acts: Acts, plain: Acts) -> float:
    """Return the largest difference of what was read, on any rank."""
    assert len(acts.read) == len(plain.read), (len(acts.read), len(plain.read))
    pairs = zip(acts.read, plain.read, strict=True)
    largest = max(float((one.cpu() - other).abs().max()) for one, other in pairs)
    of_ranks: list[float] = gather(largest)
    return max(of_ranks)


def fitted(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> float:
    acts = Acting()
    framework.fit(
        config(name, stage, dtype, sections), model=Plain, train_data=DATA, callbacks=[acts]
    )
    return difference(acts, plain_run())


def counted(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> float:
    """A loss that is divided by what all ranks count, after the backward pass."""
    acts = Acting()
    asked = config(name, stage, dtype, sections)
    framework.fit(asked, model=Plain, train_data=DATA, task=Known(), callbacks=[acts])
    return difference(acts, plain_run(loss_of=known_loss))


def resumed(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> float:
    """A run that goes on from its checkpoint of step 3, which was written at ZeRO stage 3."""
    first = config(name, 3, dtype, sections)
    first["training"] |= {"max_steps": 3}
    framework.fit(first, model=Plain, train_data=DATA, callbacks=[Acting()])
    rest = config(name, stage, dtype, sections) | {"checkpoint": {"resume": "auto"}}
    acts = Acting()
    framework.fit(rest, model=Plain, train_data=DATA, callbacks=[acts])
    plain = plain_run()
    plain.read = plain.read[len(plain.read) // 2 :]
    return difference(acts, plain)


class AtEnd:
    """Reads all weights at the end, after setting some."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.read: dict[str, Tensor] = {}

    def on_step(self, state: framework.State) -> None:
        if state.step == STEPS:
            for name in self.names:
                state.set_full_weight(name, state.full_weight(name) * 0 + 0.125)
            self.read = {name: state.full_weight(name).cpu() for name in state.weight_names()}


def saved(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> float:
    """What is read at the last step is what the checkpoint of that step holds."""
    acts = AtEnd()
    model = None
    asked = config(name, stage, dtype, sections)
    parts: dict[str, Any] = {}
    if "model" not in sections:
        acts = AtEnd("frozen.weight", "second.weight")
        model = Tied
        parts = {"model": model, "train_data": DATA}
    framework.fit(asked, callbacks=[acts], **parts)
    loaded = framework.load(f"runs/{name}", model=model)
    weights = dict(loaded.named_parameters(remove_duplicate=False))
    assert acts.read.keys() == weights.keys()
    pairs = [(tensor, weights[key].detach().float()) for key, tensor in acts.read.items()]
    return max(float((one - other).abs().max()) for one, other in pairs)


def looped(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> float:
    """A loop of one's own with two micro-batches a step."""
    asked = config(name, stage, dtype, sections)
    del asked["data"]
    asked["batch"] = {"global_size": BATCH, "accumulation_steps": 2}
    acts = Acts()
    with framework.open_engine(asked, model=Plain) as engine:
        for step in range(STEPS):
            rows = torch.arange(step * BATCH, (step + 1) * BATCH)
            for part in rows.chunk(2):
                mine = part.chunk(engine.world_size)[engine.rank]
                outputs = engine(engine.move(INPUTS[mine]))
                loss = cross_entropy(outputs, LABELS[mine].to(outputs.device))
                engine.backward(loss)
                if part[-1] == rows[-1]:
                    acts.before_step(engine)
                engine.step()
            acts.after_step(engine, engine.steps_taken)
    return difference(acts, plain_run())


class Refused:
    """A callback that does one thing which is refused."""

    def __init__(self, act: str) -> None:
        self.act = act

    def on_step(self, state: framework.State) -> None:
        if (self.act == "alone" and state.is_main) or (self.act == "differing" and state.is_main):
            state.full_weight(FIRST)
        elif self.act == "differing":
            state.full_weight(LAST)
        elif self.act == "values":
            value = state.full_weight(FIRST)
            state.set_full_weight(FIRST, value + torch.distributed.get_rank())
        elif self.act == "unknown":
            state.full_weight("0.weigth")
        elif self.act == "late":
            state.full_gradient(FIRST)
        elif self.act == "key":
            state.full_optimizer_state(FIRST, "momentum_buffer")
        elif self.act == "shape":
            state.set_full_weight(FIRST, torch.zeros(3))


def alone(out: str) -> None:
    """Have one rank call alone; the others wait for it in the next step, until it ends."""
    rank_meeting.WAIT_SECONDS = 2.0
    try:
        framework.fit(
            config("alone", 2, "fp32", {}),
            model=Plain,
            train_data=DATA,
            callbacks=[Refused("alone")],
        )
    except FrameworkError as error:
        if torch.distributed.get_rank() == 0:
            Path(out).write_text(str(error), encoding="utf-8")
    os._exit(1)


def refused(name: str, stage: int, dtype: str, sections: dict[str, Any]) -> float:
    rank_meeting.WAIT_SECONDS = 2.0
    act = Refused(name.partition("_")[0])
    framework.fit(config(name, stage, dtype, {}), model=Plain, train_data=DATA, callbacks=[act])
    return -1.0


HOST: Final = {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
ACCUMULATED: Final = {"batch": {"global_size": BATCH, "accumulation_steps": 2}}
EXPERTS: Final = {
    "model": {
        "kind": "gpt",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "max_positions": 16,
        "moe": {"num_experts": 4},
    },
    "data": {"target": "tests.jobs.parts:masked_prompts"},
    "task": {"kind": "causal_lm"},
    "parallel": {"expert": 2},
}
SECTIONS: Final[dict[str, dict[str, Any]]] = {
    "fit": {},
    "halved": {"precision": {"dtype": "bf16", "states": "bf16"}},
    "counted": {},
    "resumed": {},
    "tied": {},
    "experts": EXPERTS,
    "accumulated": ACCUMULATED,
    "host": HOST,
    "pipe": {"parallel": {"pipe": 2}} | ACCUMULATED,
    "tensor": {"parallel": {"tensor": 2, "tensor_plan": {"0": "column", "2": "row"}}},
}


RUNS: Final = {
    "loop": looped,
    "counted": counted,
    "resumed": resumed,
    "tied": saved,
    "experts": saved,
}


def of_case(name: str, run_name: str, stage: int, dtype: str) -> Any:
    run = RUNS.get(name, fitted if name in SECTIONS else refused)
    return run(run_name, stage, dtype, SECTIONS.get(name, {}))


def main() -> None:
    out, *cases = sys.argv[1:]
    if cases == ["alone"]:
        with process_group(None):
            alone(out)
    answer(out, cases, of_case)


if __name__ == "__main__":
    main()
