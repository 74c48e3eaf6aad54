"""A loss function as a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from framework.errors import ConfigError, Problem
from framework.tasks.task import Task


def as_task(obj: object, *, handed_over: bool = False) -> Task:
    """Accept what a user's `task.target` may return or `fit` be given: a `Task`, or a callable ``loss(outputs,
    targets)``.

    Args:
        obj: the object. A callable (a function, or a module such as `nn.CrossEntropyLoss()`) gets
            floating-point outputs in float32 and returns the mean over the batch as a 0-d tensor; the evaluation metric
            is that loss.
        handed_over: it came from Python, as `task`; problems name that.

    Returns:
        The task itself, or one around the callable.

    Raises:
        ConfigError: kind ``task-target-result`` if it is neither, or a class that was not called; kind
            ``task-loss-parameters`` if it is a module with parameters, which no optimizer would ever update.
    """
    if isinstance(obj, Task):
        return obj
    key, was, give = ("task", "handed over", "hand over") if handed_over else ("task.target", "returned", "return")

    def refuse(reason: str, fix: str, *, kind: str = "task-target-result") -> ConfigError:
        return ConfigError(Problem(kind=kind, key=key, reason=reason, fix=fix))

    if isinstance(obj, type):
        raise refuse(f"the class {obj.__module__}.{obj.__qualname__} was {was}", f"{give} an instance")
    if not callable(obj):
        what = "None" if obj is None else f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
        raise refuse(f"{what} was {was}", f"{give} a Task or a callable loss(outputs, targets)")
    if isinstance(obj, nn.Module) and any(True for _ in obj.parameters()):
        reason = f"the loss {type(obj).__qualname__} has parameters, and the optimizer updates the model's only"
        raise refuse(reason, "make it a part of the model", kind="task-loss-parameters")
    return _CallableTask(obj, key=key)


class _CallableTask(Task):
    """Minimises ``function(outputs, targets)``."""

    def __init__(self, function: Callable[[Any, Any], Any], *, key: str) -> None:
        self.function = function
        self._key = key

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        loss = self.function(_in_float32(outputs), targets)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise ConfigError(_not_a_loss(loss, key=self._key))
        return loss.float()


def _in_float32(outputs: Any) -> Any:
    """Floating tensors as float32, inside plain tuples, lists and dicts too; objects of other types are left alone."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(map(_in_float32, outputs))
    if type(outputs) is dict:
        return {name: _in_float32(value) for name, value in outputs.items()}
    return outputs


def _not_a_loss(loss: object, *, key: str) -> Problem:
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    return Problem(
        kind="task-loss-result",
        key=key,
        reason=f"the loss function returned {what}, not the mean over the batch as a 0-d tensor",
        fix="return loss.mean(), or leave reduction='none' out",
    )
