"""A loss function, or a module that is one, as a task."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, Final, cast

from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
)

from framework.errors import ConfigError
from framework.tasks.loss_checks import refuse_summed
from framework.tasks.task import Ratio, Task, in_float32, rows_with_target

_CROSS_ENTROPY_OPTIONS: Final = frozenset(
    {"weight", "ignore_index", "reduction", "label_smoothing"}
)
_BINARY_LOSSES: Final = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
)


def as_task(obj: object, *, handed_over: bool = False) -> Task:
    """Return the task of an object from a user's `task.target` or from `fit`: a `Task`, or a
    callable ``loss(outputs, targets)``.

    Args:
        obj: the object. A callable (a function, or a module such as `nn.MSELoss()`) gets
            floating-point outputs in float32 and returns the mean over the batch as a 0-d tensor;
            the evaluation metric is that loss. torch's cross-entropy, which leaves out ignored
            targets, is weighted by the others (`Task.count`).
        handed_over: it came from Python, as the argument `task`, which error messages then name.

    Returns:
        The task itself, or one around the callable.

    Raises:
        ConfigError: kind ``task-target-result`` if it is neither, or a class that was not called;
            kind ``task-loss-parameters`` if it is a module with parameters, which no optimizer
            would ever update; kind ``task-loss-result`` if it is set to return a sum.
    """
    if isinstance(obj, Task):
        return obj
    if handed_over:
        key = "task"
        was = "handed over"
        give = "hand over"
    else:
        key = "task.target"
        was = "returned"
        give = "return"

    def refuse(reason: str, fix: str, *, kind: str = "task-target-result") -> ConfigError:
        return ConfigError.of(kind, reason, fix, key)

    if isinstance(obj, type):
        raise refuse(
            f"the class {obj.__module__}.{obj.__qualname__} was {was}", f"{give} an instance"
        )
    if not callable(obj):
        if obj is None:
            name = "None"
        else:
            name = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
        raise refuse(f"{name} was {was}", f"{give} a Task or a callable loss(outputs, targets)")
    if isinstance(obj, nn.Module) and any(True for _ in obj.parameters()):
        reason = (
            f"the loss {type(obj).__qualname__} has parameters, and the optimizer updates "
            "the model's only"
        )
        raise refuse(reason, "make it a part of the model", kind="task-loss-parameters")
    refuse_summed(obj, key=key)
    class_loss = _class_loss_of(obj)
    if class_loss is None:
        return _CallableTask(obj, key=key)
    return _ClassLossTask(class_loss)


def _class_loss_of(obj: object) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """Return torch's loss of classes that a callable stands for, or None.

    That is an instance of one of the classes, or `cross_entropy`, alone or in a `partial` with
    options. None also where it is set to something other than the mean.
    """
    function = obj
    options: dict[str, Any] = {}
    if isinstance(obj, partial):
        function = obj.func
        if not obj.args:
            options = obj.keywords
    if function is cross_entropy and options.keys() <= _CROSS_ENTROPY_OPTIONS:
        function = nn.CrossEntropyLoss(**options)
        options = {}
    # Not `isinstance`: a subclass may compute something else.
    if type(function) not in (nn.CrossEntropyLoss, nn.NLLLoss):
        return None
    class_loss = cast(nn.CrossEntropyLoss, function)
    if class_loss.reduction != "mean" or options:
        return None
    return class_loss


class _ClassLossTask(Task):
    """Minimises torch's loss of class numbers, or of probabilities, as a sum and the count by which
    the mean divides it.
    """

    def __init__(self, function: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._shown = type(function).__name__
        self.function = copy(function)
        self.function.reduction = "sum"

    def shown_name(self) -> str:
        return self._shown

    def loss(self, outputs: Any, targets: Any) -> Ratio:
        return Ratio(self.function(in_float32(outputs), targets), self.count(targets))

    def predicted(self, outputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Return scores (samples, classes) and targets (samples,) without those left out."""
        if targets.is_floating_point():
            return super().predicted(outputs, targets)
        return rows_with_target(outputs.movedim(1, -1), targets, self.function.ignore_index)

    def count(self, targets: Tensor) -> Tensor | int:
        if targets.is_floating_point():  # probabilities: (classes,) or (batch, classes, ...)
            return targets.numel() // targets.shape[min(1, targets.ndim - 1)]
        counts = targets != self.function.ignore_index
        if self.function.weight is None:
            return counts.sum()
        # an ignored target, which may be no class, is looked up as class 0 and not counted
        return self.function.weight[targets * counts].mul(counts).sum()


class _CallableTask(Task):
    def __init__(self, function: Callable[[Any, Any], Any], *, key: str) -> None:
        self.function = function
        self._key = key

    def predicted(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return predictions and targets; targets of a loss of yes and no as whole numbers, which
        metrics of classes take.
        """
        predictions, truth = super().predicted(outputs, targets)
        function = self.function
        if isinstance(function, partial):
            function = function.func
        is_binary = function in _BINARY_LOSSES or type(function) in _BINARY_LOSSES
        if is_binary and isinstance(truth, Tensor):
            truth = truth.long()
        return predictions, truth

    def shown_name(self) -> str:
        function = self.function
        if isinstance(function, partial):
            function = function.func
        return getattr(function, "__name__", type(function).__name__)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        loss = self.function(in_float32(outputs), targets)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            if isinstance(loss, Tensor):
                result = f"a tensor of shape {tuple(loss.shape)}"
            else:
                result = f"a {type(loss).__name__}"
            reason = (
                f"the loss function returned {result}, not the mean over the batch as a 0-d tensor"
            )
            fix = "return loss.mean(), or leave reduction='none' out"
            raise ConfigError.of("task-loss-result", reason, fix, self._key)
        return loss.float()
