"""Loops whose steps have several backward passes: backward_passes.py OUT.json. Weights of ours are
compared with those of plain PyTorch here; the largest difference of each case is left there.
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
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import framework
from framework.engine.distributed import process_group
from framework.errors import FrameworkError

SAMPLES, STEPS, CLIP = 4, 4, 0.2
SGD = partial(torch.optim.SGD, lr=0.5)
QUIET = {"report": False, "tensorboard": False, "csv": False, "progress": "off"}
ONES, ZEROS = torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1)
Batch = tuple[torch.Tensor, torch.Tensor]
Difference = float | str


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def batches(step: int, rank: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [
        (torch.randn(SAMPLES, 8, generator=draw), torch.randn(SAMPLES, 1, generator=draw))
        for _ in range(2)
    ]


def squares(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def sizes(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    return model(batch[0]).abs().mean()  # type: ignore[no-any-return]


# Orders of passes; each is called for plain PyTorch and for ours.


def in_turn(model: Any, backward: Any, step: Any, data: list[Batch]) -> None:
    backward(squares(model, data[0]))
    backward(sizes(model, data[1]))
    step()


def forward_first(model: Any, backward: Any, step: Any, data: list[Batch]) -> None:
    one, other = squares(model, data[0]), sizes(model, data[1])
    backward(one)
    backward(other)
    step()


def micro_batches(model: Any, backward: Any, step: Any, data: list[Batch]) -> None:
    """Take two micro-batches of two losses each, with one graph for both, and passes without a
    gradient between.
    """
    for batch in data:
        outputs = model(batch[0])
        with torch.no_grad():
            model(batch[1].expand(-1, 8))
        backward(outputs.abs().mean(), retain_graph=True)
        with torch.no_grad():
            model(batch[1].expand(-1, 8))
        backward(((outputs - batch[1]) ** 2).mean())
        step()


def penalized(model: Any, backward: Any, step: Any, data: list[Batch]) -> None:
    """Add a penalty on slopes through the engine itself, and a pass of `torch.autograd.grad` that
    gives no gradient.
    """
    points = data[0][0].clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    backward(((slopes.norm(dim=1) - 1) ** 2).mean())
    (direction,) = torch.autograd.grad(squares(model, (points, data[0][1])), points)
    backward(squares(model, (points.detach() + 0.1 * direction.sign(), data[0][1])))
    step()


def plain(order: Callable[..., None], ranks: int) -> list[torch.Tensor]:
    model = net()
    optimizer = SGD(model.parameters())
    share = ranks * (2 if order is micro_batches else 1)

    def backward(loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss / share).backward(retain_graph=retain_graph)

    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            order(model, backward, lambda: None, batches(step, rank))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


def settings(name: str, stage: int, **sections: Any) -> dict[str, Any]:
    training = {"max_steps": STEPS, "clip_grad_norm": CLIP}
    values = {
        "run": {"name": name},
        "training": training,
        "batch": {"micro_size": SAMPLES},
        "monitors": QUIET,
    }
    values |= {"precision": {"dtype": "fp32"}, "zero": {"stage": stage}}
    return {
        name: {**values.get(name, {}), **sections.get(name, {})} for name in {**values, **sections}
    }


def weights_of(engine: framework.OpenEngine, model: Callable[[], nn.Module]) -> list[torch.Tensor]:
    loaded = framework.load(engine._run.folder.path, model=model)
    return [weight.detach() for weight in loaded.parameters()]


def largest(ours: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ours, others, strict=True))


def compared(order: Callable[..., None], stage: int, **sections: Any) -> Difference:
    """Return how far weights are from plain PyTorch's, or what was refused."""
    accumulated = {"accumulation_steps": 2 if order is micro_batches else 1}
    name = f"{order.__name__}{stage}{len(sections)}"
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        with framework.open_engine(
            settings(name, stage, batch=accumulated, **sections), model=net, optimizer=SGD
        ) as engine:
            while engine.steps_taken < STEPS:
                order(
                    engine,
                    engine.backward,
                    engine.step,
                    engine.move(batches(engine.steps_taken, rank)),
                )
    except FrameworkError as error:
        return str(error)
    return largest(weights_of(engine, net), plain(order, ranks))


