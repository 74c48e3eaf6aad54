"""Values by themselves: each held against its key, and the parameters that torch's optimizers and
schedules take.

DeepSpeed picks the class of an optimizer by type, offload and `torch_adam`, and hands it all
parameters as keywords: one that the class does not know, or one that is missing, is a TypeError at
`deepspeed.initialize`. The key table has the parameters of DeepSpeed's own types;
`tables/torch.json` has the parameters of torch's classes, as torch 2.15 checks them, in the words
of the key tables.
(Adam, AdamW and Adagrad are not in it, because DeepSpeed has types of these names.) Three words are
its own: a ``pair`` has two ``items``; ``around`` N: the first is below N, the second above;
``fraction``: torch takes no 0 and no 1 written as a whole number, and JSON's 1.0 is read as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite, isnan
from operator import ge, gt, le, lt, mod
from typing import Any, Final, NamedTuple

from deepspeed_lint.errors import MISSING, Problem, Severity, show_value
from deepspeed_lint.facts import DEEPSPEED_OPTIMIZERS, FALSE, TRUE, Facts
from deepspeed_lint.key_files import TABLES
from deepspeed_lint.keys import Key
from deepspeed_lint.text.typos import nearest


class Fault(NamedTuple):
    """One thing that is wrong with a value.

    Attributes:
        kind: of the problem that it becomes.
        reason: why the value is wrong.
        fix: what to write instead.
        severity: of that problem.
    """

    kind: str
    reason: str
    fix: str
    severity: Severity = "error"


_FLOATS_AS_WHOLE: Final = 2.0**63  # pydantic refuses a longer one: "exceeded maximum size"
TYPE_WORDS: Final = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a section of keys",
}
# Limit -> what is true of (value, limit) outside of it (`mod`: a remainder), and its words.
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
            yield Fault("wrong-type", "null where a value belongs", "leave the key out")
    elif any(_is_type(value, kind) for kind in key.types):
        yield from _faults_of_type(key, value)
    else:
        yield from _type_faults(key, value)


def _faults_of_type(key: Key, value: Any) -> Iterator[Fault]:
    """Find what is wrong with a value of the right type."""
    if key.from_python:
        yield Fault("wrong-type", "only Python code can give this value", "remove it")
    if _is_type(value, "number"):
        yield from _choice_and_range(key, value)
    elif key.enum and not _is_choice(key, value):
        yield _no_choice(key)
    if isinstance(value, list):
        yield from _item_faults(key, value)


def _type_faults(key: Key, value: Any) -> Iterator[Fault]:
    """Find what is wrong with a value of another type: an error, unless DeepSpeed converts it."""
    wanted = " or ".join(TYPE_WORDS.get(kind, kind) for kind in key.types)
    if not _is_converted(key, value):
        yield Fault("wrong-type", f"not {wanted}", f"write {wanted}")
        return
    reason = f"DeepSpeed turns it into {wanted}; other readers of this file will not"
    yield Fault("loose-type", reason, f"write {wanted}", "warning")
    # DeepSpeed holds what it made of it against the limits.
    if {"integer", "number"}.issuperset(key.types):
        yield from _choice_and_range(key, float(value))


def _is_converted(key: Key, value: Any) -> bool:
    if key.reader != "pydantic" or "object" in key.types:
        return False
    return any(_passes_as(value, kind) for kind in key.types)


def _item_faults(key: Key, items: list[Any]) -> Iterator[Fault]:
    if not items and "number" in key.types:
        yield Fault("wrong-value", "an empty list", "write one number per group")
    if not key.items:
        return
    if not all(_is_type(item, key.items) for item in items):
        words = TYPE_WORDS.get(key.items, key.items)
        reason = f"not a list of which each is {words}"
        yield Fault("wrong-type", reason, f"write {words} for each")
    elif key.items == "number":
        yield from _first_item_out_of_range(key, items)


def _first_item_out_of_range(key: Key, items: list[Any]) -> Iterator[Fault]:
    for item in items:
        faults = list(_out_of_range(key, item))
        if faults:
            yield faults[0]
            return


def _choice_and_range(key: Key, value: float) -> Iterator[Fault]:
    if key.enum and not _is_choice(key, value):
        yield _no_choice(key)
    yield from _out_of_range(key, value)


def _no_choice(key: Key) -> Fault:
    choices = ", ".join(map(show_value, key.enum))
    return Fault("wrong-value", "not one of the choices", f"write {choices}")


def _out_of_range(key: Key, value: float) -> Iterator[Fault]:
    for name, is_outside, words in _LIMITS:
        limit = getattr(key, name)
        if limit is not None and is_outside(value, limit):
            yield Fault("wrong-value", "outside its range", f"write {words} {limit:g}")


def _is_choice(key: Key, value: Any) -> bool:
    if key.any_case and isinstance(value, str):
        return value.lower() in {str(choice).lower() for choice in key.enum}
    return any(_is_same(value, choice) for choice in key.enum)


def _is_same(value: Any, choice: Any) -> bool:
    """Check whether two values are equal; 1 and true are not."""
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)


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
        return _passes_as_truth(value)
    if kind not in ("integer", "number"):
        return False
    if isinstance(value, bool):
        return True
    if isinstance(value, float):
        return value.is_integer() and (kind == "number" or abs(value) < _FLOATS_AS_WHOLE)
    return isinstance(value, str) and _is_number_text(value, kind)


def _passes_as_truth(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in TRUE | FALSE
    return value in (0, 1)


def _is_number_text(text: str, kind: str) -> bool:
    """Check whether a text is a whole number, or any number but NaN."""
    try:
        if kind == "integer":
            int(text)
            return True
        return not isnan(float(text))
    except ValueError:
        return False


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
# Type of optimizer -> its class on the device, and on the host.
_CLASSES: Final = {
    "adagrad": ("torch.optim.Adagrad", "DeepSpeedCPUAdagrad"),
    "lion": ("FusedLion", "DeepSpeedCPULion"),
}
_LEFT_OUT: Final = ("missing-key", "cycle-without-momentum")  # there is no value to show
Found = Iterator[tuple[str, Fault]]  # parameter, and what is wrong with it


def mismatch(value: Any, wanted: Wanted) -> Fault | None:
    """Return what is wrong with a value for torch, or None.

    Args:
        value: what a file gives.
        wanted: as `tables/torch.json` describes it.
    """
    if value is None and wanted.get("nullable"):
        return None
    choices = wanted.get("enum")
    if choices:
        return _choice_mismatch(value, choices)
    if wanted["type"] == "pair":
        return _pair_mismatch(value, wanted)
    if wanted["type"] == "array":
        return _list_mismatch(value, wanted["items"])
    if "array" in wanted["type"]:
        return _mismatch_of_groups(value, {"type": wanted["items"]})
    return _scalar_mismatch(value, wanted)


def _mismatch_of_groups(value: Any, wanted: Wanted) -> Fault | None:
    """Return what is wrong with one value, or with a list that has one for each group of
    parameters.
    """
    values = [value]
    if isinstance(value, list) and value:
        values = value
    return _first_mismatch((item, wanted) for item in values)


def _choice_mismatch(value: Any, choices: list[Any]) -> Fault | None:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return None
    fix = f"write {' or '.join(map(show_value, choices))}"
    return Fault("wrong-value", "not one of the choices", fix)


def _list_mismatch(value: Any, item_type: str) -> Fault | None:
    if isinstance(value, list) and all(_is_type(item, item_type) for item in value):
        return None
    return Fault("wrong-type", "not a list of whole numbers", "write a list of whole numbers")


def _pair_mismatch(value: Any, wanted: Wanted) -> Fault | None:
    if not isinstance(value, list) or len(value) != 2:
        return Fault("wrong-value", "not two numbers", "write two numbers")
    fault = _first_mismatch(zip(value, wanted["items"], strict=False))
    if fault is not None:
        return fault
    if "around" in wanted and not 0 < value[0] < wanted["around"] < value[1]:
        return Fault(
            "wrong-value",
            "outside its range",
            "write one number between 0 and 1 and one above 1",
        )
    return None


def _first_mismatch(pairs: Iterable[tuple[Any, Wanted]]) -> Fault | None:
    """Return what is wrong with the first value that does not fit what is wanted of it."""
    for value, wanted in pairs:
        fault = mismatch(value, wanted)
        if fault is not None:
            return fault
    return None


def _scalar_mismatch(value: Any, wanted: Wanted) -> Fault | None:
    type_words = TYPE_WORDS[wanted["type"]]
    if not _is_type(value, wanted["type"]):
        return Fault("wrong-type", f"not {type_words}", f"write {type_words}")
    if isinstance(value, float) and not isfinite(value):
        return Fault("wrong-value", "not a finite number", "write a finite number")
    if "fraction" in wanted:
        return _fraction_mismatch(value)
    return _range_mismatch(value, wanted)


def _fraction_mismatch(value: Any) -> Fault | None:
    if isinstance(value, float) and 0 < value < 1:
        return None
    return Fault("wrong-value", "outside its range", "write a fraction between 0 and 1")


def _range_mismatch(value: Any, wanted: Wanted) -> Fault | None:
    fits = True
    parts = []
    for name, is_outside, words in _LIMITS:
        if name in wanted:
            fits = fits and not is_outside(value, wanted[name])
            parts.append(f"{words} {wanted[name]:g}")
    if fits:
        return None
    return Fault("wrong-value", "outside its range", f"write {' and '.join(parts)}")


def torch_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find arguments that torch's own classes do not take, or miss."""
    optimizer, params = _typed(values, "optimizer")
    for name, fault in _optimizer_faults(optimizer, params):
        key = f"optimizer.params.{name}"
        yield Problem(fault.kind, fault.reason, fault.fix, key, params[name])
    scheduler, arguments = _typed(values, "scheduler")
    for name, fault in _scheduler_faults(scheduler, arguments, optimizer):
        value = MISSING if fault.kind in _LEFT_OUT else arguments[name]
        key = f"scheduler.params.{name}"
        yield Problem(fault.kind, fault.reason, fault.fix, key, value)


