"""The longer timeout of collectives while one rank is busy with files, as rank 0 is during a
save.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed

from framework.engine.distributed import gather

# Ranks wait for each other ten minutes (DEEPSPEED_TIMEOUT), and what takes longer hangs; not so
# while a checkpoint is written: the others wait in DeepSpeed's last barrier while rank 0 writes
# what it writes for all.
_OF_A_SAVE: Final = timedelta(hours=2)


@contextmanager
def collective_timeout() -> Iterator[None]:
    """Lengthen the timeout of collectives that begin in this block; a group with a longer timeout
    is left alone.
    """
    before = [
        (backend, backend.options._timeout)
        for backend in _backends()
        if backend.options._timeout < _OF_A_SAVE
    ]
    for backend, _ in before:
        backend._set_default_timeout(_OF_A_SAVE)
    try:
        yield
    finally:
        for backend, limit in before:
            backend._set_default_timeout(limit)


def gather_from_disks(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, where one of them may be busy with files.
    Collective.
    """
    with collective_timeout():
        return gather(value)


def _backends() -> list[Any]:
    """Of all groups of this process: DeepSpeed waits in groups of its own as well."""
    found: list[Any] = []
    for group in torch.distributed.distributed_c10d._world.pg_map:
        for kind in group._device_types:
            with suppress(RuntimeError):  # a kind of device that this machine does not have
                found.append(group._get_backend(kind))
    known = {id(backend): backend for backend in found if hasattr(backend, "_set_default_timeout")}
    return [
        backend
        for backend in known.values()
        if hasattr(getattr(backend, "options", None), "_timeout")
    ]
