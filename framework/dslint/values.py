"""Values by themselves: each held against its key, and the parameters that torch's optimizers and
schedules take.

DeepSpeed picks the class of an optimizer by type, offload and `torch_adam`, and hands it all
parameters as keywords: one that the class does not know, or one that is missing, is a TypeError at
`deepspeed.initialize`. The key table has the parameters of DeepSpeed's own types; those of torch's
classes, as torch 2.15 checks them, are in `tables/torch.json`, in the words of the key tables.
(Adam, AdamW and Adagrad are not in it, because DeepSpeed has types of these names.) Three words are
its own: a ``pair`` has two ``items``; ``around`` N: the first is below N, the second above;
``fraction``: torch takes no 0 and no 1 written as a whole number, and JSON's 1.0 is read as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import isfinite
from operator import ge, gt, le, lt, mod
from typing import Any, Final

from framework.dslint.facts import DEEPSPEED_OPTIMIZERS, FALSE, TRUE, Facts
from framework.dslint.key_files import TABLES
from framework.dslint.keys import Key
from framework.errors import MISSING, Problem, Severity, show_value
from framework.text.typos import nearest

# Kind, reason and fix of what is wrong with one value, and the severity where it is no error.
Fault = tuple[str, str, str] | tuple[str, str, str, Severity]

_FLOATS_AS_WHOLE: Final = 2.0**63  # pydantic refuses a longer one: "exceeded maximum size"
TYPE_WORDS: Final = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a section of keys",
}
_LIMITS: Final[tuple[tuple[str, Callable[[float, float], object], str], ...]] = (
    ("minimum", lt, "at least"),
    ("exclusive_minimum", le, "more than"),
    ("maximum", gt, "at most"),
    ("exclusive_maximum", ge, "less than"),
    ("multiple_of", mod, "a multiple of"),
)


def value_faults(key: Key, value: Any) -> Iterator[Fault]:
    """Find what is wrong with one value, the type first."""
    if value is None:
        if not key.nullable:
            yield "wrong-type", "null where a value belongs", "leave the key out"
        return
    wanted = " or ".join(TYPE_WORDS.get(kind, kind) for kind in key.types)
    if not any(_is_type(value, kind) for kind in key.types):
        is_lax = key.reader == "pydantic" and "object" not in key.types
        if not is_lax or not any(_passes_as(value, kind) for kind in key.types):
            yield "wrong-type", f"not {wanted}", f"write {wanted}"
            return
        reason = f"DeepSpeed turns it into {wanted}; other readers of this file will not"
        yield "loose-type", reason, f"write {wanted}", "warning"
        # DeepSpeed holds what it made of it against the limits
        if {"integer", "number"}.issuperset(key.types):
            yield from _choice_and_range(key, float(value))
        return
    if key.from_python:
        yield "wrong-type", "only Python code can give this value", "remove it"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _choice_and_range(key, value)
    elif key.enum and not _is_choice(key, value):
        yield _no_choice(key)
    if isinstance(value, list) and not value and "number" in key.types:
        yield "wrong-value", "an empty list", "write one number per group"
    if (
        isinstance(value, list)
        and key.items
        and not all(_is_type(item, key.items) for item in value)
    ):
        words = TYPE_WORDS.get(key.items, key.items)
        yield "wrong-type", f"not a list of which each is {words}", f"write {words} for each"
    elif isinstance(value, list) and key.items == "number":
        yield from islice((fault for item in value for fault in _out_of_range(key, item)), 1)


def _choice_and_range(key: Key, value: float) -> Iterator[Fault]:
    if key.enum and not _is_choice(key, value):
        yield _no_choice(key)
    yield from _out_of_range(key, value)


def _no_choice(key: Key) -> Fault:
    return "wrong-value", "not one of the choices", f"write {', '.join(map(show_value, key.enum))}"


def _out_of_range(key: Key, value: float) -> Iterator[Fault]:
    for name, is_outside, words in _LIMITS:
        limit = getattr(key, name)
        if limit is not None and is_outside(value, limit):
            yield "wrong-value", "outside its range", f"write {words} {limit:g}"


def _is_choice(key: Key, value: Any) -> bool:
    if key.any_case and isinstance(value, str):
        return value.lower() in {str(choice).lower() for choice in key.enum}
    return any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in key.enum
    )


def _is_type(value: Any, kind: str) -> bool:
    if kind == "any":
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int):
        return kind in ("integer", "number")
    wanted = {"number": float, "string": str, "array": list, "object": Mapping}.get(kind)
    return wanted is not None and isinstance(value, wanted)


def _passes_as(value: Any, kind: str) -> bool:
    """Check whether pydantic, where it is not strict, converts the value to the type."""
    if kind == "boolean":
        return value in (0, 1) or (isinstance(value, str) and value.lower() in TRUE | FALSE)
    if kind not in ("integer", "number"):
        return False
    if isinstance(value, bool):
        return True
    if isinstance(value, float):
        return value.is_integer() and (kind == "number" or abs(value) < _FLOATS_AS_WHOLE)
    if not isinstance(value, str):
        return False
    try:
        if kind == "number":
            number = float(value)
        else:
            number = int(value)
    except ValueError:
        return False
    return number == number


# Parameters of torch's classes.

Wanted = Mapping[str, Any]  # one parameter of a class, as `tables/torch.json` has it
_TORCH: Final[Mapping[str, Any]] = json.loads((TABLES / "torch.json").read_text(encoding="utf-8"))
# Class of torch.optim, or of torch.optim.lr_scheduler -> parameter -> what it takes. What needs a
# Python object is not there.
OPTIMIZERS: Final[Mapping[str, Mapping[str, Wanted]]] = _TORCH["optimizers"]
SCHEDULERS: Final[Mapping[str, Mapping[str, Wanted]]] = _TORCH["schedulers"]
_TWO_BETAS: Final = OPTIMIZERS["NAdam"]["betas"]
# Schedules that move the momentum want an optimizer that has one (torch: "optimizer must support
# momentum or beta1").
MOMENTUM_SCHEDULES: Final = ("CyclicLR", "OneCycleLR")
WITHOUT_MOMENTUM: Final = frozenset({"ASGD", "Adadelta", "Adafactor", "Adagrad", "LBFGS", "Rprop"})
_64_BITS: Final = 2**63
_LEFT_OUT: Final = ("missing-key", "cycle-without-momentum")  # there is no value to show
Found = Iterator[tuple[str, str, str, str]]  # parameter, kind, reason and fix


def mismatch(value: Any, wanted: Wanted) -> tuple[str, str, str] | None:
    """Kind, reason and fix where a value is not what torch wants; None where it is.

    Args:
        value: what a file gives.
        wanted: as `tables/torch.json` describes it.
    """
    if value is None and wanted.get("nullable"):
        return None
    choices = wanted.get("enum")
    if choices:
        is_one = any(value == choice and type(value) is type(choice) for choice in choices)
        fix = f"write {' or '.join(map(show_value, choices))}"
        return None if is_one else ("wrong-value", "not one of the choices", fix)
    if wanted["type"] == "pair":
        if not isinstance(value, list) or len(value) != 2:
            return "wrong-value", "not two numbers", "write two numbers"
        found = next(filter(None, map(mismatch, value, wanted["items"])), None)
        if found is None and "around" in wanted and not 0 < value[0] < wanted["around"] < value[1]:
            return (
                "wrong-value",
                "outside its range",
                "write one number between 0 and 1 and one above 1",
            )
        return found
    if wanted["type"] == "array":
        is_list = isinstance(value, list) and all(_is_type(item, wanted["items"]) for item in value)
        if is_list:
            return None
        return ("wrong-type", "not a list of whole numbers", "write a list of whole numbers")
    if "array" in wanted["type"]:  # a list has one for each group of parameters
        if isinstance(value, list) and value:
            values = value
        else:
            values = [value]
        return next(
            filter(None, (mismatch(item, {"type": wanted["items"]}) for item in values)), None
        )
    return _scalar_mismatch(value, wanted)


def _scalar_mismatch(value: Any, wanted: Wanted) -> tuple[str, str, str] | None:
    words = TYPE_WORDS[wanted["type"]]
    if not _is_type(value, wanted["type"]):
        return "wrong-type", f"not {words}", f"write {words}"
    if isinstance(value, float) and not isfinite(value):
        return "wrong-value", "not a finite number", "write a finite number"
    limits = [
        (is_outside, words, wanted[name]) for name, is_outside, words in _LIMITS if name in wanted
    ]
    fits = not any(is_outside(value, limit) for is_outside, _, limit in limits)
    range_ = " and ".join(f"{words} {limit:g}" for _, words, limit in limits)
    if "fraction" in wanted:
        fits = isinstance(value, float) and 0 < value < 1
        range_ = "a fraction between 0 and 1"
    if fits:
        return None
    return ("wrong-value", "outside its range", f"write {range_}")


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
    kind, params = (
        (inner.get("type"), inner.get("params")) if isinstance(inner, Mapping) else ("", {})
    )
    if isinstance(kind, str) and isinstance(params, Mapping):
        return (kind, params)
    return ("", {})


def _of_optimizer(name: str, params: Mapping[str, Any]) -> Found:
    yield from _too_large(params)
    # torch/optim: "cannot be `True` together"
    if params.get("fused") is True and params.get("foreach") is True:
        reason = "torch's optimizers are one or the other, and fused is true as well"
        yield "foreach", "fused-and-foreach", reason, "set optimizer.params.foreach: false"
    if name.lower() in DEEPSPEED_OPTIMIZERS and isinstance(betas := params.get("betas"), list):
        # DeepSpeed's kernels take two, and torch's Adam behind them asks both to be below 1; types
        # are the key table's
        found = mismatch(betas, _TWO_BETAS)
        if found is not None and all(isinstance(beta, (int, float)) for beta in betas):
            yield "betas", *found
    if name in OPTIMIZERS:
        yield from _against("optimizer", name, params, OPTIMIZERS[name])
    # torch/optim/sgd.py: "requires a momentum and zero dampening"
    if name == "SGD" and params.get("nesterov") is True:
        kind = "nesterov-needs-momentum"
        key = "optimizer.params"
        if not params.get("momentum"):
            yield (
                "nesterov",
                kind,
                "there is no momentum to look ahead along",
                f"set {key}.momentum: 0.9",
            )
        elif params.get("dampening"):
            yield (
                "dampening",
                kind,
                "Nesterov momentum goes without dampening",
                f"set {key}.dampening: 0",
            )


def _of_scheduler(name: str, params: Mapping[str, Any], optimizer: str) -> Found:
    yield from _too_large(params)
    if name not in SCHEDULERS:
        return
    yield from _against("scheduler", name, params, SCHEDULERS[name])
    for needed, wanted in SCHEDULERS[name].items():
        if wanted.get("required") and needed not in params:
            yield needed, "missing-key", f"{name} needs it", "add it"
    lengths = [
        params.get(length) is not None for length in ("total_steps", "epochs", "steps_per_epoch")
    ]
    if name == "OneCycleLR" and not (lengths[0] or all(lengths[1:])):
        reason = "OneCycleLR needs its length: total_steps, or epochs and steps_per_epoch"
        yield "total_steps", "missing-key", reason, "add it"
    # torch/optim/lr_scheduler.py: "optimizer must support momentum or beta1 with `cycle_momentum`
    # option enabled"
    if (
        name in MOMENTUM_SCHEDULES
        and optimizer in WITHOUT_MOMENTUM
        and params.get("cycle_momentum", True) is not False
    ):
        reason = f"{name} moves the momentum, and {optimizer} has none"
        yield (
            "cycle_momentum",
            "cycle-without-momentum",
            reason,
            "set scheduler.params.cycle_momentum: false",
        )


def _too_large(params: Mapping[str, Any]) -> Found:
    """torch's operations take whole numbers of 64 bits: "can't convert negative int to unsigned",
    in the first step.
    """
    for name, value in params.items():
        if isinstance(value, int) and abs(value) >= _64_BITS:
            yield name, "wrong-value", "more than torch's numbers hold", "write a smaller number"


def _against(
    section: str, kind: str, params: Mapping[str, Any], known: Mapping[str, Wanted]
) -> Found:
    """Parameters that a class of torch does not know, or with values that it refuses ("Invalid
    learning rate").
    """
    for name, value in params.items():
        if name in known:
            if value != "auto":
                found = mismatch(value, known[name])
            else:
                found = None
            if found is not None:
                yield name, *found
        elif not (section == "optimizer" and name == "max_grad_norm"):
            guess = nearest(name, list(known))
            if guess:
                fix = f"did you mean {section}.params.{guess}?"
            else:
                fix = "remove it"
            yield name, "unknown-key", f"torch's {kind} takes no such parameter", fix


def class_mismatch(facts: Facts, key: Key) -> tuple[str, str, str] | None:
    """Kind, reason and fix where another class behind the same type takes a parameter, but not the
    one picked here.
    """
    behind = class_behind(facts)
    if (
        not key.taken_by
        or behind is None
        or any(_is_class(taken, behind) for taken in key.taken_by)
    ):
        return None
    reason = (
        f"DeepSpeed picks {behind} here, which does not take it; {' and '.join(key.taken_by)} would"
    )
    return "parameter-of-another-class", reason, "remove it"


def class_behind(facts: Facts) -> str | None:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer`: the class for the type; None where
    one class stands for it.
    """
    on_host = facts.offloads_optimizer
    if facts.optimizer in ("adam", "adamw"):
        torch_adam = facts.flag("optimizer.params.torch_adam", False)
        if torch_adam is None:
            return None
        if torch_adam:
            return "torch.optim.AdamW"
        if on_host:
            return "DeepSpeedCPUAdam"
        return "FusedAdam"
    if facts.optimizer == "adagrad":
        return "DeepSpeedCPUAdagrad" if on_host else "torch.optim.Adagrad"
    if facts.optimizer == "lion":
        return "DeepSpeedCPULion" if on_host else "FusedLion"
    return None


def _is_class(taken: str, behind: str) -> bool:
    """Torch's Adam and AdamW take the same."""
    return taken == behind or (
        taken.startswith("torch.optim.Adam") and behind.startswith("torch.optim.Adam")
    )
