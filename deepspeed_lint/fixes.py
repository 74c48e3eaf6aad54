"""Fixes in the text for the problems of a DeepSpeed JSON that have one safe answer.

Safe means that the answer is what the file already meant: a slip of one or two letters in a key,
another tool's word for it, a key that only one other section has, a number or a truth value in
quotes, a removed section that was switched off. The fixed file is judged again, and an edit that
brings an error of another kind is not made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from deepspeed_lint.errors import Problem, visible
from deepspeed_lint.facts import FALSE, TRUE, dotted
from deepspeed_lint.key_files import variant_of, was_off
from deepspeed_lint.keys import Key, KeyTable, is_slip, load_table
from deepspeed_lint.lint import lint
from deepspeed_lint.text.document import Document, KeyPath, at
from deepspeed_lint.text.edits import (
    Edit,
    MoveMember,
    RemoveMember,
    RenameKey,
    ReplaceValue,
    apply_edits,
    clash,
    edited_value,
    is_json,
)
from deepspeed_lint.text.hjson import parse_hjson

_LONGEST_SHOWN: Final = 80
_MOST_ROUNDS: Final = 10
# One edit at a time is tried only where all of them at once bring an error.
_MOST_TRIALS: Final = 50
# What stands in a section with a misspelt name was wrong before, unseen.
_OF_ONE_KEY: Final = (
    "unknown-key",
    "dotted-key",
    "comment-key",
    "removed-key",
    "key-of-another-release",
    "wrong-type",
    "wrong-value",
    "both-names",
    "auto-value",
)
_JSON_TYPES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
_Errors = Counter[tuple[str, str]]  # kind and key of each error


def fixed_text(document: Document, *, release: str | None = None) -> str:
    """Return the text of a JSON file with all safe fixes made; the same text without any, and for
    Hjson, which a person edits, see `lines_to_change`.

    Args:
        document: what was read.
        release: DeepSpeed's version; left out: the newest known.
    """
    if not is_json(document.text):
        return document.text
    for _ in range(_MOST_ROUNDS):  # edits that clash wait for the next round
        edits = safe_edits(document, release=release)
        if not edits:
            break
        document = parse_hjson(apply_edits(document, edits), name=document.name)
    return document.text


def lines_to_change(document: Document, *, release: str | None = None) -> list[str]:
    """Return a line for each safe fix of an Hjson file: place, what is there, what to write; none
    for JSON, which is edited.

    Args:
        document: what was read.
        release: DeepSpeed's version; left out: the newest known.
    """
    if is_json(document.text):
        return []
    edits = safe_edits(document, release=release)
    places = [(document.places[edit.path][0], edit) for edit in edits]
    places.sort(key=lambda place: place[0])
    return [f"{document.name}:{line}: {_in_words(edit, document)}" for line, edit in places]


def _in_words(edit: Edit, document: Document) -> str:
    """Return what an edit changes, as the key and value that are there and those to write."""
    key = dotted(edit.path)
    start, end = document.spans[edit.path].value
    value = _shown(document.text[start:end])
    match edit:
        case RenameKey(path, name):
            after = f"{dotted((*path[:-1], name))}: {value}"
        case MoveMember(_, to):
            after = f"{dotted(to)}: {value}"
        case ReplaceValue(_, new):
            after = f"{key}: {_shown(json.dumps(new, ensure_ascii=False))}"
        case _:
            after = "nothing"
    return f"{key}: {value} -> {after}"


def _shown(text: str) -> str:
    text = visible(" ".join(text.split()), keeps="")
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}..."


def safe_edits(document: Document, *, release: str | None = None) -> Sequence[Edit]:
    """Return edits that go together; none of them makes the file worse."""
    problems = lint(document, release=release)
    edits = _edits_for(problems, document, load_table(release))
    errors_before = _errors(problems)
    if not edits or _is_better(document.value, edits, errors_before, release):
        return edits
    return [
        edit
        for edit in edits[:_MOST_TRIALS]
        if _is_better(document.value, [edit], errors_before, release)
    ]


def _edits_for(problems: Sequence[Problem], document: Document, table: KeyTable) -> list[Edit]:
    """Return the edits that fix problems, as far as they can be made together."""
    edits: list[Edit] = []
    for problem in problems:
        for edit in _answers(problem, document.value, table):
            if _goes_with(edits, edit):
                edits.append(edit)
    return edits


def _goes_with(edits: Sequence[Edit], edit: Edit) -> bool:
    """Check whether an edit is new and can be made together with others."""
    return all(edit != other and not clash(edit, other) for other in edits)


def _errors(problems: Sequence[Problem]) -> _Errors:
    return Counter(
        (problem.kind, problem.key) for problem in problems if problem.severity == "error"
    )


def _is_better(
    value: Any, edits: Sequence[Edit], errors_before: _Errors, release: str | None
) -> bool:
    """Check whether the edits bring no error with them."""
    errors = _errors(lint(Document("", edited_value(value, edits)), release=release))
    renamed = [
        dotted((*edit.path[:-1], edit.name)) for edit in edits if isinstance(edit, RenameKey)
    ]
    return all(_was_unseen(kind, key, renamed) for kind, key in errors - errors_before)


def _was_unseen(kind: str, key: str, renamed: Sequence[str]) -> bool:
    """Check whether a new error is of a key that was wrong before, under a misspelt name."""
    inside = tuple(f"{name}." for name in renamed)
    if kind in _OF_ONE_KEY and key.startswith(inside):
        return True
    return kind == "wrong-type" and key in renamed  # quotes: fixed in the next round


def _answers(problem: Problem, values: Any, table: KeyTable) -> Iterator[Edit]:
    """Yield the edit that fixes a problem, if it has one safe answer."""
    path: KeyPath = tuple(problem.key.split("."))
    if not _has(values, path):
        return  # left out, or a name with a dot in it
    if problem.kind == "unknown-key":
        yield from _for_unknown(path, values, table)
    elif problem.kind == "removed-key" and was_off(problem.key, problem.value):
        yield RemoveMember(path)
    elif problem.kind in ("loose-type", "wrong-type"):
        yield from _for_type(problem, path, values, table)


def _for_type(problem: Problem, path: KeyPath, values: Any, table: KeyTable) -> Iterator[Edit]:
    """Yield the value in the type of its key."""
    key = table.get(list(map(str, path)), variant_of(values, path))
    if key is None:
        return
    meant = _in_its_type(problem.value, key, is_dropped=problem.kind == "loose-type")
    if meant is not None:
        yield ReplaceValue(path, meant)


def _for_unknown(path: KeyPath, values: Any, table: KeyTable) -> Iterator[Edit]:
    """Yield another name in the same section, or the only other section that has the name."""
    guesses = table.nearest(list(map(str, path)), variant_of(values, path))
    if len(guesses) != 1:
        return
    guess = tuple(guesses[0].split("."))
    key = table.get(guesses[0], variant_of(values, guess))
    if key is None or key.status != "read" or not _suits(at(values, path), key):
        return
    if guess[:-1] == path[:-1]:
        if is_slip(str(path[-1]), guess[-1]) and not _has(values, guess):
            yield RenameKey(path, guess[-1])
    elif _can_move(path, guess, values):
        yield MoveMember(path, guess)


def _can_move(path: KeyPath, target: KeyPath, values: Any) -> bool:
    """Check whether a key can move to the section that knows it; whole sections do not."""
    is_same_name = path[-1] == target[-1]
    return is_same_name and not isinstance(at(values, path), Mapping) and _is_free(target, values)


def _is_free(path: KeyPath, values: Any) -> bool:
    """Check whether a key can be put there: its section is there or can be made, and has none of
    the name.
    """
    for depth in range(1, len(path)):
        section = path[:depth]
        if not _has(values, section):
            # `enabled` and the like are for the user to write: only a section that works without
            # them is made.
            return path[0] == "zero_optimization" or depth > 1
        if not isinstance(at(values, section), Mapping):
            return False
    return not _has(values, path)


def _suits(value: Any, key: Key) -> bool:
    """Check whether the value can be meant for the key; quotes around a number are fixed in the
    next round.
    """
    if value is None or "any" in key.types:
        return True
    kind = _JSON_TYPES.get(type(value), "object")
    if kind in key.types or (kind == "integer" and "number" in key.types):
        return True
    return _in_its_type(value, key, is_dropped=False) is not None


def _in_its_type(value: Any, key: Key, *, is_dropped: bool) -> Any:
    """Return the value as it was meant; None where that is not clear.

    Args:
        value: text, or what DeepSpeed converts.
        key: what it is for.
        is_dropped: whether DeepSpeed converts the value itself; then it is converted as there.
    """
    if len(key.types) != 1 or key.from_python:
        return None
    if not is_dropped and not isinstance(value, str):
        return None
    convert = _CONVERSIONS.get(key.types[0])
    if convert is None:
        return None
    return convert(value)


def _as_truth(value: Any) -> bool | None:
    if not isinstance(value, str):
        return bool(value)
    word = value.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    return None


def _as_number(value: Any) -> float | None:
    """Return a finite number; a truth value was not meant as one."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def _as_whole(value: Any) -> int | None:
    number = _as_number(value)
    if number is None:
        return None
    if not isinstance(value, str) or value.strip().lstrip("+-").isdecimal():
        return int(value)  # exactly: a float may not hold it
    if number.is_integer():
        return int(number)
    return None


_CONVERSIONS: Final[Mapping[str, Callable[[Any], object]]] = {
    "boolean": _as_truth,
    "integer": _as_whole,
    "number": _as_number,
}


def _has(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
