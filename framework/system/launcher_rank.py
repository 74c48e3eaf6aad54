"""The rank that an MPI launcher or `srun` gave this process, where one of them started it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

# One of these is set in every process of such a launcher (`mpi_launchers.py` has the others).
RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "PMI_RANK",
    "SLURM_PROCID",
)


def take_rank(environment: MutableMapping[str, str]) -> None:
    """Set torch's variables of this process from the variables of an MPI launcher.

    A process that is alone, or has a rank from torchrun or the like, keeps its variables.

    Raises:
        ConfigError: kind ``rendezvous-environment``: variables contradict each other, or the
            address where ranks meet is missing.
    """
    if any(environment.get(name) for name in RANK_VARIABLES):
        from framework.system.mpi_launchers import take_launched_rank

        take_launched_rank(environment)
