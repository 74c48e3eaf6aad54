"""Checks of the user's own optimizer and schedule: their states, a step as DeepSpeed takes it, and
the memory of the optimizer.
"""

from __future__ import annotations

import inspect
import io
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.engine.initialize import MakeOptimizer
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError, in_one_line
from framework.plan.optimizer_state import OptimizerState
from framework.setup.user_code import type_name

_OF_SCHEDULES: Final = ("step", "get_last_lr", "state_dict", "load_state_dict")
_MEASURED: Final = 1 << 16  # elements of the weight that the memory is measured with


def savable(optimizer: torch.optim.Optimizer, *, key: str, value: str) -> torch.optim.Optimizer:
    """Return the optimizer with Python's numbers in the place of numpy's in its groups.

    A checkpoint is read as weights and plain values only. Any other value would be written without
    an error, and the first run to resume would fail.

    Args:
        optimizer: as it was just made, before a schedule remembers its rates.
        key: of the config, for the problem.
        value: at that key.

    Raises:
        ConfigError: kind ``optimizer-group-object``: a group holds a value that cannot be read back
            from a checkpoint.
    """
    for group in optimizer.param_groups:
        names = [name for name in group if name != "params"]
        for name in names:
            original = group[name]
            group[name] = _plain(original)
            if not _comes_back(group[name]):
                reason = (
                    f"its parameter groups hold {name}, {type_name(original)}, which no "
                    "checkpoint could give back"
                )
                fix = "keep only numbers, text, tensors and lists of them there"
                raise ConfigError.of("optimizer-group-object", reason, fix, key, value)
    return optimizer


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _comes_back(value: Any, *, map_location: Any = "cpu") -> bool:
    """Return whether a checkpoint that holds the value can be read; `map_location` as for
    `torch.load`.
    """
    # type() and not isinstance(): an enumeration is a number, too, and does not come back
    if value is None or type(value) in (bool, int, float, str):
        return True
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, map_location=map_location, weights_only=True)
    except Exception:  # pickling calls code of the value's class
        return False
    return True


def refuse_unreadable_state(optimizer: torch.optim.Optimizer, *, key: str, value: str) -> None:
    """Refuse an optimizer with state of its weights that no checkpoint would give back, such as the
    tensors of a class of their own in which torchao keeps 8 bits: torch cannot read them as weights
    that are put on a device (torch/serialization.py, `_load`).

    Args:
        optimizer: after a step.
        key: of the config, for the problem.
        value: at that key.

    Raises:
        ConfigError: kind ``optimizer-group-object``.
    """
    for state in optimizer.state.values():
        for name, kept in state.items():
            if _comes_back(kept, map_location=lambda storage, _: storage):
                continue
            reason = (
                f"its state of a weight holds {name}, {type_name(kept)}, which no checkpoint "
                "could give back"
            )
            fix = "take optimizer.kind: adamw_8bit, or adamw with precision.states: bf16"
            raise ConfigError.of("optimizer-group-object", reason, fix, key, value)


def check_schedule(
    make: MakeSchedule, optimizer: torch.optim.Optimizer, *, key: str, value: str
) -> None:
    """Refuse a schedule that DeepSpeed cannot step, or that no checkpoint would give back.

    Raises:
        ConfigError: kind ``schedule-target-result``.
    """
    try:
        schedule = make(optimizer)
    except (Exception, SystemExit) as error:
        reason = f"calling it with an optimizer failed: {in_one_line(error)}"
        fix = "check its arguments and the code"
        raise ConfigError.of("schedule-target-result", reason, fix, key, value) from error
    fix = (
        "return what has torch's LRScheduler as a base, or step(), get_last_lr(), state_dict() "
        "and load_state_dict()"
    )
    missing = [name for name in _OF_SCHEDULES if not callable(getattr(schedule, name, None))]
    if missing:
        reason = f"it returned {type_name(schedule)}, which has no {missing[0]}()"
    elif isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        reason = "its step needs a metric"
        fix = "use the callback reduce_on_plateau"
    elif not _comes_back(schedule.state_dict()):
        reason = "its state_dict() holds what no checkpoint could give back"
        fix = "keep only numbers, text, tensors and lists of them there"
    else:
        return
    raise ConfigError.of("schedule-target-result", reason, fix, key, value)


