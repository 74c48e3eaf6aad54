"""Buffers of a model (the running statistics of batch norm), made the same on all data-parallel
ranks.

DeepSpeed up to 0.19.8 broadcasts parameters only (runtime/engine.py `_broadcast_model`). Each
rank's own micro-batches move buffers apart, and a checkpoint holds those of the first rank. Made
equal before they are measured or saved, as torch's DistributedDataParallel does before every step,
what was measured is what stands in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import deepspeed
import torch
import torch.distributed

_BUCKET_BYTES: Final = 1 << 26


def share_buffers(engine: deepspeed.DeepSpeedEngine, *, unsaved: bool = False) -> None:
    """Give every rank the buffers that the first of its data-parallel group has, in place.
    Collective.

    Args:
        engine: its module holds a whole model, or a stage of a pipeline.
        unsaved: those as well that no checkpoint holds; they are made when the model is, and can be
            large (masks).
    """
    group = engine.data_parallel_group
    if torch.distributed.get_world_size(group) == 1:
        return
    first = torch.distributed.get_global_rank(group, 0)
    with torch.no_grad():
        for buffers in _buckets(_buffers(engine.module, unsaved=unsaved)):
            together = torch.cat(
                [
                    buffer.contiguous().view(-1).view(torch.uint8).to(engine.device)
                    for buffer in buffers
                ]
            )
            torch.distributed.broadcast(together, first, group=group)
            pieces = torch.split(together, [buffer.nbytes for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _buffers(module: torch.nn.Module, *, unsaved: bool) -> list[torch.Tensor]:
    """Each once; the widest numbers first, so that end to end all of them lie at multiples of their
    size.
    """
    found = {
        buffer: None
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
        and buffer.numel()
        and (unsaved or name not in part._non_persistent_buffers_set)
        and not _is_expanded(buffer)
    }
    return sorted(found, key=lambda buffer: -buffer.element_size())


def _is_expanded(buffer: torch.Tensor) -> bool:
    """One number seen in many places cannot be written to as many; it is the constant that the
    model was made with.
    """
    return any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )


def _buckets(buffers: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Few messages, and little memory for what is sent."""
    bucket: list[torch.Tensor] = []
    size = 0
    for buffer in buffers:
        if bucket and size + buffer.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = []
            size = 0
        bucket.append(buffer)
        size += buffer.nbytes
    if bucket:
        yield bucket
