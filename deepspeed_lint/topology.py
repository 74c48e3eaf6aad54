"""`Target`: what a config is judged against, with the machines and kinds of GPU that it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from deepspeed_lint.errors import UsageError

if TYPE_CHECKING:
    from deepspeed_lint.readers import Reader

Device = Literal["cuda", "cpu", "npu", "xpu", "hpu", "mps", "unknown"]
_GPUS: Final = Path(__file__).parent / "tables/gpus.json"


@dataclass(frozen=True)
class GpuKind:
    """One kind of accelerator.

    Attributes:
        name: as ``--gpu`` takes it.
        memory_gib: memory of one device.
        fp16: DeepSpeed trains fp16 on it (``cuda_accelerator.is_fp16_supported``: capability 7 and
            newer).
        bf16: it computes bf16 itself; older CUDA devices emulate it.
        device: what torch calls its kind.
        capability: CUDA's compute capability; None: it is no GPU of NVIDIA.
    """

    name: str
    memory_gib: int
    fp16: bool = True
    bf16: bool = True
    device: Device = "cuda"
    capability: tuple[int, int] | None = None


@cache
def gpu_rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of `tables/gpus.json`: memory, CUDA's compute capability and what torch calls
    the kind of device.
    """
    rows: dict[str, Any] = json.loads(_GPUS.read_text(encoding="utf-8"))
    return rows


@cache
def gpu_kinds() -> Mapping[str, GpuKind]:
    """Return the kinds that ``--gpu`` takes, by name."""
    kinds = {}
    for name, row in gpu_rows().items():
        capability = tuple(row["capability"] or ())
        kinds[name] = GpuKind(
            name,
            row["memory_gib"],
            fp16=not capability or capability >= (7, 0),
            bf16=not capability or capability >= (8, 0),
            device=row["kind"],
            capability=capability or None,
        )
    return kinds


def find_gpu(name: str | None) -> GpuKind | None:
    """Return a kind by its name, such as ``h100-80gb``; None for None.

    Raises:
        UsageError: there is none of that name.
    """
    if name is None:
        return None
    from deepspeed_lint.text.typos import nearest

    kinds = gpu_kinds()
    wanted = name.lower()
    if wanted in kinds:
        return kinds[wanted]
    meant = nearest(wanted, kinds)
    if not meant:
        meant = next((known for known in kinds if known.startswith(wanted)), None)
    guess = f"did you mean {meant}? " if meant else ""
    raise UsageError(f"--gpu {name}: not known; {guess}known are {', '.join(kinds)}")


@dataclass(frozen=True)
class Topology:
    """Target that a config is to run on, as far as it is known.

    Attributes:
        world_size: ranks in all; None if not known.
        device: kind of device.
        gpu: which GPU, from ``--gpu``.
    """

    world_size: int | None = None
    device: Device = "unknown"
    gpu: GpuKind | None = None


@dataclass(frozen=True)
class Target:
    """What a DeepSpeed JSON is judged against.

    Attributes:
        release: DeepSpeed's version; None: the newest known.
        reader: the program that reads the file first; None: the file shows it.
        topology: where it is to run, as far as it is known.
    """

    release: str | None = None
    reader: Reader | None = None
    topology: Topology = field(default_factory=Topology)
