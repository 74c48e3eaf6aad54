"""Parameters of optimizers and schedules: which class stands behind a type, and what torch's own classes take.

DeepSpeed picks the class by type, offload and `torch_adam`, and hands it all parameters as keywords: one that the class
does not know, or one that is missing, is a TypeError at `deepspeed.initialize`. The key table has the parameters of
DeepSpeed's own types; those of torch's classes stand in `torch_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Final

from framework.dslint.facts import DEEPSPEED_OPTIMIZERS, Facts
from framework.dslint.keys import Key
from framework.errors import Problem
from framework.text.typos import nearest

# Parameters of torch's own optimizers and schedules, each with its type and its limits, as torch 2.15 checks them.
# Adam, AdamW and Adagrad stand in the key tables, because DeepSpeed has types of these names. A value is described in a
# few words: ``number>=0``, ``whole>=1``, ``flag``, ``0..1`` (both ends), ``0..<1``, ``pair`` (two of what follows),
# ``choice a b``; ``null`` before them says that null is taken too. `mismatch` reads them.


_RATE: Final = {"lr": "number>=0", "weight_decay": "number>=0", "foreach": "null flag", "maximize": "flag"}
# DeepSpeed's steps need no gradient of the step itself, and torch's stop at parameters that do.
_GRAPH: Final = {"differentiable": "choice false", "capturable": "flag"}
_BETAS: Final = {"betas": "pair 0..<1", "eps": "number>=0"}
# torch.optim class -> parameter -> what it takes.
OPTIMIZERS: Final[Mapping[str, Mapping[str, str]]] = {
    "ASGD": {**_RATE, **_GRAPH, "lambd": "number>=0", "alpha": "number>=0", "t0": "number"},
    "Adadelta": {**_RATE, **_GRAPH, "rho": "0..1", "eps": "number>=0"},
    "Adafactor": {**_RATE, "beta2_decay": "number<=0", "eps": "pair null number>=0", "d": "number>=1"},
    "Adamax": {**_RATE, **_GRAPH, **_BETAS},
    "LBFGS": {
        "lr": "number>=0",
        "max_iter": "whole",
        "max_eval": "null whole",
        "tolerance_grad": "number",
        "tolerance_change": "number",
        "history_size": "whole",
        "line_search_fn": "null choice strong_wolfe",
        "maximize": "flag",
    },
    "NAdam": {**_RATE, **_GRAPH, **_BETAS, "momentum_decay": "number>=0", "decoupled_weight_decay": "flag"},
    "RAdam": {**_RATE, **_GRAPH, **_BETAS, "decoupled_weight_decay": "flag"},
    "RMSprop": {
        **_RATE,
        **_GRAPH,
        "alpha": "number>=0",
        "eps": "number>=0",
        "momentum": "number>=0",
        "centered": "flag",
    },
    "Rprop": {
        **_GRAPH,
        "lr": "number>=0",
        "foreach": "null flag",
        "maximize": "flag",
        "etas": "etas",
        "step_sizes": "pair number",
    },
    "SGD": {
        **_RATE,
        "differentiable": "choice false",
        "momentum": "number>=0",
        "dampening": "number",
        "nesterov": "flag",
        "fused": "null flag",
    },
    "SparseAdam": {"lr": "number>0", "betas": "pair 0..<1", "eps": "number>0", "maximize": "flag"},
}
_START: Final = {"last_epoch": "choice -1"}  # any other needs the state of an earlier run
# torch.optim.lr_scheduler class -> parameter -> what it takes. What needs a Python object is not here.
SCHEDULERS: Final[Mapping[str, Mapping[str, str]]] = {
    "ConstantLR": {**_START, "factor": "0..1", "total_iters": "whole"},
    "CosineAnnealingLR": {**_START, "T_max": "whole>=1", "eta_min": "number"},
    "CosineAnnealingWarmRestarts": {**_START, "T_0": "whole>=1", "T_mult": "whole>=1", "eta_min": "number"},
    "CyclicLR": {
        **_START,
        "base_lr": "rate",
        "max_lr": "rate",
        "step_size_up": "number>0",
        "step_size_down": "null number>=0",
        "mode": "choice triangular triangular2 exp_range",
        "gamma": "number>0",
        "scale_mode": "choice cycle iterations",
        "cycle_momentum": "flag",
        "base_momentum": "0..<1",
        "max_momentum": "0..<1",
    },
    "ExponentialLR": {**_START, "gamma": "number"},
    "LinearLR": {**_START, "start_factor": "0<..1", "end_factor": "0..1", "total_iters": "whole>=0"},
    "MultiStepLR": {**_START, "milestones": "wholes", "gamma": "number"},
    "OneCycleLR": {
        **_START,
        "max_lr": "rate",
        "total_steps": "null whole>=1",
        "epochs": "null whole>=1",
        "steps_per_epoch": "null whole>=1",
        "pct_start": "fraction",
        "anneal_strategy": "choice cos linear",
        "cycle_momentum": "flag",
        "base_momentum": "0..<1",
        "max_momentum": "0..<1",
        "div_factor": "number>0",
        "final_div_factor": "number>0",
        "three_phase": "flag",
    },
    "PolynomialLR": {**_START, "total_iters": "whole>=0", "power": "number>=0"},
    "ReduceLROnPlateau": {
        "mode": "choice min max",
        "factor": "number<1",
        "patience": "whole",
        "threshold": "number",
        "threshold_mode": "choice rel abs",
        "cooldown": "whole",
        "min_lr": "rate",
        "eps": "number",
    },
    "StepLR": {**_START, "step_size": "whole>=1", "gamma": "number"},
}
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "CyclicLR": ("base_lr", "max_lr"),
    "ExponentialLR": ("gamma",),
    "MultiStepLR": ("milestones",),
    "OneCycleLR": ("max_lr",),
    "StepLR": ("step_size",),
}
# Schedules that move the momentum want an optimizer that has one (torch: "optimizer must support momentum or beta1").
MOMENTUM_SCHEDULES: Final = ("CyclicLR", "OneCycleLR")
WITHOUT_MOMENTUM: Final = frozenset({"ASGD", "Adadelta", "Adafactor", "Adagrad", "LBFGS", "Rprop"})
_LIMITS: Final[Mapping[str, str]] = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def mismatch(value: Any, wanted: str) -> tuple[str, str, str] | None:
    """Kind, reason and fix where a value is not what is wanted; None where it is.

    Args:
        value: what a file gives.
        wanted: as the tables of this module describe it.
    """
    if wanted.startswith("null "):
        if value is None:
            return None
        wanted = wanted.removeprefix("null ")
    if wanted.startswith("pair "):
        return _pair(value, wanted.removeprefix("pair "))
    if wanted.startswith("choice "):
        return _choice(value, wanted.split()[1:])
    if wanted == "etas":
        return _etas(value)
    if wanted == "rate":  # a list has one for each group of parameters
        values = value if isinstance(value, list) and value else [value]
        return next((found for item in values if (found := mismatch(item, "number"))), None)
    if wanted == "wholes":
        if isinstance(value, list) and all(_is_whole(item) for item in value):
            return None
        return "wrong-type", "not a list of whole numbers", "write a list of whole numbers"
    if wanted == "flag":
        return None if isinstance(value, bool) else ("wrong-type", "not true or false", "write true or false")
    return _number(value, wanted)


def _number(value: Any, wanted: str) -> tuple[str, str, str] | None:
    if wanted.startswith("whole"):
        wanted = wanted.removeprefix("whole")
        if not _is_whole(value):
            return "wrong-type", "not a whole number", "write a whole number"
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return "wrong-type", "not a number", "write a number"
    if isinstance(value, float) and not isfinite(value):
        return "wrong-value", "not a finite number", "write a finite number"
    wanted = wanted.removeprefix("number")
    if wanted == "fraction":  # torch takes no 0 and no 1 written as a whole number, and JSON's 1.0 is read as one
        inside = isinstance(value, float) and 0 < value < 1
        return None if inside else ("wrong-value", "outside its range", "write a fraction between 0 and 1")
    if ".." in wanted:
        low, _, high = wanted.partition("..")
        above = value > 0 if low.endswith("<") else value >= 0
        below = value < 1 if high.startswith("<") else value <= 1
        from_0, to_1 = "more than" if low.endswith("<") else "at least", "less than" if high[:1] == "<" else "at most"
        words = f"write {from_0} 0 and {to_1} 1"
        return None if above and below else ("wrong-value", "outside its range", words)
    for sign, words in _LIMITS.items():
        if wanted.startswith(sign):
            limit = float(wanted.removeprefix(sign))
            holds = {">=": value >= limit, "<=": value <= limit, ">": value > limit, "<": value < limit}[sign]
            return None if holds else ("wrong-value", "outside its range", f"write {words} {limit:g}")
    return None


def _pair(value: Any, wanted: str) -> tuple[str, str, str] | None:
    if not isinstance(value, list) or len(value) != 2:
        return "wrong-value", "not two numbers", "write two numbers"
    first = mismatch(value[0], wanted)
    return first or mismatch(value[1], wanted.removeprefix("null "))


def _etas(value: Any) -> tuple[str, str, str] | None:
    found = _pair(value, "number")
    if found is None and not 0 < value[0] < 1 < value[1]:
        return "wrong-value", "outside its range", "write one number between 0 and 1 and one above 1"
    return found


def _choice(value: Any, choices: list[str]) -> tuple[str, str, str] | None:
    known: dict[str, Any] = {"false": False, "-1": -1}
    allowed = [known.get(choice, choice) for choice in choices]
    if any(value == choice and type(value) is type(choice) for choice in allowed):
        return None
    return "wrong-value", "not one of the choices", f"write {' or '.join(choices)}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_64_BITS: Final = 2**63


def torch_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find arguments that torch's own classes do not take, or miss."""
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


def class_mismatch(facts: Facts, key: Key) -> tuple[str, str, str] | None:
    """Kind, reason and fix where another class behind the same type takes a parameter, but not the one picked here."""
    behind = class_behind(facts)
    if not key.taken_by or behind is None or any(_is_class(taken, behind) for taken in key.taken_by):
        return None
    reason = f"DeepSpeed picks {behind} here, which does not take it; {' and '.join(key.taken_by)} would"
    return "parameter-of-another-class", reason, "remove it"


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