def _typed(values: Mapping[str, Any], section: str) -> tuple[str, Mapping[str, Any]]:
    """Return type and parameters of a section; both empty where one is missing."""
    inner = values.get(section)
    if not isinstance(inner, Mapping):
        return "", {}
    kind = inner.get("type")
    params = inner.get("params")
    if isinstance(kind, str) and isinstance(params, Mapping):
        return kind, params
    return "", {}


def _optimizer_faults(name: str, params: Mapping[str, Any]) -> Found:
    yield from _too_large(params)
    # torch/optim: "cannot be `True` together"
    if params.get("fused") is True and params.get("foreach") is True:
        reason = "torch's optimizers are one or the other, and fused is true as well"
        fix = "set optimizer.params.foreach: false"
        yield "foreach", Fault("fused-and-foreach", reason, fix)
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        yield from _betas_faults(params.get("betas"))
    if name in OPTIMIZERS:
        yield from _parameter_faults("optimizer", name, params, OPTIMIZERS[name])
    if name == "SGD":
        yield from _nesterov_faults(params)


def _betas_faults(betas: Any) -> Found:
    """Find what is wrong with the number of betas and their ranges: DeepSpeed's kernels take two,
    and torch's Adam behind them asks both to be below 1. Types are the key table's.
    """
    if not isinstance(betas, list) or not all(isinstance(beta, (int, float)) for beta in betas):
        return
    fault = mismatch(betas, _TWO_BETAS)
    if fault is not None:
        yield "betas", fault


