"""Copies of batches to a device, on a stream of their own beside the computing one, and the next
micro-batch ahead of its step.

On the computing stream a copy waits for all that was put there before it, and all that comes after
it waits for the copy. On a stream of its own it runs while the device computes. And a step that is
read at a logged point leaves the device with nothing to do: the batch of the next step is then
there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class CudaStreams:
    """The current stream of a CUDA device, and one of its own beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, value: Any) -> Any:
        with torch.cuda.stream(self._copying):
            return value.to(self._device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._copying)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, value: Any) -> None:
        # The allocator would hand the memory to the next copy as soon as Python drops the tensor,
        # while kernels that read it wait in the other stream.
        value.record_stream(torch.cuda.current_stream(self._device))


class BatchesAhead(Iterator[Any]):
    """Micro-batches on their way to the device; `fill` begins the next one early.

    An error of the next one is raised when that is taken: it belongs to the step that needs it.
    """

    def __init__(self, batches: Iterator[Any], begin: Callable[[Any], Any], *, count: int) -> None:
        """Take micro-batches of the host, the function that begins to copy one, and how many the
        run takes: `fill` reads no further.
        """
        self._batches = batches
        self._begin = begin
        self._left = count
        self._next: list[Any] = []  # one, or its error, or none

    def __next__(self) -> Any:
        if not self._next:
            return self._read()
        following = self._next.pop()
        if isinstance(following, Exception):
            raise following
        return following

    def fill(self) -> None:
        """Read the next micro-batch and begin to copy it, unless that is done, or was the last."""
        if self._next or self._left <= 0:
            return
        try:
            self._next.append(self._read())
        except Exception as error:
            self._next.append(error)

    def _read(self) -> Any:
        self._left -= 1
        return self._begin(next(self._batches))
