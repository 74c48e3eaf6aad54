"""Batches of a step: their way to the device, and their loss, which does not depend on how they are
divided over micro-batches and ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any, Final, Protocol

import torch
import torch.distributed
from torch.nn.utils.rnn import PackedSequence

from framework.data.batches import Pixels
from framework.errors import ConfigError
from framework.tasks.loss_checks import refuse_first_sum
from framework.tasks.task import Positions, Ratio, Task

_IMAGE_DIMENSIONS: Final = 4
_TENSORS: Final = (torch.Tensor, PackedSequence)
HALF: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Streams(Protocol):
    """Two streams of a device: one that copies, and the one that computes."""

    def copy(self, value: Any) -> Any:
        """Put the copy of a tensor of the host on the copying stream, and return its result, which
        holds the values once that stream is there.
        """
        ...

    def mark(self) -> Any:
        """Return an event after all copies so far."""
        ...

    def wait(self, event: Any) -> None:
        """Have the computing stream, and not the host, wait for an event."""
        ...

    def keep(self, value: Any) -> None:
        """Keep the memory of a copy from the copying stream until all that the computing stream
        has got by the time of its release is done.
        """
        ...


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of a device; None for a device that copies in the order of its work, as a
    processor does.
    """
    if device.type != "cuda":
        return None
    from framework.engine.copies_ahead import CudaStreams

    return CudaStreams(device)


@dataclass(frozen=True)
class CopiedBatch:
    """A batch on its way to the device.

    Attributes:
        batch: its tensors are on the device once `copied` has passed; all else is as it was.
        tensors: the copies in it.
        copied: event after them.
    """

    batch: Any
    tensors: tuple[Any, ...]
    copied: Any


@dataclass(frozen=True)
class DeviceBatches:
    """Moves tensors anywhere in a batch to the device.

    Attributes:
        device: the device.
        half: dtype of the weights if it is not float32; floating tensors that the model reads are
            converted to it.
        channels_last: store images (4-d floating tensors) that the model reads channel by channel
            last.
        positions: this rank's part of every sequence, where ranks share them.
        streams: a stream for copies beside the computing one; None: copies are on that one.
    """

    device: torch.device
    half: torch.dtype | None = None
    channels_last: bool = False
    positions: Positions | None = None
    streams: Streams | None = None

    def split(self, task: Task, batch: Any) -> tuple[Any, Any]:
        """Split a batch into the model's inputs and the targets, both on the device.

        A target keeps its digits: in half precision 300,123 would be 301,056, or infinite, in loss
        and metrics.
        """
        if not isinstance(batch, CopiedBatch):
            batch = self.on_host(task, batch)
        inputs, targets = task.split(self.move(batch))
        if self.positions is not None:
            inputs, targets = task.share(inputs, targets, self.positions)
        return self.as_read(inputs), targets

    def on_host(self, task: Task, batch: Any) -> Any:
        """Return a batch as it is copied, after the task's work on the host. A task of that kind
        gets images as a dataset's samples are.
        """
        if type(task).on_host is not Task.on_host:
            batch = changed(batch, _as_samples)
        return task.on_host(batch)

    def move(self, value: Any) -> Any:
        """Return the same batch on the device, without waiting for it."""
        if self.streams is not None:
            copied = value
            if not isinstance(value, CopiedBatch):
                copied = self.begin(value)
            self.streams.wait(copied.copied)
            for tensor in copied.tensors:
                self.streams.keep(tensor)
            value = copied.batch
        return changed(value, self._moved)

    def begin(self, batch: Any) -> CopiedBatch:
        """Begin to copy the tensors of a batch on the copying stream; `move` ends it.

        What moves itself, and what is no dense tensor, is left to `move`: its memory could not be
        kept from the copying stream. So are tensors of a device, which the computing stream may
        still write.
        """
        streams = self.streams
        assert streams is not None
        copies: list[torch.Tensor] = []

        def copy(value: Any) -> Any:
            if isinstance(value, Pixels):
                return Pixels(copy(value.images), value.normalise)
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                return value
            if value.device.type != "cpu":
                return value
            copied: torch.Tensor = with_notes(streams.copy(value), value)
            copies.append(copied)
            return copied

        moved = changed(batch, copy)
        return CopiedBatch(moved, tuple(copies), streams.mark())

    def as_read(self, inputs: Any) -> Any:
        """Return the same inputs in the type and the layout that the model reads."""
        if self.half is not None or self.channels_last:
            return changed(inputs, self._converted)
        return inputs

    def _moved(self, value: Any) -> Any:
        if isinstance(value, _TENSORS):
            # PackedSequence's `to` is typed with one overload only.
            moved = value.to(self.device, non_blocking=True)  # type: ignore[arg-type]
            return with_notes(moved, value)
        if isinstance(value, Pixels):
            return value.to(self.device).normalised()
        if callable(getattr(value, "to", None)):
            return value.to(self.device)
        return value

    def _converted(self, value: Any) -> Any:
        """Return a value of the inputs in the type and layout that the model reads."""
        if isinstance(value, PackedSequence):
            if self.half is not None and value.data.is_floating_point():
                return value.to(self.half)
            return value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        converted = value.to(self.half or value.dtype)
        if self.channels_last and value.ndim == _IMAGE_DIMENSIONS:
            from framework.models.formats import channels_last

            return channels_last(converted)
        return converted


