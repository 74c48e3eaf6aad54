"""`Topology`: where a DeepSpeed JSON is to run, as the command line says it: how many ranks, on which devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from framework.plan.cluster import Cluster, Device


@dataclass(frozen=True)
class GpuKind:
    """One kind of accelerator.

    Attributes:
        name: as ``--gpu`` takes it.
        memory_gib: memory of one device.
        capability: CUDA compute capability, None where the word means nothing.
        fp16: DeepSpeed trains fp16 on it (``cuda_accelerator.is_fp16_supported``: capability 7 and newer).
        bf16: it computes bf16 itself; older CUDA devices emulate it.
        fp8: it has fp8 matrix units.
    """

    name: str
    memory_gib: int
    capability: tuple[int, int] | None = None
    fp16: bool = True
    bf16: bool = True
    fp8: bool = False


GPU_KINDS: Final[Mapping[str, GpuKind]] = {
    kind.name: kind
    for kind in (
        GpuKind("p100-16gb", 16, (6, 0), fp16=False, bf16=False),
        GpuKind("v100-16gb", 16, (7, 0), bf16=False),
        GpuKind("v100-32gb", 32, (7, 0), bf16=False),
        GpuKind("t4-16gb", 16, (7, 5), bf16=False),
        GpuKind("rtx2080ti-11gb", 11, (7, 5), bf16=False),
        GpuKind("a100-40gb", 40, (8, 0)),
        GpuKind("a100-80gb", 80, (8, 0)),
        GpuKind("a10g-24gb", 24, (8, 6)),
        GpuKind("a40-48gb", 48, (8, 6)),
        GpuKind("a6000-48gb", 48, (8, 6)),
        GpuKind("rtx3090-24gb", 24, (8, 6)),
        GpuKind("l4-24gb", 24, (8, 9), fp8=True),
        GpuKind("l40s-48gb", 48, (8, 9), fp8=True),
        GpuKind("rtx4090-24gb", 24, (8, 9), fp8=True),
        GpuKind("h100-80gb", 80, (9, 0), fp8=True),
        GpuKind("h200-141gb", 141, (9, 0), fp8=True),
        GpuKind("b200-180gb", 180, (10, 0), fp8=True),
        GpuKind("mi250x-64gb", 64),
        GpuKind("mi300x-192gb", 192, fp8=True),
    )
}


@dataclass(frozen=True)
class Topology:
    """Where a config is to run, as far as it was said.

    Attributes:
        world_size: ranks in all; None when nobody said.
        num_hosts: machines; None when nobody said.
        device: kind of device, as `Cluster` names it.
        gpu: which GPU, from ``--gpu``.
    """

    world_size: int | None = None
    num_hosts: int | None = None
    device: Device = "unknown"
    gpu: GpuKind | None = None

    @staticmethod
    def from_cluster(cluster: Cluster, gpu: GpuKind | None = None) -> Topology:
        """What a hostfile or ``--num_gpus`` says."""
        return Topology(cluster.world_size, cluster.num_hosts, "cuda" if gpu else cluster.device, gpu)
