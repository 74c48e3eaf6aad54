"""What makes a run's optimizer and schedule where the config names no built-in one."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from framework.config.optimizer import Muon, optimizer_lr
from framework.config.run_config import RunConfig
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError
from framework.setup.user_code import (
    MakeOptimizer,
    check_arguments,
    check_handed_over,
    load_target,
    type_name,
)
from framework.setup.user_code_errors import call_failed


def checked_optimizer_maker(config: RunConfig, handed_over: Any) -> MakeOptimizer | None:
    """Return the function that makes the optimizer handed over, or else the config's; None for
    built-in kinds but Muon. An optimizer of the user's own is tried.

    Raises:
        ConfigError: it cannot be made, or cannot be trained with.
    """
    if handed_over is not None:
        make: MakeOptimizer | None = handed_over_optimizer(handed_over)
        key = "optimizer"
        value = type_name(handed_over)
    else:
        make = optimizer_maker(config)
        key = "optimizer.target"
        value = getattr(config.optimizer, "target", "")
    if make is None or isinstance(config.optimizer, Muon):
        return make
    from framework.setup.optimizer_probe import check_optimizer

    size = config.parallel.tensor
    check_optimizer(make, stage=config.zero.stage, key=key, value=value, tensor=size)
    return make


def optimizer_maker(config: RunConfig) -> MakeOptimizer | None:
    """Return the function that makes Muon or the optimizer of a target, or None for other built-in
    kinds. Raises ConfigError if the target cannot be called.
    """
    section = config.optimizer
    if isinstance(section, Muon):
        from framework.engine.parameter_groups import MuonWithAdamW

        has_shares = config.zero.stage > 0 or config.parallel.tensor > 1
        return partial(MuonWithAdamW, section=section, has_shares=has_shares)
    factory = section.own_factory()
    if factory is None:
        return None
    make = load_target(factory.path, key="optimizer.target")
    check_arguments(make, factory.kwargs, key="optimizer", positional=1)

    def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        try:
            optimizer = make(parameters, **factory.kwargs)
        except (Exception, SystemExit) as error:
            raise call_failed(error, factory.path, key="optimizer") from error
        return _checked_optimizer(optimizer, key="optimizer.target", value=factory.path)

    return _with_names_if_wanted(make, make_optimizer)


def handed_over_optimizer(make: Any) -> MakeOptimizer:
    """Return a function that makes an optimizer with `make` and checks it. Raises ConfigError if
    `make` cannot be called with parameters alone.
    """
    fix = (
        "hand over a function from parameters to an optimizer, such as "
        "functools.partial(torch.optim.SGD, lr=0.1)"
    )
    if not callable(make):
        if isinstance(make, torch.optim.Optimizer):
            reason = "it is built already, over parameters that are yet to move to their device"
        else:
            reason = "it cannot be called"
        if len(getattr(make, "param_groups", ())) > 1:
            fix += (
                "; groups by name go into the config: optimizer: {kind: adamw, groups: "
                "[{match: '.*bias', weight_decay: 0}]}, or are made by a function whose argument "
                "is called named_parameters"
            )
        raise ConfigError.of("optimizer-target-result", reason, fix, "optimizer", type_name(make))
    check_handed_over(make, key="optimizer", call="(parameters)", num_values=1, fix=fix)

    def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        return _checked_optimizer(make(parameters), key="optimizer", value=type_name(make))

    return _with_names_if_wanted(make, make_optimizer)


def _with_names_if_wanted(function: Any, make: MakeOptimizer) -> MakeOptimizer:
    """Return `make`, which calls the user's function, or `NamedMaker` of it if the first argument
    of the function is called ``named_parameters``.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # some builtins have none
        return make
    if names[:1] != ["named_parameters"]:
        return make
    from framework.engine.optimizer_weights import NamedMaker

    return NamedMaker(make)


def _checked_optimizer(optimizer: Any, *, key: str, value: str) -> torch.optim.Optimizer:
    """Return the optimizer, made savable. Raises ConfigError if it is none, or needs a closure."""
    if isinstance(optimizer, torch.optim.Optimizer):
        from framework.setup.user_optimizer import refuse_closure, savable

        refuse_closure(optimizer, key=key, value=value)
        return savable(optimizer, key=key, value=value)
    reason = f"it returned {type_name(optimizer)}, not a torch.optim.Optimizer"
    fix = "return an optimizer over the given parameters"
    raise ConfigError.of("optimizer-target-result", reason, fix, key, value)


def schedule_maker(
    config: RunConfig, handed_over: MakeSchedule | None, make_optimizer: MakeOptimizer | None
) -> MakeSchedule | None:
    """Return the user's own schedule, tried over an optimizer of one weight, or None if the config
    names a built-in one.
    """
    section = config.scheduler
    make = handed_over
    key = "scheduler"
    path = type_name(handed_over)
    factory = section.own_factory()
    if factory is not None:
        target = load_target(factory.path, key="scheduler.target")
        check_arguments(target, factory.kwargs, key="scheduler", positional=1)
        make = partial(target, **factory.kwargs)
        key = "scheduler.target"
        path = factory.path
    if make is None:
        return None
    from framework.setup.user_optimizer import check_schedule

    weights = [torch.nn.Parameter(torch.zeros(1))]
    lr = optimizer_lr(config.optimizer) or 1.0
    if make_optimizer is not None:
        optimizer = make_optimizer(weights)
    elif hasattr(config.optimizer, "betas"):
        optimizer = torch.optim.AdamW(weights, lr=lr)
    else:
        optimizer = torch.optim.SGD(weights, lr=lr)
    check_schedule(make, optimizer, key=key, value=path)
    return make
