"""Parameters of optimizers and schedules: which class stands behind a type, and what torch's own classes take.

DeepSpeed picks the class by type, offload and `torch_adam`, and hands it all parameters as keywords: one that the class
does not know, or one that is missing, is a TypeError at `deepspeed.initialize`. The key table has the parameters of
DeepSpeed's own types; those of torch's classes stand in `torch_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from framework.dslint.facts import DEEPSPEED_OPTIMIZERS, Facts
from framework.dslint.keys import Key
from framework.dslint.torch_parameters import (
    MOMENTUM_SCHEDULES,
    NEEDED,
    OPTIMIZERS,
    SCHEDULERS,
    WITHOUT_MOMENTUM,
    mismatch,
)
from framework.errors import Problem
from framework.text.typos import nearest

_64_BITS: Final = 2**63


def torch_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """What torch's own classes do not take, or miss."""
    optimizer, scheduler = (_typed(values, name) for name in ("optimizer", "scheduler"))
    for section, typed in (("optimizer", optimizer), ("scheduler", scheduler)):
        yield from _too_large(section, typed[1] if typed is not None else {})
    if optimizer is not None:
        yield from _fused_and_foreach(optimizer[1])
        yield from _betas(*optimizer)
    if optimizer is not None and optimizer[0] in OPTIMIZERS:
        yield from _unknown("optimizer", *optimizer, list(OPTIMIZERS[optimizer[0]]))
        yield from _limits("optimizer", optimizer[1], OPTIMIZERS[optimizer[0]])
        yield from _nesterov(*optimizer)
    if scheduler is not None and scheduler[0] in SCHEDULERS:
        name, params = scheduler
        yield from _unknown("scheduler", name, params, list(SCHEDULERS[name]))
        yield from _limits("scheduler", params, SCHEDULERS[name])
        yield from _missing(name, params)
        yield from _momentum(name, params, optimizer[0] if optimizer is not None else "")


def _too_large(section: str, params: Mapping[str, Any]) -> Iterator[Problem]:
    """torch's operations take whole numbers of 64 bits: "can't convert negative int to unsigned", in the first step."""
    for name, value in params.items():
        if isinstance(value, int) and abs(value) >= _64_BITS:
            yield Problem(
                kind="wrong-value",
                key=f"{section}.params.{name}",
                value=value,
                reason="more than torch's numbers hold",
                fix="write a smaller number",
            )


def _missing(name: str, params: Mapping[str, Any]) -> Iterator[Problem]:
    for needed in NEEDED.get(name, ()):
        if needed not in params:
            yield Problem(kind="missing-key", key=f"scheduler.params.{needed}", reason=f"{name} needs it", fix="add it")
    reported = params.get("total_steps") is not None or None not in (
        params.get("epochs"),
        params.get("steps_per_epoch"),
    )
    if name == "OneCycleLR" and not reported:
        yield Problem(
            kind="missing-key",
            key="scheduler.params.total_steps",
            reason="OneCycleLR needs its length: total_steps, or epochs and steps_per_epoch",
            fix="add it",
        )


def _limits(section: str, params: Mapping[str, Any], wanted: Mapping[str, str]) -> Iterator[Problem]:
    """torch/optim: "Invalid learning rate" and its like."""
    for name, value in params.items():
        found = mismatch(value, wanted[name]) if name in wanted and value != "auto" else None
        if found is not None:
            kind, reason, fix = found
            yield Problem(kind=kind, key=f"{section}.params.{name}", value=value, reason=reason, fix=fix)


def _betas(name: str, params: Mapping[str, Any]) -> Iterator[Problem]:
    """DeepSpeed's own types: its kernels take two, and torch's Adam behind them asks both to be below 1."""
    if name.lower() in DEEPSPEED_OPTIMIZERS and isinstance(params.get("betas"), list):
        found = mismatch(params["betas"], "pair 0..<1")
        is_typed = all(isinstance(beta, (int, float)) for beta in params["betas"])  # else the key table speaks
        if found is not None and is_typed:
            yield Problem(
                kind=found[0], key="optimizer.params.betas", value=params["betas"], reason=found[1], fix=found[2]
            )


