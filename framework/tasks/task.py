"""`Task`: the base class of what a batch means, for the tasks here and for a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from framework.errors import ConfigError
from framework.tasks.loss_checks import refuse_summed

_LABELS: Final = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Ratio:
    """A metric, or a loss, as total / count: summed over batches and ranks first and divided once,
    it is exact.

    Attributes:
        total: 0-d tensor; of a metric detached and float64, so that sums over many batches keep
            their digits; of a loss float32 and differentiable.
        count: what to divide by, usually the number of samples: an int, or a 0-d tensor where only
            the device knows it.
    """

    total: Tensor
    count: Tensor | int

    @property
    def value(self) -> Tensor:
        """The quotient; NaN where nothing counts."""
        return self.total / self.count


@dataclass(frozen=True)
class Positions:
    """Part of every sequence that this rank sees, with ``parallel.sequence``: `rank` of `size`
    equal ones, in order.
    """

    rank: int
    size: int

    def of(self, tensor: Tensor, *, fill: int | None = None, dim: int = 1) -> Tensor:
        """Take this part of a tensor that all ranks have alike, along `dim`; made longer by `whole`
        to divide.
        """
        return self.whole(tensor, fill=fill, dim=dim).chunk(self.size, dim)[self.rank]

    def whole(self, tensor: Tensor, *, fill: int | None = None, dim: int = 1) -> Tensor:
        """Add as many positions of the value `fill` at the end as it takes to divide.

        Raises:
            ConfigError: kind ``sequence-not-divisible``, where there is no such value.
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

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Divide a collated batch into what the model reads and what the loss compares with.

        Args:
            batch: what the loader yields; by default a sequence whose last element is the targets,
                or a mapping with ``labels`` (or ``label``, ``target``, ``targets``) and inputs,
                each by the name of an argument.

        Returns:
            (inputs, targets); with more than two elements the inputs are a tuple of all but the
            last.

        Raises:
            ConfigError: kind ``task-batch``, for anything else: override `split` then.
        """
        if isinstance(batch, Mapping):
            name = next((name for name in _LABELS if name in batch), None)
        else:
            name = None
        if name is not None and len(batch) > 1:
            return {key: value for key, value in batch.items() if key != name}, batch[name]
        is_row = isinstance(batch, Sequence) and not isinstance(batch, str | bytes)
        if not is_row or len(batch) < 2:
            if is_row:
                size = f" of {len(batch)}"
            else:
                size = ""
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

    def shown_name(self) -> str:
        """Return the name that problems have for it: that of the function, where it is one."""
        return type(self).__name__

    @staticmethod
    def _fix_of(batch: Any) -> str:
        if not isinstance(batch, Mapping):
            return ""
        keys = ", ".join(str(key) for key in batch)
        return (
            f"give the targets one of the keys {', '.join(_LABELS)} (they are {keys}), set task: "
            "{kind: model_loss, labels: ...} where the model returns its loss, or "
        )

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model: a tuple becomes positional arguments, a mapping keyword arguments, else
        there is one.
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
        rank only. The loss has to be a `Ratio`, where ranks count differently many positions.

        Args:
            inputs: the first part of `split`, of whole sequences.
            targets: the second part.
            positions: whose `of` takes the part of a tensor.

        Raises:
            ConfigError: kind ``task-has-no-positions``, unless a subclass overrides it.
        """
        raise ConfigError.of(
            "task-has-no-positions",
            "nobody knows which dimension of its batches are positions",
            "override Task.share(inputs, targets, positions), or set parallel.sequence: 1",
            "task",
            type(self).__name__,
        )

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor | Ratio | tuple[Ratio, ...]:
        """Compute the loss that training minimises.

        Args:
            outputs: what the model returned, in the precision it ran in.
            targets: the second part of `split`.

        Returns:
            0-d float32 tensor, the mean over the samples of the batch, differentiable. Convert
            low-precision outputs with ``.float()`` first: a mean over bfloat16 keeps three digits.

            Where batches count differently many positions (padding, ignored labels), a mean of
            their means would depend on how the samples fall into micro-batches: return ``Ratio(sum,
            count)`` and write `count` too. The loss of a step is then the sum over all its
            micro-batches and ranks over the count of all. Several of them, in a tuple, are added as
            quotients.
        """

    def count(self, targets: Any) -> Tensor | int | tuple[Tensor | int, ...] | None:
        """Count what a loss of sums is divided by, from the targets alone: asked before the model
        has run.

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
            Metric name -> `Ratio`; "loss" must be among them, or come from `derive`. By default
            only that: a loss of sums as it is, a mean weighted by `num_samples`. Of several sums
            each is a metric, "loss_1", "loss_2", ...
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
        """Metrics that are no ratio of sums (perplexity), computed once from those that are.

        Args:
            metrics: what `measure` reported, over all batches and ranks.

        Returns:
            Further metrics by name; one of the same name takes the place of the measured one. By
            default the "loss" of several sums.
        """
        parts = [value for name, value in metrics.items() if name.startswith("loss_")]
        if parts and "loss" not in metrics:
            return {"loss": sum(parts)}
        return {}

    def num_samples(self, targets: Any) -> int:
        """Count the samples of a batch, from its targets.

        A tensor's first dimension; for a mapping or a sequence of tensors (several targets per
        sample) that of the first one; otherwise `len`.
        """
        if isinstance(targets, Mapping):
            return self.num_samples(next(iter(targets.values())))
        if isinstance(targets, Sequence) and targets and isinstance(targets[0], Tensor):
            return self.num_samples(targets[0])
        return len(targets)


# A loss function as a task.


def as_task(obj: object, *, handed_over: bool = False) -> Task:
    """Accept what a user's `task.target` may return or `fit` be given: a `Task`, or a callable
    ``loss(outputs, targets)``.

    Args:
        obj: the object. A callable (a function, or a module such as `nn.MSELoss()`) gets
            floating-point outputs in float32 and returns the mean over the batch as a 0-d tensor;
            the evaluation metric is that loss. torch's cross-entropy, which leaves out ignored
            targets, is weighted by the others (`Task.count`).
        handed_over: it came from Python, as `task`; problems name that.

    Returns:
        The task itself, or one around the callable.

    Raises:
        ConfigError: kind ``task-target-result`` if it is neither, or a class that was not called;
            kind ``task-loss-parameters`` if it is a module with parameters, which no optimizer
            would ever update; kind ``task-loss-result`` if it is set to return a sum.
    """
    if isinstance(obj, Task):
        return obj
    key, was, give = (
        ("task", "handed over", "hand over")
        if handed_over
        else ("task.target", "returned", "return")
    )

    def refuse(reason: str, fix: str, *, kind: str = "task-target-result") -> ConfigError:
        return ConfigError.of(kind, reason, fix, key)

    if isinstance(obj, type):
        raise refuse(
            f"the class {obj.__module__}.{obj.__qualname__} was {was}", f"{give} an instance"
        )
    if not callable(obj):
        if obj is None:
            what = "None"
        else:
            what = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
        raise refuse(f"{what} was {was}", f"{give} a Task or a callable loss(outputs, targets)")
    if isinstance(obj, nn.Module) and any(True for _ in obj.parameters()):
        reason = (
            f"the loss {type(obj).__qualname__} has parameters, and the optimizer updates "
            "the model's only"
        )
        raise refuse(reason, "make it a part of the model", kind="task-loss-parameters")
    refuse_summed(obj, key=key)
    by_class = _class_loss_of(obj)
    if by_class is None:
        return _CallableTask(obj, key=key)
    return _ClassLossTask(by_class)


def _class_loss_of(obj: object) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """torch's loss of classes that a callable is, alone or with options; None where it is another
    or no mean.
    """
    if isinstance(obj, partial) and not obj.args:
        options = obj.keywords
    else:
        options = {}
    function = obj.func if isinstance(obj, partial) else obj
    if function is cross_entropy and not options.keys() - {
        "weight",
        "ignore_index",
        "reduction",
        "label_smoothing",
    }:
        function = nn.CrossEntropyLoss(**options)
        options = {}
    # A subclass may compute something else.
    is_mean = (
        type(function) in (nn.CrossEntropyLoss, nn.NLLLoss)
        and cast(nn.CrossEntropyLoss, function).reduction
    )
    if is_mean == "mean" and not options:
        return cast(nn.CrossEntropyLoss, function)
    return None


class _ClassLossTask(Task):
    """Minimises torch's loss of class numbers, or of probabilities, as the sum and the count that
    its mean is made of.
    """

    def __init__(self, function: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._shown = type(function).__name__
        self.function = copy(function)
        self.function.reduction = "sum"

    def shown_name(self) -> str:
        return self._shown

    def loss(self, outputs: Any, targets: Any) -> Ratio:
        return Ratio(self.function(_in_float32(outputs), targets), self.count(targets))

    def count(self, targets: Tensor) -> Tensor | int:
        if targets.is_floating_point():  # probabilities: (classes,) or (batch, classes, ...)
            return targets.numel() // targets.shape[min(1, targets.ndim - 1)]
        counts = targets != self.function.ignore_index
        if self.function.weight is None:
            return counts.sum()
        return self.function.weight[targets * counts].mul(counts).sum()


class _CallableTask(Task):
    def __init__(self, function: Callable[[Any, Any], Any], *, key: str) -> None:
        self.function = function
        self._key = key

    def shown_name(self) -> str:
        if isinstance(self.function, partial):
            function = self.function.func
        else:
            function = self.function
        return getattr(function, "__name__", type(function).__name__)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        loss = self.function(_in_float32(outputs), targets)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            if isinstance(loss, Tensor):
                what = f"a tensor of shape {tuple(loss.shape)}"
            else:
                what = f"a {type(loss).__name__}"
            reason = (
                f"the loss function returned {what}, not the mean over the batch as a 0-d tensor"
            )
            fix = "return loss.mean(), or leave reduction='none' out"
            raise ConfigError.of("task-loss-result", reason, fix, self._key)
        return loss.float()


def _in_float32(outputs: Any) -> Any:
    """Floating tensors as float32, inside plain tuples, lists and dicts too; objects of other types
    are left alone.
    """
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            return outputs.float()
        return outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(map(_in_float32, outputs))
    if type(outputs) is dict:
        return {name: _in_float32(value) for name, value in outputs.items()}
    return outputs