def _nesterov_faults(params: Mapping[str, Any]) -> Found:
    """Find what torch/optim/sgd.py refuses: "requires a momentum and zero dampening"."""
    if params.get("nesterov") is not True:
        return
    kind = "nesterov-needs-momentum"
    if not params.get("momentum"):
        reason = "there is no momentum to look ahead along"
        yield "nesterov", Fault(kind, reason, "set optimizer.params.momentum: 0.9")
    elif params.get("dampening"):
        reason = "Nesterov momentum goes without dampening"
        yield "dampening", Fault(kind, reason, "set optimizer.params.dampening: 0")


def _scheduler_faults(name: str, params: Mapping[str, Any], optimizer: str) -> Found:
    yield from _too_large(params)
    if name not in SCHEDULERS:
        return
    yield from _parameter_faults("scheduler", name, params, SCHEDULERS[name])
    yield from _missing_parameters(name, params)
    # torch/optim/lr_scheduler.py: "optimizer must support momentum or beta1 with `cycle_momentum`
    # option enabled"
    moves_momentum = name in MOMENTUM_SCHEDULES and params.get("cycle_momentum", True) is not False
    if moves_momentum and optimizer in WITHOUT_MOMENTUM:
        reason = f"{name} moves the momentum, and {optimizer} has none"
        fix = "set scheduler.params.cycle_momentum: false"
        yield "cycle_momentum", Fault("cycle-without-momentum", reason, fix)