def _nesterov(name: str, params: Mapping[str, Any]) -> Iterator[Problem]:
    """torch/optim/sgd.py: "Nesterov momentum requires a momentum and zero dampening"."""
    if name == "SGD" and params.get("nesterov") is True:
        if not params.get("momentum"):
            yield Problem(
                kind="nesterov-needs-momentum",
                key="optimizer.params.nesterov",
                value=True,
                reason="there is no momentum to look ahead along",
                fix="set optimizer.params.momentum: 0.9",
            )
        elif params.get("dampening"):
            yield Problem(
                kind="nesterov-needs-momentum",
                key="optimizer.params.dampening",
                value=params["dampening"],
                reason="Nesterov momentum goes without dampening",
                fix="set optimizer.params.dampening: 0",
            )


def _momentum(name: str, params: Mapping[str, Any], optimizer: str) -> Iterator[Problem]:
    """torch/optim/lr_scheduler.py: "optimizer must support momentum or beta1 with `cycle_momentum` option enabled"."""
    if name in MOMENTUM_SCHEDULES and optimizer in WITHOUT_MOMENTUM and params.get("cycle_momentum", True) is not False:
        yield Problem(
            kind="cycle-without-momentum",
            key="scheduler.params.cycle_momentum",
            reason=f"{name} moves the momentum, and {optimizer} has none",
            fix="set scheduler.params.cycle_momentum: false",
        )


def _fused_and_foreach(params: Mapping[str, Any]) -> Iterator[Problem]:
    """torch/optim: "`fused` and `foreach` cannot be `True` together"."""
    if params.get("fused") is True and params.get("foreach") is True:
        yield Problem(
            kind="fused-and-foreach",
            key="optimizer.params.foreach",
            value=True,
            reason="torch's optimizers are one or the other, and fused is true as well",
            fix="set optimizer.params.foreach: false",
        )


def _typed(values: Mapping[str, Any], section: str) -> tuple[str, Mapping[str, Any]] | None:
    """Type and parameters."""
    inner = values.get(section)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("type"), str):
        return None
    params = inner.get("params")
    return (inner["type"], params) if isinstance(params, Mapping) else None


def _unknown(section: str, name: str, params: Mapping[str, Any], known: list[str]) -> Iterator[Problem]:
    for parameter, value in params.items():
        if parameter not in known and not (section == "optimizer" and parameter == "max_grad_norm"):
            guess = nearest(parameter, known)
            yield Problem(
                kind="unknown-key",
                key=f"{section}.params.{parameter}",
                value=value,
                reason=f"torch's {name} takes no such parameter",
                fix=f"did you mean {section}.params.{guess}?" if guess else "remove it",
            )


def class_problems(facts: Facts, key: Key, dotted: str, value: Any) -> Iterator[Problem]:
    """A parameter that another class behind the same type takes, but not the one that DeepSpeed picks here."""
    behind = class_behind(facts)
    if not key.taken_by or behind is None or any(_is_class(taken, behind) for taken in key.taken_by):
        return
    yield Problem(
        kind="parameter-of-another-class",
        key=dotted,
        value=value,
        reason=f"DeepSpeed picks {behind} here, which does not take it; {' and '.join(key.taken_by)} would",
        fix="remove it",
    )


def class_behind(facts: Facts) -> str | None:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer`: the class for the type; None where one class stands for
    it.
    """
    on_host = facts.offloads_optimizer
    if facts.optimizer in ("adam", "adamw"):
        torch_adam = facts.flag("optimizer.params.torch_adam", False)
        if torch_adam is None:
            return None
        return "torch.optim.AdamW" if torch_adam else "DeepSpeedCPUAdam" if on_host else "FusedAdam"
    if facts.optimizer == "adagrad":
        return "DeepSpeedCPUAdagrad" if on_host else "torch.optim.Adagrad"
    if facts.optimizer == "lion":
        return "DeepSpeedCPULion" if on_host else "FusedLion"
    return None


def _is_class(taken: str, behind: str) -> bool:
    """Torch's Adam and AdamW take the same."""
    return taken == behind or (taken.startswith("torch.optim.Adam") and behind.startswith("torch.optim.Adam"))
