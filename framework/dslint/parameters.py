"""Parameters of optimizers and schedules: which class stands behind a type, and what torch's own classes take.

DeepSpeed picks the class by type, offload and `torch_adam`, and hands it all parameters as keywords: one that the class
does not know, or one that is missing, is a TypeError at `deepspeed.initialize`. The key table has the parameters of
DeepSpeed's own types; those of torch's classes stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any, Final

from framework.dslint.facts import DEEPSPEED_OPTIMIZERS, Facts
from framework.dslint.keys import Key
from framework.errors import MISSING, Problem
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
_64_BITS: Final = 2**63
_LIMITS: Final[Mapping[str, tuple[str, Callable[[float, float], bool]]]] = {
    ">=": ("at least", ge),
    "<=": ("at most", le),
    ">": ("more than", gt),
    "<": ("less than", lt),
}
_LEFT_OUT: Final = ("missing-key", "cycle-without-momentum")  # there is no value to show
_CHOICES: Final[Mapping[str, Any]] = {"false": False, "-1": -1}
Fault = tuple[str, str, str]  # kind, reason and fix


def mismatch(value: Any, wanted: str) -> Fault | None:
    """Kind, reason and fix where a value is not what is wanted; None where it is.

    Args:
        value: what a file gives.
        wanted: as the tables of this module describe it.
    """
    first, _, rest = wanted.partition(" ")
    if first == "null":
        return None if value is None else mismatch(value, rest)
    if first == "pair":
        if not isinstance(value, list) or len(value) != 2:
            return "wrong-value", "not two numbers", "write two numbers"
        return mismatch(value[0], rest) or mismatch(value[1], rest.removeprefix("null "))
    if first == "choice":
        allowed = [_CHOICES.get(choice, choice) for choice in rest.split()]
        is_one = any(value == choice and type(value) is type(choice) for choice in allowed)
        return None if is_one else ("wrong-value", "not one of the choices", f"write {rest.replace(' ', ' or ')}")
    if wanted == "etas":
        found = mismatch(value, "pair number")
        if found is None and not 0 < value[0] < 1 < value[1]:
            return "wrong-value", "outside its range", "write one number between 0 and 1 and one above 1"
        return found
    if wanted == "rate":  # a list has one for each group of parameters
        values = value if isinstance(value, list) and value else [value]
        return next((found for item in values if (found := mismatch(item, "number"))), None)
    if wanted == "wholes":
        is_list = isinstance(value, list) and all(_is_whole(item) for item in value)
        return None if is_list else ("wrong-type", "not a list of whole numbers", "write a list of whole numbers")
    if wanted == "flag":
        return None if isinstance(value, bool) else ("wrong-type", "not true or false", "write true or false")
    return _number(value, wanted)


def _number(value: Any, wanted: str) -> Fault | None:
    if wanted.startswith("whole") and not _is_whole(value):
        return "wrong-type", "not a whole number", "write a whole number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "wrong-type", "not a number", "write a number"
    if isinstance(value, float) and not isfinite(value):
        return "wrong-value", "not a finite number", "write a finite number"
    low, range_, high = wanted.partition("..")
    if wanted == "fraction":  # torch takes no 0 and no 1 written as a whole number, and JSON's 1.0 is read as one
        fits, words = isinstance(value, float) and 0 < value < 1, "a fraction between 0 and 1"
    elif range_:
        (from_0, is_above), (to_1, is_below) = (
            _LIMITS[">" if "<" in low else ">="],
            _LIMITS["<" if "<" in high else "<="],
        )
        fits, words = is_above(value, 0) and is_below(value, 1), f"{from_0} 0 and {to_1} 1"
    else:
        limit = wanted.removeprefix("whole").removeprefix("number")
        sign = limit.rstrip("0123456789.-")
        if not sign:
            return None
        name, holds = _LIMITS[sign]
        number = float(limit.removeprefix(sign))
        fits, words = holds(value, number), f"{name} {number:g}"
    return None if fits else ("wrong-value", "outside its range", f"write {words}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def torch_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find arguments that torch's own classes do not take, or miss."""
    optimizer, params = _typed(values, "optimizer")
    for name, kind, reason, fix in _of_optimizer(optimizer, params):
        yield Problem(kind, reason, fix, f"optimizer.params.{name}", params[name])
    scheduler, arguments = _typed(values, "scheduler")
    for name, kind, reason, fix in _of_scheduler(scheduler, arguments, optimizer):
        value = MISSING if kind in _LEFT_OUT else arguments[name]
        yield Problem(kind, reason, fix, f"scheduler.params.{name}", value)