def plain_gan(ranks: int) -> list[torch.Tensor]:
    g, d = generator(), net()
    of_g, of_d = SGD(g.parameters()), SGD(d.parameters())
    for step in range(STEPS):
        pairs = [
            (data[0][0], g(data[1][0])) for data in (batches(step, rank) for rank in range(ranks))
        ]
        of_d.zero_grad()
        for real, fake in pairs:
            ((bce(d(real), ONES) + bce(d(fake.detach()), ZEROS)) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(d.parameters(), CLIP)
        of_d.step()
        of_g.zero_grad()
        for _, fake in pairs:
            (bce(d(fake), ONES) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(g.parameters(), CLIP)
        of_g.step()
    return [weight.detach() for weight in [*g.parameters(), *d.parameters()]]


def gan(stage: int) -> Difference:
    """Return the same of two engines, of which one's loss goes through the other, whose weights are
    not frozen.
    """
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with (
        framework.open_engine(settings(f"g{stage}", stage), model=generator, optimizer=SGD) as g,
        framework.open_engine(settings(f"d{stage}", stage), model=net, optimizer=SGD) as d,
    ):
        while g.steps_taken < STEPS:
            (real, _), (noise, _) = batches(g.steps_taken, rank)
            fake = g(noise)
            d.backward(bce(d(real), ONES))
            d.backward(bce(d(fake.detach()), ZEROS))
            d.step()
            g.backward(bce(d(fake), ONES))
            g.step()
    return largest([*weights_of(g, generator), *weights_of(d, net)], plain_gan(ranks))


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("broken")


def misused(name: str, use: Callable[[framework.OpenEngine], object], stage: int = 1) -> str:
    try:
        with framework.open_engine(settings(name, stage), model=net, optimizer=SGD) as engine:
            use(engine)
    except FrameworkError as error:
        return str(error)
    return "nothing was refused"


def after_a_broken_pass(engine: framework.OpenEngine) -> None:
    try:
        engine.backward(_Breaks.apply(squares(engine, batches(0, 0)[0])))
    except RuntimeError:
        engine.step()


def sharing(engine: framework.OpenEngine) -> None:
    with framework.open_engine(
        settings("shares", 1), model=nn.Sequential(engine.module[0]), optimizer=SGD
    ):
        pass


def main() -> None:
    found: dict[str, Any] = {}
    with process_group(None):
        if torch.distributed.get_world_size() == 1:
            found |= {f"forward_first{stage}": compared(forward_first, stage) for stage in (2, 3)}
            found["gan3"] = gan(3)
        else:
            found |= {f"in_turn{stage}": compared(in_turn, stage) for stage in range(4)}
            found |= {
                f"forward_first{stage}": compared(forward_first, stage) for stage in (0, 1, 3)
            }
            found |= {f"micro_batches{stage}": compared(micro_batches, stage) for stage in range(3)}
            found |= {f"penalized{stage}": compared(penalized, stage) for stage in (0, 2)}
            found |= {f"gan{stage}": gan(stage) for stage in range(3)}
            offload = {"offload_optimizer": {"device": "cpu"}}
            found["offload"] = compared(in_turn, 2, zero=offload)
            found["bf16"] = compared(in_turn, 2, precision={"dtype": "bf16"})
            batch = batches(0, 0)[0]
            found["no_pass"] = misused("no_pass", lambda engine: engine.step())
            found["no_graph"] = misused(
                "no_graph", lambda engine: engine.backward(torch.tensor(1.0))
            )
            found["no_number"] = misused(
                "no_number", lambda engine: engine.backward(torch.ones(3, requires_grad=True))
            )
            found["foreign"] = misused("foreign", lambda engine: squares(engine, batch).backward())
            found["broken"] = misused("broken", after_a_broken_pass)
            found["shared"] = misused("shared", sharing)
            found["no_step"] = misused(
                "no_step", lambda engine: engine.backward(squares(engine, batch))
            )
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
