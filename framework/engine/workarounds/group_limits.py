"""The time limit of collectives in the groups that DeepSpeed makes: for ZeRO, pipelines, experts
and tensor parts.

DeepSpeed up to 0.19.8 gives DEEPSPEED_TIMEOUT to the first group alone (comm/torch.py `new_group`
names none), and the others have torch's own limits: with gloo a rank that hangs was found after
half an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed
from deepspeed.comm.torch import TorchBackend


def limit_of_ranks() -> timedelta | None:
    """Return the limit of the group of all ranks, or None if its backend names none: torch's own is
    as good then.
    """
    group = torch.distributed.group.WORLD
    assert group is not None, "DeepSpeed makes groups of ranks that have met"
    for kind in group._device_types:
        # a kind of device that this machine does not have
        with suppress(RuntimeError, AttributeError):
            limit: timedelta = group._get_backend(kind).options._timeout
            return limit
    return None


@contextmanager
def limiting_groups() -> Iterator[None]:
    """Give groups that DeepSpeed makes within the block the limit of the group of all ranks."""
    make = TorchBackend.new_group

    def new_group(backend: Any, ranks: Any) -> Any:
        return torch.distributed.new_group(ranks, timeout=limit_of_ranks())

    TorchBackend.new_group = new_group
    try:
        yield
    finally:
        TorchBackend.new_group = make