def _missing_parameters(name: str, params: Mapping[str, Any]) -> Found:
    """Find parameters that a schedule of torch does not work without."""
    for parameter, wanted in SCHEDULERS[name].items():
        if wanted.get("required") and parameter not in params:
            yield parameter, Fault("missing-key", f"{name} needs it", "add it")
    if name == "OneCycleLR" and not _has_length(params):
        reason = "OneCycleLR needs its length: total_steps, or epochs and steps_per_epoch"
        yield "total_steps", Fault("missing-key", reason, "add it")


def _has_length(params: Mapping[str, Any]) -> bool:
    if params.get("total_steps") is not None:
        return True
    return params.get("epochs") is not None and params.get("steps_per_epoch") is not None


def _too_large(params: Mapping[str, Any]) -> Found:
    """Find whole numbers of more than 64 bits: torch's operations stop at them in the first step
    ("can't convert negative int to unsigned").
    """
    for name, value in params.items():
        if isinstance(value, int) and abs(value) >= _64_BITS:
            reason = "more than torch's numbers hold"
            yield name, Fault("wrong-value", reason, "write a smaller number")


def _parameter_faults(
    section: str, kind: str, params: Mapping[str, Any], known: Mapping[str, Wanted]
) -> Found:
    """Find parameters that a class of torch does not know, or with values that it refuses ("Invalid
    learning rate").
    """
    for name, value in params.items():
        if name in known:
            fault = None if value == "auto" else mismatch(value, known[name])
            if fault is not None:
                yield name, fault
        elif (section, name) != ("optimizer", "max_grad_norm"):
            yield name, _unknown_parameter(section, kind, name, known)


def _unknown_parameter(section: str, kind: str, name: str, known: Mapping[str, Wanted]) -> Fault:
    fix = "remove it"
    guess = nearest(name, list(known))
    if guess:
        fix = f"did you mean {section}.params.{guess}?"
    return Fault("unknown-key", f"torch's {kind} takes no such parameter", fix)


def class_mismatch(facts: Facts, key: Key) -> Fault | None:
    """Return what is wrong with a parameter that another class behind the same type takes, but not
    the one that DeepSpeed picks here; None where it does.
    """
    behind = class_behind(facts)
    if not key.taken_by or behind is None:
        return None
    if any(_takes_same(taken, behind) for taken in key.taken_by):
        return None
    reason = (
        f"DeepSpeed picks {behind} here, which does not take it; {' and '.join(key.taken_by)} would"
    )
    return Fault("parameter-of-another-class", reason, "remove it")


def class_behind(facts: Facts) -> str | None:
    """Return the class that DeepSpeed picks for the type (deepspeed/runtime/engine.py
    `_configure_basic_optimizer`); None where a type has one class only.
    """
    if facts.optimizer in ("adam", "adamw"):
        return _adam_behind(facts)
    classes = _CLASSES.get(facts.optimizer or "")
    if classes is None:
        return None
    on_device, on_host = classes
    return on_host if facts.offloads_optimizer else on_device


def _adam_behind(facts: Facts) -> str | None:
    is_torchs = facts.flag("optimizer.params.torch_adam", False)
    if is_torchs is None:
        return None
    if is_torchs:
        return "torch.optim.AdamW"
    if facts.offloads_optimizer:
        return "DeepSpeedCPUAdam"
    return "FusedAdam"


def _takes_same(first: str, second: str) -> bool:
    """Check whether two classes take the same parameters, as torch's Adam and AdamW do."""
    prefix = "torch.optim.Adam"
    return first == second or (first.startswith(prefix) and second.startswith(prefix))
