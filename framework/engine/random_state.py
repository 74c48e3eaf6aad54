"""Random generators: seeded per rank, saved and put back so that a resumed run draws the same
numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from framework.errors import TrainingError


def seed_everything(seed: int) -> None:
    """Seed torch (host and device), numpy and Python."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def seed_ranks(seed: int, *, rank: int, step: int) -> None:
    """Seed this rank: other dropout masks on every rank, and where the states of the ranks are not
    resumed.
    """
    seed_everything(seed_of(seed, rank=rank, step=step))


def seed_of(seed: int, *, rank: int, step: int) -> int:
    """A seed of its own for every rank, and for every step at which a run goes on without the
    states that it had there.

    Seeded as at the first step, a model would draw the dropout masks of the first steps once more.
    Neighbouring seeds have nothing in common.
    """
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])


_PYTHON: Final = ("version", ">i8"), ("words", ">u4", (625,)), ("gauss", ">f8")
_NUMPY: Final = (
    ("keys", ">u4", (624,)),
    ("position", ">i8"),
    ("has_gauss", ">i8"),
    ("cached_gauss", ">f8"),
)
_HOST: Final = np.dtype([("python", [*_PYTHON]), ("numpy", [*_NUMPY])])
_MERSENNE: Final = "MT19937"


def capture() -> torch.Tensor:
    """State of every generator of this process: bytes, uint8, equally many on every rank of a job.

    A thousand ranks' states go into one file: as numbers of Python each would be 15 kB and 1,900
    objects.
    """
    version, words, gauss = random.getstate()
    name, *of_numpy = np.random.get_state()
    if name != _MERSENNE:
        raise TrainingError(
            f"numpy's global generator is {name}, whose state cannot be saved [generator-unknown]"
        )
    host = np.array(
        ((version, words, math.nan if gauss is None else gauss), tuple(of_numpy)), dtype=_HOST
    )
    parts = [torch.frombuffer(bytearray(host.tobytes()), dtype=torch.uint8), torch.get_rng_state()]
    if get_accelerator()._name != "cpu":
        parts.append(get_accelerator().get_rng_state().cpu())
    return torch.cat(parts)


def restore(state: torch.Tensor | Mapping[str, Any]) -> None:
    """Put back what `capture` returned, or the dict of plain values that older checkpoints hold."""
    if isinstance(state, Mapping):
        _restore_dict(state)
        return
    host = np.frombuffer(state[: _HOST.itemsize].numpy().tobytes(), dtype=_HOST)[0]
    python = host["python"]
    of_numpy = host["numpy"]
    if math.isnan(python["gauss"]):
        gauss = None
    else:
        gauss = float(python["gauss"])
    random.setstate((int(python["version"]), tuple(python["words"].tolist()), gauss))
    keys = of_numpy["keys"].astype(np.uint32)
    rest = int(of_numpy["position"]), int(of_numpy["has_gauss"]), float(of_numpy["cached_gauss"])
    np.random.set_state((_MERSENNE, keys, *rest))
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[_HOST.itemsize : _HOST.itemsize + size].clone())
    of_device = state[_HOST.itemsize + size :]
    if len(of_device) and get_accelerator()._name != "cpu":
        get_accelerator().set_rng_state(of_device.clone())


def _restore_dict(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "device" in state and get_accelerator()._name != "cpu":
        get_accelerator().set_rng_state(state["device"].cpu())
