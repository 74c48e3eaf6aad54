"""Batches, and what a task holds, on their way to the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence

from framework.models.adapt import channels_last
from framework.tasks.task import Task

_IMAGE_DIMENSIONS: Final = 4
_TENSORS: Final = (torch.Tensor, PackedSequence)
HALF: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class DeviceBatches:
    """Moves tensors anywhere in a batch.

    Attributes:
        device: where to.
        half: dtype of the weights if it is not float32; floating tensors that the model reads are converted to it.
        channels_last: store images (4-d floating tensors) that the model reads channel by channel last.
    """

    device: torch.device
    half: torch.dtype | None = None
    channels_last: bool = False

    def split(self, task: Task, batch: Any) -> tuple[Any, Any]:
        """Split a batch into the model's inputs and the targets, both on the device.

        A target keeps its digits: in half precision 300,123 would be 301,056, or infinite, in loss and metrics.
        """
        inputs, targets = task.split(self.move(batch))
        return self.as_read(inputs), targets

    def move(self, value: Any) -> Any:
        """The same batch on the device. Does not wait for it."""
        return _changed(value, self._moved)

    def as_read(self, inputs: Any) -> Any:
        """The same inputs in the type and the layout that the model wants."""
        return _changed(inputs, self._converted) if self.half is not None or self.channels_last else inputs

    def _moved(self, value: Any) -> Any:
        if isinstance(value, _TENSORS):
            return value.to(self.device, non_blocking=True)  # type: ignore[arg-type]  # PackedSequence's knows one overload
        return value.to(self.device) if callable(getattr(value, "to", None)) else value

    def _converted(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value.to(self.half) if self.half is not None and value.data.is_floating_point() else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        converted = value.to(self.half or value.dtype)
        return channels_last(converted) if self.channels_last and value.ndim == _IMAGE_DIMENSIONS else converted


def place(task: Task, device: torch.device) -> None:
    """Move what a task holds to the device: tensors, modules, and those that a `functools.partial` was given.

    A task is no module, and so nothing else would: class weights would stay on the CPU, where a GPU cannot read them.
    """
    if isinstance(task, torch.nn.Module):
        task.to(device)
        return
    for name, value in list(getattr(task, "__dict__", {}).items()):
        placed = _placed(value, device)
        if placed is not value:
            object.__setattr__(task, name, placed)


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, partial):
        func, args, keywords = (_placed(part, device) for part in (value.func, value.args, value.keywords))
        return partial(func, *args, **keywords)
    if type(value) in (list, tuple):
        return type(value)(_placed(item, device) for item in value)
    if type(value) is dict:
        return {key: _placed(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor | torch.nn.Module) else value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to what is in containers; a `PackedSequence`, though a tuple by its type, is one thing."""
    if isinstance(value, _TENSORS):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type) and not callable(getattr(value, "to", None)):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, _changed(getattr(value, field.name), change))
        return changed
    return change(value)
