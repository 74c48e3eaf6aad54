"""Batches of a step: on their way to the device, and their loss, over all that they count, however
they are divided over time and ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, Final

import torch
import torch.distributed
from torch.nn.utils.rnn import PackedSequence

from framework.engine.gradient_sums import GradientSums
from framework.errors import ConfigError
from framework.models.formats import channels_last
from framework.tasks.loss_checks import refuse_first_sum
from framework.tasks.model_loss import ModelLoss
from framework.tasks.task import Positions, Ratio, Task

_IMAGE_DIMENSIONS: Final = 4
_TENSORS: Final = (torch.Tensor, PackedSequence)
HALF: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class DeviceBatches:
    """Moves tensors anywhere in a batch.

    Attributes:
        device: where to.
        half: dtype of the weights if it is not float32; floating tensors that the model reads are
            converted to it.
        channels_last: store images (4-d floating tensors) that the model reads channel by channel
            last.
        positions: this rank's part of every sequence, where ranks share them.
    """

    device: torch.device
    half: torch.dtype | None = None
    channels_last: bool = False
    positions: Positions | None = None

    def split(self, task: Task, batch: Any) -> tuple[Any, Any]:
        """Split a batch into the model's inputs and the targets, both on the device.

        A target keeps its digits: in half precision 300,123 would be 301,056, or infinite, in loss
        and metrics.
        """
        if isinstance(task, ModelLoss):
            task.look_at(batch)
        inputs, targets = task.split(self.move(batch))
        if self.positions is not None:
            inputs, targets = task.share(inputs, targets, self.positions)
        return self.as_read(inputs), targets

    def move(self, value: Any) -> Any:
        """The same batch on the device. Does not wait for it."""
        return changed(value, self._moved)

    def as_read(self, inputs: Any) -> Any:
        """The same inputs in the type and the layout that the model wants."""
        if self.half is not None or self.channels_last:
            return changed(inputs, self._converted)
        return inputs

    def _moved(self, value: Any) -> Any:
        if isinstance(value, _TENSORS):
            return value.to(self.device, non_blocking=True)  # type: ignore[arg-type]  # PackedSequence's knows one overload
        if callable(getattr(value, "to", None)):
            return value.to(self.device)
        return value

    def _converted(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            if self.half is not None and value.data.is_floating_point():
                return value.to(self.half)
            return value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        converted = value.to(self.half or value.dtype)
        if self.channels_last and value.ndim == _IMAGE_DIMENSIONS:
            return channels_last(converted)
        return converted


def place(task: Task, device: torch.device) -> None:
    """Move what a task holds to the device: tensors, modules, and those that a `functools.partial`
    was given.

    A task is no module, and so nothing else would: class weights would stay on the CPU, where a GPU
    cannot read them.
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
        func, args, keywords = (
            _placed(part, device) for part in (value.func, value.args, value.keywords)
        )
        return partial(func, *args, **keywords)
    if type(value) in (list, tuple):
        return type(value)(_placed(item, device) for item in value)
    if type(value) is dict:
        return {key: _placed(item, device) for key, item in value.items()}
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return value.to(device)
    return value


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to what is in containers; a `PackedSequence`, though a tuple by its type, is
    one thing.
    """
    if isinstance(value, _TENSORS):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(item, change) for item in value)
    if (
        is_dataclass(value)
        and not isinstance(value, type)
        and not callable(getattr(value, "to", None))
    ):
        other = copy.copy(value)
        for field in fields(value):
            object.__setattr__(other, field.name, changed(getattr(value, field.name), change))
        return other
    return change(value)


_NOTHING: Final = 1e-30  # less than any count, and its reciprocal a float


class StepLoss:
    """Losses of a step's micro-batches, weighted so that DeepSpeed's mean over them and the ranks
    is sum over count.

    DeepSpeed divides every loss by the number of micro-batches and averages over ranks: a sum is
    multiplied by micro-batches x ranks / count of the whole step, which has to be known before the
    first backward pass; or, where `GradientSums` divides the gradients by the count, by a number
    that is known.
    """

    def __init__(
        self, task: Task, *, micro_batches: int, group: Any = None, sums: GradientSums | None = None
    ) -> None:
        """Take the number of micro-batches in a step, and the process group whose losses are
        averaged (None: all).
        """
        self._task = task
        self._micro_batches = micro_batches
        self._group = group
        self._sums = sums
        self._later: GradientSums | None = None  # divides this step's gradients
        self._has_one_count: bool | None = None  # on every batch alike
        self._is_checked = False
        # One factor for each sum of a loss, once the ranks' counts are there; None where the task
        # counts nothing.
        self._scales: Callable[[], Sequence[torch.Tensor | float]] | None = None

    def weighted(self, stream: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the step's (inputs, targets), once the ranks have agreed on what they count.

        Read one by one, and no collective, where the task counts nothing or its count travels with
        the gradients.
        """
        step = islice(stream, self._micro_batches)
        first = next(step)
        # One target for each sample: the count is nearly known, and may come when the gradients are
        # there.
        is_near = (
            self._sums is not None and isinstance(first[1], torch.Tensor) and first[1].ndim == 1
        )
        if is_near and self._has_one_count is None:
            self._has_one_count = isinstance(self._task.count(first[1]), torch.Tensor | int)
        self._later = self._sums if is_near and self._has_one_count else None
        if self._later is not None:  # by `Ratio.count`: no need to count twice
            scale = self._micro_batches * self._later.ranks / self._later.divisor
            self._scales = lambda: (scale,)
            yield first
        elif (count := self._task.count(first[1])) is None:
            self._scales = None
            yield first
        else:
            pairs = [first, *step]
            self._scales = self._agree(
                [count, *(self._task.count(targets) for _, targets in pairs[1:])]
            )
            yield from pairs
        yield from step

    def mean(self, total: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what computes this rank's loss of the step that was taken, of which the ranks'
        mean is the step's, from the sum over its micro-batches.
        """
        mean = total / self._micro_batches if self._micro_batches > 1 else total
        if self._later is None:
            return lambda: mean
        factor = self._later.factor
        ranks = self._later.ranks
        return lambda: mean * (factor * ranks)

    def _agree(self, counts: list[Any]) -> Callable[[], Sequence[torch.Tensor]]:
        """Begin to add what all ranks count; the result waits for it when the first loss is
        there.
        """
        device = next(
            (part.device for count in counts for part in _parts(count) if torch.is_tensor(part)),
            None,
        )
        summands = [
            torch.stack([_number(part, device) for part in _parts(count)]) for count in counts
        ]
        if len(summands) > 1:
            sums = torch.stack(summands).sum(0)
        else:
            sums = summands[0]
        ranks = torch.distributed.get_world_size(self._group)
        if ranks > 1:
            adding = torch.distributed.all_reduce(sums, group=self._group, async_op=True)
        else:
            adding = None

        @cache
        def scales() -> Sequence[torch.Tensor]:
            if adding is not None:
                adding.wait()
            # Where nothing counts the sums are zero as well, and so is the loss.
            return (float(self._micro_batches * ranks) / sums.clamp(min=_NOTHING)).unbind()

        return scales

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Loss of a micro-batch, 0-d, on the device.

        Raises:
            ConfigError: kind ``task-loss-result``, where `loss` and `count` of the task do not
                belong together, or the first loss is a sum over the batch.
        """
        loss = self._task.loss(outputs, targets)
        if not self._is_checked:
            self._is_checked = True
            refuse_first_sum(self._task, loss, outputs, targets)
        if self._scales is None and isinstance(loss, torch.Tensor):
            return loss
        sums = _parts(loss)
        scales = self._scales() if self._scales is not None else ()
        if len(sums) != len(scales) or not all(isinstance(ratio, Ratio) for ratio in sums):
            reason = (
                "loss() returned a framework.Ratio, and there is no count(), which a step "
                "needs before it begins"
            )
            if self._scales is not None:
                reason = (
                    "count() says what a sum is divided by, and loss() returned no "
                    "framework.Ratio for each number"
                )
                reason += " of it"
            fix = (
                "return Ratio(sum, count) from loss(outputs, targets), and the same count from "
                "count(targets)"
            )
            raise ConfigError.of("task-loss-result", reason, fix, "task", type(self._task).__name__)
        if self._later is not None:
            self._later.count(_number(sums[0].count, self._later.device))
        weighted = [ratio.total.float() * scale for ratio, scale in zip(sums, scales, strict=True)]
        return weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return (value,)


def _number(part: Any, device: torch.device | None) -> torch.Tensor:
    """As float32, filled in on the device: copying a number from the host would wait for it."""
    is_tensor = isinstance(part, torch.Tensor)
    return (
        part.to(device, torch.float32) if is_tensor else torch.full((), float(part), device=device)
    )
