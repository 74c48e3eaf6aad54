"""A GAN: two models, optimizers and engines, one loop: python examples/gan.py, or by torchrun."""

from __future__ import annotations

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import framework

NOISE, BATCH = 16, 32


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def config(name: str, settings: dict[str, dict[str, object]]) -> dict[str, object]:
    run = {"name": f"gan_{name}", **settings.get("run", {})}
    return {"training": {"max_steps": 200}, "batch": {"micro_size": BATCH}, **settings, "run": run}


def main(**settings: dict[str, object]) -> list[tuple[float, float]]:
    """Train; returns the losses of discriminator and generator at every step."""
    images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))
    losses = []
    with (
        framework.open_engine(config("g", settings), model=generator, optimizer=adam) as g,
        framework.open_engine(config("d", settings), model=discriminator, optimizer=adam) as d,
    ):
        ones, zeros = g.move((torch.ones(BATCH, 1), torch.zeros(BATCH, 1)))
        while g.steps_taken < g.max_steps and not g.should_stop():
            seed = g.steps_taken * g.world_size + g.rank  # so that a resume draws the same
            draw = torch.Generator().manual_seed(seed)
            real = d.move(images[torch.randint(len(images), (BATCH,), generator=draw)])
            fake = g(g.move(torch.randn(BATCH, NOISE, generator=draw)))
            d_loss = bce(d(real), ones) + bce(d(fake.detach()), zeros)
            d.backward(d_loss)
            d.step()
            g_loss = bce(d(fake), ones)  # through the discriminator, which gets no gradient of it
            g.backward(g_loss)
            g.step()
            losses.append((d_loss.item(), g_loss.item()))
            if g.steps_taken % 20 == 0:
                g.log({"train/d_loss": losses[-1][0], "train/g_loss": losses[-1][1]})
    return losses


if __name__ == "__main__":
    main(checkpoint={"resume": "auto"})
