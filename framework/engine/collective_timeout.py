"""Longer waits while a checkpoint is written: one rank may have more to write than the others, on a disk that is slow
today.

Elsewhere ranks wait for each other ten minutes (DEEPSPEED_TIMEOUT), and a collective that takes longer is one that
hangs. Those
of a save are given two hours: the others wait in DeepSpeed's last barrier while rank 0 writes what it writes for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from framework.engine.distributed import gather

_OF_A_SAVE: Final = timedelta(hours=2)


@contextmanager
def collective_timeout() -> Iterator[None]:
    """What ranks begin to wait for in this block may take longer; a group that waits longer anyway is left alone."""
    before = [(backend, backend.options._timeout) for backend in _backends() if backend.options._timeout < _OF_A_SAVE]
    for backend, _ in before:
        backend._set_default_timeout(_OF_A_SAVE)
    try:
        yield
    finally:
        for backend, limit in before:
            backend._set_default_timeout(limit)


def gather_from_disks(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, where one of them may be busy with files. Collective."""
    with collective_timeout():
        return gather(value)


def _backends() -> list[Any]:
    """Of all groups of this process: DeepSpeed waits in groups of its own as well."""
    found: dict[int, Any] = {}
    for group in torch.distributed.distributed_c10d._world.pg_map:
        for device in group._device_types:
            with suppress(RuntimeError):  # a kind of device that this machine does not have
                backend = group._get_backend(device)
                if hasattr(backend, "_set_default_timeout") and hasattr(getattr(backend, "options", None), "_timeout"):
                    found[id(backend)] = backend
    return list(found.values())
