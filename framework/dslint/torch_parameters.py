"""What torch's own optimizers and schedules take: each parameter with its type and its limits, as torch 2.15 asks for
them.

Adam, AdamW and Adagrad stand in the key tables, because DeepSpeed has types of these names.

A value is described in a few words: ``number>=0``, ``whole>=1``, ``flag``, ``0..1`` (both ends), ``0..<1``, ``pair``
(two of what follows), ``choice a b``; ``null`` before them says that null is taken too. `mismatch` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

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
