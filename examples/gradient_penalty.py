"""A critic with a gradient penalty (Gulrajani et al. 2017, eq. 3).

python examples/gradient_penalty.py
"""

from __future__ import annotations

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

import framework

BATCH, WEIGHT = 32, 10.0


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def penalty(
    score: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """Mean of (|gradient of the score| - 1)^2 at points between real and fake ones."""
    points = (mix * real + (1 - mix) * fake).requires_grad_()
    (slopes,) = torch.autograd.grad(score(points).sum(), points, create_graph=True)
    return ((slopes.norm(dim=1) - 1) ** 2).mean()


def main(**settings: dict[str, object]) -> list[float]:
    """Train a critic between digits and noise; returns its losses."""
    images, losses = torch.tensor(load_digits().data / 16.0, dtype=torch.float32), []
    asked = {"training": {"max_steps": 100}, "batch": {"micro_size": BATCH}, **settings}
    asked["run"] = {"name": "critic", **settings.get("run", {})}
    with framework.open_engine(
        asked, model=critic, optimizer=partial(torch.optim.Adam, lr=1e-3)
    ) as engine:
        while engine.steps_taken < engine.max_steps and not engine.should_stop():
            draw = torch.Generator().manual_seed(
                engine.steps_taken * engine.world_size + engine.rank
            )
            real = engine.move(images[torch.randint(len(images), (BATCH,), generator=draw)])
            fake = engine.move(torch.rand(BATCH, 64, generator=draw))
            mix = engine.move(torch.rand(BATCH, 1, generator=draw))
            loss = (
                engine(fake).mean()
                - engine(real).mean()
                + WEIGHT * penalty(engine.module, real, fake, mix)
            )
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
