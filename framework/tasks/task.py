"""`Task`: the base class of tasks, which give a batch its meaning; a user may write others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from framework.errors import ConfigError

_LABELS: Final = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Ratio:
    """A metric or a loss as total / count. Totals and counts are summed over batches and ranks
    before the division, so that the quotient is exact.

    Attributes:
        total: 0-d tensor. A metric's is detached and float64, so that sums over many batches keep
            their digits; a loss's is float32 and differentiable.
        count: the divisor, usually the number of samples: an int, or a 0-d tensor where only the
            device knows it.
    """

    total: Tensor
    count: Tensor | int

    @property
    def value(self) -> Tensor:
        """The quotient; NaN if the count is 0."""
        return self.total / self.count


@dataclass(frozen=True)
class Positions:
    """Part of every sequence that this rank sees, with ``parallel.sequence``: part `rank` of `size`
    equal parts, in order.
    """

    rank: int
    size: int

    def of(self, tensor: Tensor, *, fill: int | None = None, dim: int = 1) -> Tensor:
        """Take this rank's part, along `dim`, of a tensor that all ranks have alike.

        `whole` makes the tensor longer first where its positions do not divide.
        """
        return self.whole(tensor, fill=fill, dim=dim).chunk(self.size, dim)[self.rank]

    def whole(self, tensor: Tensor, *, fill: int | None = None, dim: int = 1) -> Tensor:
        """Add positions with the value `fill` at the end until they divide by the number of parts.

        Raises:
            ConfigError: kind ``sequence-not-divisible``: they do not divide, and `fill` is None.
        """
        length = tensor.shape[dim]
        shape = list(tensor.shape)
        missing = -length % self.size
        if not missing:
            return tensor
        if fill is None:
            reason = f"sequences of {length} positions cannot be shared evenly"
            fix = (
                f"pad them to a multiple of {self.size}, or give Positions.of a value to fill "
                "up with"
            )
            raise ConfigError.of(
                "sequence-not-divisible", reason, fix, "parallel.sequence", self.size
            )
        shape[dim] = missing
        return torch.cat((tensor, tensor.new_full(shape, fill)), dim)


class Task(ABC):
    """Subclass it and write `loss`; override the rest where a batch is not a pair (inputs,
    targets).

    Nothing here may wait for the device (`.item()`, `bool(tensor)`, printing a tensor): it would
    stall every step.
    """

    added_metrics: Any = None
    """Metrics of torchmetrics that evaluation updates (`evaluation.metrics`), by name; None: none.
    """

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Divide a collated batch into what the model reads and what the loss compares with.

        Args:
            batch: from the loader; by default a sequence with the targets as its last element, or
                a mapping with ``labels`` (or ``label``, ``target``, ``targets``) and inputs,
                each by the name of an argument.

        Returns:
            (inputs, targets); with more than two elements the inputs are a tuple of all but the
            last.

        Raises:
            ConfigError: kind ``task-batch``, for anything else: override `split` then.
        """
        if isinstance(batch, Mapping) and len(batch) > 1:
            for name in _LABELS:
                if name in batch:
                    inputs = {key: value for key, value in batch.items() if key != name}
                    return inputs, batch[name]
        is_row = isinstance(batch, Sequence) and not isinstance(batch, str | bytes)
        if not is_row or len(batch) < 2:
            size = f" of {len(batch)}" if is_row else ""
            raise ConfigError.of(
                "task-batch",
                f"the data yields a {type(batch).__name__}{size} per batch, and the task can "
                "divide only (inputs, ..., targets), and mappings with labels",
                f"{self._fix_of(batch)}write a Task subclass that overrides split(batch) -> "
                "(inputs, targets), and name it in task.target",
                "task",
                self.shown_name(),
            )
        if len(batch) == 2:
            return (batch[0], batch[1])
        return (tuple(batch[:-1]), batch[-1])

    def on_host(self, batch: Any) -> Any:
        """Return a collated batch as it is moved to the device; by default as it is."""
        return batch

    def shown_name(self) -> str:
        """Return the name of the task in error messages: the class's, or the loss function's."""
        return type(self).__name__

    @staticmethod
    def _fix_of(batch: Any) -> str:
        """Return how a fix begins for a mapping without known targets; empty for other batches."""
        if not isinstance(batch, Mapping):
            return ""
        keys = ", ".join(str(key) for key in batch)
        return (
            f"give the targets one of the keys {', '.join(_LABELS)} (they are {keys}), set task: "
            "{kind: model_loss, labels: ...} where the model returns its loss, or "
        )

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model with the inputs.

        A tuple is passed as positional arguments, a mapping as keyword arguments, anything else as
        one argument.
        """
        if isinstance(inputs, tuple):
            return model(*inputs)
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(inputs)

    def share(self, inputs: Any, targets: Any, positions: Positions) -> tuple[Any, Any]:
        """Take this rank's part of the positions of a batch, where ranks share every sequence
        (``parallel.sequence``).

        A mask that attention reads stays whole; targets that belong to no position count on one
        rank only. Where ranks count different numbers of positions, the loss must be a `Ratio`.

        Args:
            inputs: the first part of `split`, of whole sequences.
            targets: the second part.
            positions: its method `of` takes the part of a tensor.

        Raises:
            ConfigError: kind ``task-has-no-positions``, unless a subclass overrides it.
        """
        raise ConfigError.of(
            "task-has-no-positions",
            "it is not known which dimension of its batches are positions",
            "override Task.share(inputs, targets, positions), or set parallel.sequence: 1",
            "task",
            type(self).__name__,
        )

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor | Ratio | tuple[Ratio, ...]:
        """Compute the loss that training minimises.

        Args:
            outputs: the model's, in the precision in which it ran.
            targets: the second part of `split`.

        Returns:
            0-d float32 tensor, the mean over the samples of the batch, differentiable. Convert
            low-precision outputs with ``.float()`` first: a mean over bfloat16 keeps three digits.

            Where batches count different numbers of positions (padding, ignored labels), a mean of
            their means would depend on how the samples fall into micro-batches: return ``Ratio(sum,
            count)`` and write `count` too. The loss of a step is then the sum over all its
            micro-batches and ranks, divided by the count of all. The quotients of several `Ratio`s
            in a tuple are added.
        """

    def count(self, targets: Any) -> Tensor | int | tuple[Tensor | int, ...] | None:
        """Return the divisor of a loss of sums, from the targets alone.

        It is called before the model has run.

        Args:
            targets: as for `loss`.

        Returns:
            The count of the `Ratio` that `loss` returns, or a tuple of them; None where `loss`
            returns a mean, on every batch alike.
        """
        return None

    def measure(self, outputs: Any, targets: Any) -> dict[str, Ratio]:
        """Compute the metrics that evaluation reports of one batch, called without gradients.

        Args:
            outputs: as for `loss`.
            targets: as for `loss`.

        Returns:
            Metric name -> `Ratio`; "loss" must be among them, or come from `derive`. By default it
            is the only one: a loss of sums as it is, a mean weighted by `num_samples`. Each of
            several sums is a metric of its own, "loss_1", "loss_2", ...
        """
        loss = self.loss(outputs, targets)
        if isinstance(loss, Tensor):
            loss = Ratio(loss * self.num_samples(targets), self.num_samples(targets))
        if isinstance(loss, Ratio):
            return {"loss": Ratio(loss.total.detach().double(), loss.count)}
        return {
            f"loss_{n}": Ratio(part.total.detach().double(), part.count)
            for n, part in enumerate(loss, start=1)
        }

    def derive(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Compute the metrics that are no ratio of sums (perplexity), once, from the others.

        Args:
            metrics: the metrics of `measure`, over all batches and ranks.

        Returns:
            Further metrics by name; one of the same name replaces the measured one. By default the
            "loss" of several sums.
        """
        parts = [value for name, value in metrics.items() if name.startswith("loss_")]
        if parts and "loss" not in metrics:
            return {"loss": sum(parts)}
        return {}

    def collect(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Return what `finish` needs of every sample of an evaluation batch, called without
        gradients.

        Override it together with `finish`, for metrics that are no ratios of sums. It is gathered
        in the memory of rank 0's host: collect little of each sample.

        Args:
            outputs: as for `loss`.
            targets: as for `loss`.

        Returns:
            Name -> a tensor or an array (samples, ...), with ``parallel.sequence`` (samples,
            positions, ...), or a list with an object for each
            sample: text, or tensors of unlike shapes.
        """
        return {}

    def finish(self, everything: Mapping[str, Any]) -> Mapping[str, Any]:
        """Compute metrics over all samples, once, on rank 0.

        Args:
            everything: what `collect` returned of all batches and ranks, each sample once, in the
                order of the data: tensors on the host, and lists.

        Returns:
            Metric name -> a number, which every rank then has; or a matrix of numbers, which is
            written to ``tables.json`` of the run folder.
        """
        return {}

    def predicted(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return what metrics of torchmetrics are updated with: predictions and targets.

        By default outputs in float32, of transformers' models the logits, and the targets.
        """
        return in_float32(getattr(outputs, "logits", outputs)), targets

    def num_samples(self, targets: Any) -> int:
        """Count the samples of a batch, from its targets.

        It is a tensor's first dimension; for a mapping or a sequence of tensors (several targets
        per sample) the first tensor's; otherwise `len`.
        """
        if isinstance(targets, Mapping):
            return self.num_samples(next(iter(targets.values())))
        if isinstance(targets, Sequence) and targets and isinstance(targets[0], Tensor):
            return self.num_samples(targets[0])
        return len(targets)


def targets_in(batch: Any) -> bool:
    """Check whether a collated batch has targets by which `Task.split` divides it."""
    if isinstance(batch, Mapping):
        return len(batch) > 1 and any(name in batch for name in _LABELS)
    return isinstance(batch, list | tuple) and len(batch) > 1


def collects(task: Any) -> bool:
    """Check whether a task has metrics that look at all samples together."""
    return getattr(type(task), "collect", Task.collect) is not Task.collect


def rows_with_target(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return scores (rows, classes) in float32 and targets (rows,) of all positions with a target
    that is not `ignore_index`. Waits for the device.

    Args:
        scores: (..., classes).
        targets: (...,) int64.
        ignore_index: the target that is left out.
    """
    has_target = targets != ignore_index
    return scores[has_target].float(), targets[has_target]


def in_float32(outputs: Any) -> Any:
    """Convert floating tensors to float32, also inside plain tuples, lists and dicts.

    Objects of other types are left alone.
    """
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            return outputs.float()
        return outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(map(in_float32, outputs))
    if type(outputs) is dict:
        return {name: in_float32(value) for name, value in outputs.items()}
    return outputs
