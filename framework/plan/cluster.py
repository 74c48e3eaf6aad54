"""`Cluster`: number and kind of devices. The other input of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from framework.errors import ConfigError, UsageError, counted

if TYPE_CHECKING:
    from deepspeed_lint.topology import GpuKind, Topology

Device = Literal["cuda", "cpu", "npu", "xpu", "hpu", "mps", "unknown"]
# torchrun's name first, then the DeepSpeed launcher's (deepspeed/launcher/launch.py).
_LOCAL_SIZE_VARIABLES: Final = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
# What `launch` takes without devices: enough to show that ranks work together, and no more than a
# laptop has cores.
RANKS_ON_CPU: Final = 2
# Set where the job was planned, above the launcher that counts the ranks.
PLANNED_VARIABLE: Final = "DSF_WORLD_SIZE"
# Names the device, as ``--gpu`` does, where this machine cannot: its driver has no nvidia-smi.
GPU_VARIABLE: Final = "DSF_GPU"


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same number of devices each; one rank drives one device.

    Attributes:
        num_hosts: machines.
        devices_per_host: devices (ranks) on each.
        device: kind of device, ``unknown`` when planning for a machine that is not at hand.
    """

    num_hosts: int = 1
    devices_per_host: int = 1
    device: Device = "unknown"

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise UsageError(
                f"a cluster needs a host and a device, not {self.num_hosts} x "
                f"{self.devices_per_host}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.devices_per_host

    @staticmethod
    def from_environment(environment: Mapping[str, str], *, device: Device = "unknown") -> Cluster:
        """Return the cluster that a launcher (deepspeed, torchrun, srun with exports) described to
        this process.

        Raises:
            UsageError: a variable is no positive whole number, or the ranks do not divide evenly
                over the hosts.
            ConfigError: it is not the cluster that the job was planned for (``DSF_WORLD_SIZE``).
        """
        world_size = _number(environment, "WORLD_SIZE", 1)
        planned = _number(environment, PLANNED_VARIABLE, world_size)
        if planned != world_size:
            raise ConfigError.of(
                "world-size-differs",
                f"the job was planned for {planned} ranks ({PLANNED_VARIABLE}), and the launcher "
                f"started {world_size}",
                "check that every node was given the same hostfile and that it can be read there: "
                "without one the deepspeed launcher lets each node train alone",
                key="WORLD_SIZE",
                value=world_size,
            )
        name = next((name for name in _LOCAL_SIZE_VARIABLES if name in environment), "")
        local = _number(environment, name, world_size)
        if local > world_size or world_size % local:
            raise UsageError(f"WORLD_SIZE={world_size} is not a multiple of {local} ranks per host")
        return Cluster(num_hosts=world_size // local, devices_per_host=local, device=device)

    def __str__(self) -> str:
        name = "device" if self.device == "unknown" else f"{self.device} device"
        devices = counted(self.devices_per_host, name)
        if self.num_hosts == 1:
            return devices
        return f"{self.num_hosts} hosts x {devices}"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable's positive whole number; raises UsageError if it is none."""
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"environment variable {name}={text}: not a positive whole number")
    return int(text)


def topology_of(cluster: Cluster, gpu: GpuKind | None = None) -> Topology:
    """Return the cluster, with a kind of GPU, as the linter of DeepSpeed JSON takes it."""
    from deepspeed_lint.topology import Topology

    device = cluster.device
    if gpu is not None:
        device = gpu.device
    return Topology(cluster.world_size, device, gpu)
