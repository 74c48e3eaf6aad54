"""Random generators: seeded per rank, saved and put back so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator


def seed_everything(seed: int) -> None:
    """Seed torch (host and device), numpy and Python."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def seed_ranks(seed: int, *, rank: int, step: int) -> None:
    """Seed this rank: other dropout masks on every rank, and where the states of the ranks are not resumed."""
    seed_everything(seed_of(seed, rank=rank, step=step))


def seed_of(seed: int, *, rank: int, step: int) -> int:
    """A seed of its own for every rank, and for every step at which a run goes on without the states that it had there.

    Seeded as at the first step, a model would draw the dropout masks of the first steps once more. Neighbouring seeds
    have nothing in common.
    """
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])


def capture() -> dict[str, Any]:
    """State of every generator of this process, as tensors and plain values only."""
    accelerator = get_accelerator()
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if accelerator._name != "cpu":
        state["device"] = accelerator.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "device" in state and get_accelerator()._name != "cpu":
        get_accelerator().set_rng_state(state["device"].cpu())
