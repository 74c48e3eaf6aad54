"""One value of a DeepSpeed JSON, held against its key: type, choices, range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from framework.dslint.facts import FALSE, TRUE
from framework.dslint.keys import Key
from framework.errors import Problem, show_value

_FLOATS_AS_WHOLE: Final = 2.0**63  # pydantic refuses a longer one: "exceeded maximum size"
_NAMES: Final = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a section of keys",
}


def value_problems(key: Key, dotted: str, value: Any) -> Iterator[Problem]:
    """Find what is wrong with one value, the type first."""
    if value is None:
        if not key.nullable:
            yield Problem(
                kind="wrong-type", key=dotted, value=None, reason="null where a value belongs", fix="leave the key out"
            )
        return
    wanted = " or ".join(_NAMES.get(kind, kind) for kind in key.types)
    if not any(_is_type(value, kind) for kind in key.types):
        if (
            key.reader == "pydantic"
            and "object" not in key.types
            and any(_passes_as(value, kind) for kind in key.types)
        ):
            reason = f"DeepSpeed turns it into {wanted}; other readers of this file will not"
            yield Problem(
                kind="loose-type", key=dotted, value=value, severity="warning", reason=reason, fix=f"write {wanted}"
            )
            if {"integer", "number"}.issuperset(key.types):  # DeepSpeed holds what it made of it against the limits
                yield from (replace(problem, value=value) for problem in _number_problems(key, dotted, float(value)))
        else:
            yield Problem(kind="wrong-type", key=dotted, value=value, reason=f"not {wanted}", fix=f"write {wanted}")
        return
    if key.from_python:
        yield Problem(
            kind="wrong-type", key=dotted, value=value, reason="only Python code can give this value", fix="remove it"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _number_problems(key, dotted, value)
    elif key.enum and not _is_choice(key, value):
        yield _no_choice(key, dotted, value)
    if isinstance(value, list) and not value and "number" in key.types:
        yield Problem(
            kind="wrong-value", key=dotted, value=value, reason="an empty list", fix="write one number per group"
        )
    if isinstance(value, list) and key.items and not all(_is_type(item, key.items) for item in value):
        words = _NAMES.get(key.items, key.items)
        yield Problem(
            kind="wrong-type",
            key=dotted,
            value=value,
            reason=f"not a list of which each is {words}",
            fix=f"write {words} for each",
        )
    elif isinstance(value, list) and key.items == "number":
        found = (problem for item in value for problem in _range_problems(key, dotted, item))
        yield from (replace(problem, value=value) for problem in list(found)[:1])


def _number_problems(key: Key, dotted: str, value: float) -> Iterator[Problem]:
    if key.enum and not _is_choice(key, value):
        yield _no_choice(key, dotted, value)
    yield from _range_problems(key, dotted, value)


def _no_choice(key: Key, dotted: str, value: Any) -> Problem:
    return Problem(
        kind="wrong-value",
        key=dotted,
        value=value,
        reason="not one of the choices",
        fix=f"write {', '.join(map(show_value, key.enum))}",
    )


def _range_problems(key: Key, dotted: str, value: float) -> Iterator[Problem]:
    limits = [
        (key.minimum is not None and value < key.minimum, f"at least {_plain(key.minimum)}"),
        (key.maximum is not None and value > key.maximum, f"at most {_plain(key.maximum)}"),
        (
            key.exclusive_minimum is not None and value <= key.exclusive_minimum,
            f"more than {_plain(key.exclusive_minimum)}",
        ),
        (
            key.exclusive_maximum is not None and value >= key.exclusive_maximum,
            f"less than {_plain(key.exclusive_maximum)}",
        ),
        (bool(key.multiple_of) and value % (key.multiple_of or 1) != 0, f"a multiple of {_plain(key.multiple_of)}"),
    ]
    for broken, words in limits:
        if broken:
            yield Problem(kind="wrong-value", key=dotted, value=value, reason="outside its range", fix=f"write {words}")


def _plain(number: float | None) -> str:
    return f"{number:g}" if number is not None else ""


def _is_choice(key: Key, value: Any) -> bool:
    if key.any_case and isinstance(value, str):
        return value.lower() in {str(choice).lower() for choice in key.enum}
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in key.enum)


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
        number = float(value) if kind == "number" else int(value)
    except ValueError:
        return False
    return number == number