def refuse_closure(optimizer: torch.optim.Optimizer, *, key: str, value: str) -> None:
    """Refuse an optimizer if its `step` requires arguments: DeepSpeed calls it without any.

    Raises:
        ConfigError: kind ``optimizer-needs-closure``.
    """
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise _needs_closure(key, value) from error
    except ValueError:  # a builtin without a signature
        return


def _needs_closure(key: str, value: str) -> ConfigError:
    reason = (
        "its step() asks for a closure that computes the loss anew, and DeepSpeed steps without one"
    )
    return ConfigError.of(
        "optimizer-needs-closure", reason, "take another optimizer, such as adamw", key, value
    )


class NotJudgedError(Exception):
    """No copy of the optimizer can be made or stepped here."""


def _not_judged(error: Exception) -> NotJudgedError:
    return NotJudgedError(f"{type(error).__name__}: {error}"[:120])


def take_step(optimizer: torch.optim.Optimizer, *, key: str, value: str) -> None:
    """Step an optimizer as DeepSpeed does.

    Raises:
        NotJudgedError: the step fails.
        ConfigError: kind ``optimizer-needs-closure``: it fails only without a closure.
    """
    try:
        optimizer.step()
    except Exception as error:
        if _takes_closure(optimizer):
            raise _needs_closure(key, value) from error
        raise _not_judged(error) from error


def made_optimizer(
    make: MakeOptimizer, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer over these weights.

    Raises:
        NotJudgedError: it cannot be made, or holds other weights.
        ConfigError: raised by `make`.
    """
    try:
        optimizer = make(parameters)
    except ConfigError as error:
        if any(problem.kind != "target-failed" for problem in error.problems):
            raise
        raise NotJudgedError(str(error.__cause__)[:120]) from error
    except Exception as error:
        raise _not_judged(error) from error
    held: list[int] = []
    for group in optimizer.param_groups:
        held += [id(parameter) for parameter in group["params"]]
    # others may be the model's own weights, which no step may touch
    if sorted(held) != sorted(map(id, parameters)):
        raise NotJudgedError("it holds other weights than it was given")
    return optimizer


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step succeeds with a closure, having failed without."""
    try:
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    except Exception:  # the user's code may raise anything
        return False
    return True


def measure_optimizer(make: MakeOptimizer) -> OptimizerState | str:
    """Measure the memory of an optimizer on the CPU, in bytes for each number of a weight: its
    state after a step, and temporary bytes of the next step. Returns the reason instead if it
    cannot be stepped.
    """
    try:
        return _memory_of(make)
    except NotJudgedError as error:
        return f"its optimizer cannot be stepped here: {error}"
    except ConfigError as error:
        return f"its optimizer cannot be stepped here: {in_one_line(error)}"


def _memory_of(make: MakeOptimizer) -> OptimizerState:
    weight = torch.nn.Parameter(torch.zeros(_MEASURED))
    optimizer = made_optimizer(make, [weight])
    counter = _NewBytes()  # type: ignore[no-untyped-call]
    try:
        for _ in range(2):
            weight.grad = torch.ones(_MEASURED)
            with counter:
                optimizer.step()
    except Exception as error:
        raise _not_judged(error) from error
    size_by_storage: dict[int, int] = {}
    for tensor in _tensors(list(optimizer.state.values())):
        if tensor.numel() > 1:  # single numbers, such as the step, do not grow with the weight
            storage = tensor.untyped_storage()
            size_by_storage[storage.data_ptr()] = storage.nbytes()
    state_bytes = sum(size_by_storage.values())
    return OptimizerState(state_bytes / _MEASURED, round(counter.peak_bytes / _MEASURED))


class _NewBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations of the last step allocate: those alive, and
    their peak.
    """

    def __enter__(self) -> Any:
        self.live_bytes = 0
        self.peak_bytes = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._drop, storage.nbytes()).atexit = False
        return result

    def _drop(self, size: int) -> None:
        self.live_bytes -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