def _typed(values: Mapping[str, Any], section: str) -> tuple[str, Mapping[str, Any]]:
    """Type and parameters; both empty where one is missing."""
    inner = values.get(section)
    kind, params = (inner.get("type"), inner.get("params")) if isinstance(inner, Mapping) else ("", {})
    return (kind, params) if isinstance(kind, str) and isinstance(params, Mapping) else ("", {})


Found = Iterator[tuple[str, str, str, str]]  # parameter, kind, reason and fix


def _of_optimizer(name: str, params: Mapping[str, Any]) -> Found:
    yield from _too_large(params)
    if params.get("fused") is True and params.get("foreach") is True:  # torch/optim: "cannot be `True` together"
        reason = "torch's optimizers are one or the other, and fused is true as well"
        yield "foreach", "fused-and-foreach", reason, "set optimizer.params.foreach: false"
    if name.lower() in DEEPSPEED_OPTIMIZERS and isinstance(betas := params.get("betas"), list):
        # DeepSpeed's kernels take two, and torch's Adam behind them asks both to be below 1; types are the key table's
        found = mismatch(betas, "pair 0..<1")
        if found is not None and all(isinstance(beta, (int, float)) for beta in betas):
            yield "betas", *found
    if name in OPTIMIZERS:
        yield from _against("optimizer", name, params, OPTIMIZERS[name])
    if name == "SGD" and params.get("nesterov") is True:  # torch/optim/sgd.py: "requires a momentum and zero dampening"
        kind, key = "nesterov-needs-momentum", "optimizer.params"
        if not params.get("momentum"):
            yield "nesterov", kind, "there is no momentum to look ahead along", f"set {key}.momentum: 0.9"
        elif params.get("dampening"):
            yield "dampening", kind, "Nesterov momentum goes without dampening", f"set {key}.dampening: 0"


def _of_scheduler(name: str, params: Mapping[str, Any], optimizer: str) -> Found:
    yield from _too_large(params)
    if name not in SCHEDULERS:
        return
    yield from _against("scheduler", name, params, SCHEDULERS[name])
    for needed in NEEDED.get(name, ()):
        if needed not in params:
            yield needed, "missing-key", f"{name} needs it", "add it"
    lengths = [params.get(length) is not None for length in ("total_steps", "epochs", "steps_per_epoch")]
    if name == "OneCycleLR" and not (lengths[0] or all(lengths[1:])):
        reason = "OneCycleLR needs its length: total_steps, or epochs and steps_per_epoch"
        yield "total_steps", "missing-key", reason, "add it"
    # torch/optim/lr_scheduler.py: "optimizer must support momentum or beta1 with `cycle_momentum` option enabled"
    if name in MOMENTUM_SCHEDULES and optimizer in WITHOUT_MOMENTUM and params.get("cycle_momentum", True) is not False:
        reason = f"{name} moves the momentum, and {optimizer} has none"
        yield "cycle_momentum", "cycle-without-momentum", reason, "set scheduler.params.cycle_momentum: false"


def _too_large(params: Mapping[str, Any]) -> Found:
    """torch's operations take whole numbers of 64 bits: "can't convert negative int to unsigned", in the first step."""
    for name, value in params.items():
        if isinstance(value, int) and abs(value) >= _64_BITS:
            yield name, "wrong-value", "more than torch's numbers hold", "write a smaller number"


def _against(section: str, kind: str, params: Mapping[str, Any], known: Mapping[str, str]) -> Found:
    """Parameters that a class of torch does not know, or with values that it refuses ("Invalid learning rate")."""
    for name, value in params.items():
        if name in known:
            found = mismatch(value, known[name]) if value != "auto" else None
            if found is not None:
                yield name, *found
        elif not (section == "optimizer" and name == "max_grad_norm"):
            guess = nearest(name, list(known))
            fix = f"did you mean {section}.params.{guess}?" if guess else "remove it"
            yield name, "unknown-key", f"torch's {kind} takes no such parameter", fix


def class_mismatch(facts: Facts, key: Key) -> Fault | None:
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
