"""Batches on their way to a GPU: copied while it computes, and never overwritten while it reads."""

from __future__ import annotations

import time

import pytest
import torch

from framework.data.batches import Normalise, Pixels
from framework.engine.copies_ahead import BatchesAhead
from framework.engine.step_batches import DeviceBatches, streams_of
from framework.recipes.image_sets import image_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: copies beside its work not run",
    ),
]

_CYCLES = 200_000_000  # a tenth of a second or more
_NUMBERS = 1 << 22


def batches() -> DeviceBatches:
    device = torch.device("cuda", torch.cuda.current_device())
    return DeviceBatches(device, streams=streams_of(device))


def test_a_copy_ends_while_the_device_computes() -> None:
    moving = batches()
    batch = torch.arange(_NUMBERS).pin_memory()
    moving.move(moving.begin(batch))  # what is made once is made
    torch.cuda.synchronize()
    computed = torch.cuda.Event()
    torch.cuda._sleep(_CYCLES)
    computed.record()
    copied = moving.begin(batch)
    give_up_at = time.monotonic() + 10
    while not copied.copied.query() and time.monotonic() < give_up_at:
        pass
    assert not computed.query(), "the copy has waited for the computing stream"
    assert torch.equal(moving.move(copied).cpu(), batch)


@pytest.mark.parametrize("pinned", [True, False])
def test_memory_of_a_batch_is_not_reused_while_it_is_read(pinned: bool) -> None:
    moving = batches()
    sums = []

    def host_batches() -> object:
        for number in range(20):
            batch = torch.full((_NUMBERS,), number)
            yield batch.pin_memory() if pinned else batch

    ahead = BatchesAhead(host_batches(), moving.begin, count=20)  # type: ignore[arg-type]
    for _ in range(20):
        batch = moving.move(next(ahead))
        torch.cuda._sleep(_CYCLES // 10)  # the device is far behind the host
        sums.append(batch.sum())
        del batch
        ahead.fill()
    assert [int(each) for each in sums] == [number * _NUMBERS for number in range(20)]


@pytest.mark.parametrize(
    "normalise",
    [
        image_folder._NORMALISE,
        Normalise((0.0158, 0.0161, 0.0153), (-1.989, -1.984, -1.711)),
        Normalise((1 / 32, 1 / 32, 1 / 32), (-4.0, -4.0, -4.0)),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_pixel_is_normalised_to_the_bits_of_a_processor(
    normalise: Normalise, layout: torch.memory_format
) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    images = every.contiguous(memory_format=layout)
    moved = batches().move(Pixels(images.pin_memory(), normalise))
    assert moved.is_cuda
    assert torch.equal(moved.cpu(), normalise(images))