def with_notes(moved: Any, value: Any) -> Any:
    """Return the copy of a tensor, with the texts that a task has noted on the tensor
    (`framework.models.packed_attention.note_texts`).
    """
    texts = getattr(value, "noted_texts", None)
    if texts is not None:
        moved.noted_texts = texts
    return moved


def _as_samples(value: Any) -> Any:
    """Return images as float32; all else as it is."""
    if isinstance(value, Pixels):
        return value.normalised()
    return value


def place(task: Task, device: torch.device) -> None:
    """Move tensors and modules that a task holds to the device, also those in a
    `functools.partial`.

    A task is no module: without this, class weights would stay on the CPU, where a GPU cannot read
    them.
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
        function = _placed(value.func, device)
        arguments = _placed(value.args, device)
        keywords = _placed(value.keywords, device)
        return partial(function, *arguments, **keywords)
    if type(value) in (list, tuple):
        return type(value)(_placed(item, device) for item in value)
    if type(value) is dict:
        return {key: _placed(item, device) for key, item in value.items()}
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return value.to(device)
    return value


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with `change` applied to everything that is no container: mappings, lists,
    tuples and dataclasses are containers, a `PackedSequence` is none.
    """
    if isinstance(value, _TENSORS):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(item, change) for item in value)
    if _is_record(value):
        other = copy.copy(value)
        for field in fields(value):
            object.__setattr__(other, field.name, changed(getattr(value, field.name), change))
        return other
    return change(value)


def _is_record(value: Any) -> bool:
    """Check whether a value is a dataclass that does not move itself to a device."""
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return not callable(getattr(value, "to", None))


_NOTHING: Final = 1e-30  # less than any count, and its reciprocal a float


class CountedSums(Protocol):
    """What divides gradients by the count of all ranks when they are summed: `GradientSums`, or at
    ZeRO 1 and 2 `FlatStep`, where these attributes are described.
    """

    ranks: int
    device: torch.device
    divisor: float
    factor: torch.Tensor | float

    def count(self, number: torch.Tensor) -> None:
        """Add the count of a micro-batch, 0-d float32 on the device."""
        ...


