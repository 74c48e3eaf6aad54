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
    """Seed this rank, so that dropout masks differ between ranks, and after a resume without saved
    states.
    """
    seed_everything(seed_of(seed, rank=rank, step=step))


def seed_of(seed: int, *, rank: int, step: int) -> int:
    """Return a seed of its own for every rank, and for every step at which a run goes on without
    the states that it had there.

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
_HOST: Final = np.dtype([("python", list(_PYTHON)), ("numpy", list(_NUMPY))])
_MERSENNE: Final = "MT19937"


def capture() -> torch.Tensor:
    """Return the state of every generator of this process: bytes, uint8, equally many on every rank
    of a job.

    A thousand ranks' states go into one file: as numbers of Python each would be 15 kB and 1,900
    objects.

    Raises:
        TrainingError: kind ``generator-unknown``: numpy's generator is not its default one.
    """
    version, words, gauss = random.getstate()
    if gauss is None:
        gauss = math.nan
    name, *numpy_state = np.random.get_state()
    if name != _MERSENNE:
        raise TrainingError(
            f"numpy's global generator is {name}, whose state cannot be saved [generator-unknown]"
        )
    host = np.array(((version, words, gauss), tuple(numpy_state)), dtype=_HOST)
    parts = [torch.frombuffer(bytearray(host.tobytes()), dtype=torch.uint8), torch.get_rng_state()]
    if get_accelerator()._name != "cpu":
        parts.append(get_accelerator().get_rng_state().cpu())
    return torch.cat(parts)


def restore(state: torch.Tensor | Mapping[str, Any]) -> None:
    """Put back what `capture` returned, or the dict of plain values that older checkpoints hold."""
    if isinstance(state, Mapping):
        _restore_dict(state)
        return
    host_bytes = state[: _HOST.itemsize]
    host = np.frombuffer(host_bytes.numpy().tobytes(), dtype=_HOST)[0]
    _restore_python(host["python"])
    _restore_numpy(host["numpy"])
    device_start = _HOST.itemsize + len(torch.get_rng_state())
    torch.set_rng_state(state[_HOST.itemsize : device_start].clone())
    device_state = state[device_start:]
    if len(device_state) and get_accelerator()._name != "cpu":
        get_accelerator().set_rng_state(device_state.clone())


def _restore_python(state: Any) -> None:
    gauss = None
    if not math.isnan(state["gauss"]):
        gauss = float(state["gauss"])
    random.setstate((int(state["version"]), tuple(state["words"].tolist()), gauss))


def _restore_numpy(state: Any) -> None:
    keys = state["keys"].astype(np.uint32)
    position = int(state["position"])
    has_gauss = int(state["has_gauss"])
    cached_gauss = float(state["cached_gauss"])
    np.random.set_state((_MERSENNE, keys, position, has_gauss, cached_gauss))


def _restore_dict(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "device" in state and get_accelerator()._name != "cpu":
        get_accelerator().set_rng_state(state["device"].cpu())
