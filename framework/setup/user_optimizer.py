"""The user's own optimizer and schedule: what their states hold, a step as DeepSpeed takes it, and
its memory.
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
from framework.plan.measured import OptimizerState
from framework.setup.user_code import type_name

_OF_SCHEDULES: Final = ("step", "get_last_lr", "state_dict", "load_state_dict")
_MEASURED: Final = 1 << 16  # elements of the weight that memory is counted for


def savable(optimizer: torch.optim.Optimizer, *, key: str, value: str) -> torch.optim.Optimizer:
    """The optimizer, its groups with Python's numbers for numpy's: a checkpoint is read as weights
    and plain values only.

    Args:
        optimizer: as it was just made, before a schedule remembers its rates.
        key: of the config, for the problem.
        value: at that key.

    Raises:
        ConfigError: kind ``optimizer-group-object``: a group holds something that no checkpoint
            would give back. It would be written into each of them, and the first to notice would be
            the run that is to go on.
    """
    for group in optimizer.param_groups:
        for name in [name for name in group if name != "params"]:
            held, group[name] = group[name], _plain(group[name])
            if not _comes_back(group[name]):
                reason = (
                    f"its parameter groups hold {name}, {type_name(held)}, which no "
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


def _comes_back(value: Any) -> bool:
    # an enumeration is more than the number that it is
    if value is None or type(value) in (bool, int, float, str):
        return True
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, map_location="cpu", weights_only=True)
    except Exception:  # whatever pickling or its refusal raises
        return False
    return True


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
    """Refuse an optimizer whose `step` asks for more than nothing: DeepSpeed calls it so.

    Raises:
        ConfigError: kind ``optimizer-needs-closure``.
    """
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise _needs_closure(key, value) from error
    except ValueError:  # no signature can be had
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
        NotJudgedError: it fails.
        ConfigError: kind ``optimizer-needs-closure``: it does not with a closure.
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
        NotJudgedError: it cannot be made, or holds others.
        ConfigError: what `make` refuses itself.
    """
    try:
        optimizer = make(parameters)
    except ConfigError as error:
        if any(problem.kind != "target-failed" for problem in error.problems):
            raise
        raise NotJudgedError(str(error.__cause__)[:120]) from error
    except Exception as error:
        raise _not_judged(error) from error
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    # the model's own, perhaps, which no step may touch
    if sorted(held) != sorted(map(id, parameters)):
        raise NotJudgedError("it holds other weights than it was given")
    return optimizer


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether a step succeeds with a closure, having failed without."""
    try:
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    except Exception:  # whatever its code raises
        return False
    return True


def measure_optimizer(make: MakeOptimizer) -> OptimizerState | str:
    """Measure what an optimizer keeps after a step, and makes within the next one, on processors;
    or say why not.
    """
    try:
        return _memory_of(make)
    except (ConfigError, NotJudgedError) as error:
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
    kept = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in tree_leaves(list(optimizer.state.values()))
        if isinstance(value, torch.Tensor) and value.numel() > 1
    }
    return OptimizerState(sum(kept.values()) / _MEASURED, round(counter.most / _MEASURED))


class _NewBytes(TorchDispatchMode):
    """Bytes of storages that operations make and let go of, at most, of the last step."""

    def __enter__(self) -> Any:
        self.now = self.most = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if (
                isinstance(leaf, torch.Tensor)
                and (storage := leaf.untyped_storage())._cdata not in known
            ):
                known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        return made

    def _gone(self, size: int) -> None:
        self.now -= size