class StepLoss:
    """Losses of a step's micro-batches, weighted so that DeepSpeed's mean over micro-batches and
    ranks is the sum of the whole step divided by its count.

    DeepSpeed divides every loss by the number of micro-batches and averages over ranks. So a sum is
    multiplied by micro-batches x ranks / count of the whole step, and this count has to be known
    before the first backward pass. If `CountedSums` divide the gradients by the count, the sum is
    multiplied by a number that is known.
    """

    def __init__(
        self, task: Task, *, micro_batches: int, group: Any = None, sums: CountedSums | None = None
    ) -> None:
        """Prepare the first step.

        Args:
            task: computes the losses.
            micro_batches: how many a step has on this rank.
            group: process group with the ranks that average their losses; None for all.
            sums: divides gradients by counts, if that is possible.
        """
        self._task = task
        self._micro_batches = micro_batches
        self._group = group
        self._sums = sums
        self._dividing: CountedSums | None = None  # divides this step's gradients by the count
        self._has_one_count: bool | None = None  # the task's, not none or several; None: not asked
        self._is_checked = False
        # Returns one factor for each sum of a loss, once the ranks' counts are there; None for a
        # task that counts nothing.
        self._scales: Callable[[], Sequence[torch.Tensor | float]] | None = None

    def weighted(self, take: Callable[[], tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the step's (inputs, targets), once the ranks have agreed on the counts. `take`
        reads the next micro-batch.

        If the task counts nothing, or its count travels with the gradients, batches are read one by
        one, without a collective.
        """
        first = take()
        num_following = self._micro_batches - 1
        self._dividing = self._dividing_sums(first[1])
        if self._dividing is not None:  # by `Ratio.count`: no need to count twice
            scale = self._micro_batches * self._dividing.ranks / self._dividing.divisor
            self._scales = lambda: (scale,)
            yield first
            for _ in range(num_following):
                yield take()
            return
        count = self._task.count(first[1])
        if count is None:
            self._scales = None
            yield first
            for _ in range(num_following):
                yield take()
            return
        following = [take() for _ in range(num_following)]
        counts: list[Any] = [count]
        counts += [self._task.count(targets) for _, targets in following]
        self._scales = self._agree(counts)
        yield first
        yield from following

    def _dividing_sums(self, targets: Any) -> CountedSums | None:
        """Return the sums that divide by the count when the gradients are there, if each sample has
        one target and the task counts one number, which is nearly known then; else None.
        """
        if self._sums is None or not isinstance(targets, torch.Tensor) or targets.ndim != 1:
            return None
        if self._has_one_count is None:
            self._has_one_count = isinstance(self._task.count(targets), torch.Tensor | int)
        if not self._has_one_count:
            return None
        return self._sums

    def mean(self, total: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that computes this rank's loss of the step from `total`, the sum over
        its micro-batches. The mean over ranks is the loss of the step.
        """
        mean = total
        if self._micro_batches > 1:
            mean = total / self._micro_batches
        if self._dividing is None:
            return lambda: mean
        factor = self._dividing.factor
        ranks = self._dividing.ranks
        return lambda: mean * (factor * ranks)

    def _agree(self, counts: list[Any]) -> Callable[[], Sequence[torch.Tensor]]:
        """Begin to add the counts of all ranks. The function that is returned waits for the sums,
        when the first loss is there.
        """
        device = _device_of(counts)
        summands = [
            torch.stack([_as_float32(part, device) for part in _parts(count)]) for count in counts
        ]
        sums = summands[0]
        if len(summands) > 1:
            sums = torch.stack(summands).sum(0)
        ranks = torch.distributed.get_world_size(self._group)
        adding: Any = None
        if ranks > 1:
            adding = torch.distributed.all_reduce(sums, group=self._group, async_op=True)

        @cache
        def scales() -> Sequence[torch.Tensor]:
            if adding is not None:
                adding.wait()
            # If nothing counts, the sums are zero as well, and so is the loss.
            return (float(self._micro_batches * ranks) / sums.clamp(min=_NOTHING)).unbind()

        return scales

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, 0-d, on the device.

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
        ratios = _parts(loss)
        scales: Sequence[torch.Tensor | float] = ()
        if self._scales is not None:
            scales = self._scales()
        if len(ratios) != len(scales) or not all(isinstance(ratio, Ratio) for ratio in ratios):
            raise self._refusal()
        if self._dividing is not None:
            self._dividing.count(_as_float32(ratios[0].count, self._dividing.device))
        pairs = zip(ratios, scales, strict=True)
        losses: list[torch.Tensor] = [ratio.total.float() * scale for ratio, scale in pairs]
        if len(losses) == 1:
            return losses[0]
        return torch.stack(losses).sum()

    def _refusal(self) -> ConfigError:
        if self._scales is None:
            reason = (
                "loss() returned a framework.Ratio, and there is no count(), which a step "
                "needs before it begins"
            )
        else:
            reason = (
                "count() says what a sum is divided by, and loss() returned no "
                "framework.Ratio for each number of it"
            )
        fix = (
            "return Ratio(sum, count) from loss(outputs, targets), and the same count from "
            "count(targets)"
        )
        return ConfigError.of("task-loss-result", reason, fix, "task", type(self._task).__name__)


def loss_of_one_batch(task: Task, outputs: Any, targets: Any) -> torch.Tensor:
    """Return the loss of a batch by itself, 0-d: the mean of what it counts."""
    means: list[torch.Tensor] = []
    for part in _parts(task.loss(outputs, targets)):
        if isinstance(part, Ratio):
            means.append(part.total / _as_float32(part.count, part.total.device).clamp(min=1.0))
        else:
            means.append(part)
    if len(means) == 1:
        return means[0]
    return torch.stack(means).sum()


def _device_of(counts: Sequence[Any]) -> torch.device | None:
    """Return the device of the first count that is a tensor, or None."""
    for count in counts:
        for part in _parts(count):
            if torch.is_tensor(part):
                device: torch.device = part.device
                return device
    return None


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return (value,)


def _as_float32(part: Any, device: torch.device | None) -> torch.Tensor:
    """Return a count as float32, 0-d. A number is filled in on the device: copying it from the host
    would wait for the device.
    """
    if isinstance(part, torch.Tensor):
        return part.to(device, torch.float32)
    return torch.full((), float(part), device=device)
