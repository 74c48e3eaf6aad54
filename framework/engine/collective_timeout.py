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

# Ranks wait for each other for ten minutes (DEEPSPEED_TIMEOUT), and a longer wait is a hang. While
# a checkpoint is written that is too short: the others wait in DeepSpeed's last barrier while rank
# 0 writes the files that it writes for all.
_OF_A_SAVE: Final = timedelta(hours=2)


@contextmanager
def collective_timeout() -> Iterator[None]:
    """Lengthen the timeout of collectives that begin in this block; a group with a longer timeout
    is left alone.
    """
    before: list[tuple[Any, timedelta]] = []
    for backend in _backends():
        limit = backend.options._timeout
        if limit < _OF_A_SAVE:
            before.append((backend, limit))
    for backend, _ in before:
        backend._set_default_timeout(_OF_A_SAVE)
    try:
        yield
    finally:
        for backend, limit in before:
            backend._set_default_timeout(limit)


def gather_from_disks(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks, while some may be busy with files.
    Collective.
    """
    with collective_timeout():
        return gather(value)


def _backends() -> list[Any]:
    """List the backends with a timeout, of all groups of this process: DeepSpeed waits in groups of
    its own as well.
    """
    backends: dict[int, Any] = {}
    for group in torch.distributed.distributed_c10d._world.pg_map:
        for kind in group._device_types:
            with suppress(RuntimeError):  # a kind of device that this machine does not have
                backend = group._get_backend(kind)
                backends[id(backend)] = backend
    return [backend for backend in backends.values() if _has_timeout(backend)]


def _has_timeout(backend: Any) -> bool:
    options = getattr(backend, "options", None)
    return hasattr(backend, "_set_default_timeout") and hasattr(options, "_timeout")
