"""Environment of the ranks: what a run needs and the user has not set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from framework.hosts.devices import usable_cores


def added_environment(
    environment: Mapping[str, str], *, device: str, num_ranks: int, threads: int | None = None
) -> dict[str, str]:
    """Return the variables that the run needs and the user has not set.

    Args:
        environment: of the user.
        device: kind of the devices.
        num_ranks: on this host.
        threads: of each rank that is bound to cores; None: an equal share of all.
    """
    added: dict[str, str] = {}
    programs = str(Path(sys.executable).parent)
    path = environment.get("PATH", "")
    if programs not in path.split(os.pathsep):
        # An environment that is not activated: torch calls `ninja` by name to compile DeepSpeed's
        # optimizers.
        added["PATH"] = os.pathsep.join(filter(None, [programs, path]))
    if device == "cpu" and not environment.get("DS_ACCELERATOR"):
        added["DS_ACCELERATOR"] = "cpu"
    if not environment.get("OMP_NUM_THREADS"):
        # Every rank would take every core, and they would wait for each other: with GPUs, in
        # offloaded optimizers.
        added["OMP_NUM_THREADS"] = str(threads or max(1, usable_cores() // num_ranks))
    if device == "cuda" and not _has_allocator_settings(environment):
        # Batches of evaluation have other sizes than batches of training: fixed segments would
        # become fragmented.
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return added


def _has_allocator_settings(environment: Mapping[str, str]) -> bool:
    old_name = environment.get("PYTORCH_CUDA_ALLOC_CONF")
    return bool(environment.get("PYTORCH_ALLOC_CONF", old_name))
