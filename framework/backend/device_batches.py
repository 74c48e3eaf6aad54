"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from framework.models.adapt import channels_last

_IMAGE_DIMENSIONS: Final = 4
HALF: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class DeviceBatches:
    """Moves tensors anywhere in a batch.

    Attributes:
        device: where to.
        half: dtype of the weights if it is not float32; floating tensors are converted to it.
        channels_last: store images (4-d floating tensors) channel by channel last.
    """

    device: torch.device
    half: torch.dtype | None = None
    channels_last: bool = False

    def move(self, value: Any) -> Any:
        """The same batch on the device. Does not wait for it."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            return {key: self.move(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.move(item) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.move(item) for item in value)
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value.to(self.device, non_blocking=True)
        moved = value.to(self.device, self.half, non_blocking=True)
        return channels_last(moved) if self.channels_last and value.ndim == _IMAGE_DIMENSIONS else moved
