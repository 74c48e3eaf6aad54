"""Streams of a device on a processor: a copy has its values only once they were waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class LateStreams:
    """Records the order of operations. A copy holds the lowest number of its type until the
    computing stream waits for an event behind it, as on a device that is slow to copy.
    """

    order: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    _pending: list[tuple[Any, Any]] = field(default_factory=list)
    _num_marks: int = 0

    def copy(self, value: Any) -> Any:
        self.order.append("copy")
        lowest: float = -1
        if value.dtype == torch.uint8:
            lowest = 0
        copied = torch.full_like(value, lowest)
        self._pending.append((copied, value))
        return copied

    def mark(self) -> int:
        self.order.append("mark")
        self._num_marks = len(self._pending)
        return self._num_marks

    def wait(self, event: int) -> None:
        self.order.append("wait")
        for copied, value in self._pending[:event]:
            copied.copy_(value)

    def keep(self, value: Any) -> None:
        self.kept.append(value.data_ptr())
