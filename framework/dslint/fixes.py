"""`check --fix`: the problems of a DeepSpeed JSON that have one safe answer, made good in the text.

Safe means that the answer says what the file already meant: a slip of one or two letters in a key,
another tool's word for it, a key that only one other section has, a number or a truth value in
quotes, a removed section that was switched off. What is made of the file is judged again, and an
edit that brings an error of another kind is not made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from framework.dslint.facts import FALSE, TRUE, dotted
from framework.dslint.key_files import variant_of, was_off
from framework.dslint.keys import Key, KeyTable, is_slip, load_table
from framework.dslint.lint import lint
from framework.errors import Problem
from framework.text.document import Document, KeyPath, at
from framework.text.edits import (
    Edit,
    MoveMember,
    RemoveMember,
    RenameKey,
    ReplaceValue,
    apply_edits,
    clash,
    edited_value,
)
from framework.text.hjson import parse_hjson

_MOST_ROUNDS: Final = 10
# one edit at a time is tried only where all of them at once bring an error
_MOST_TRIALS: Final = 50
# What stands in a section whose name was mended was wrong before, unseen.
_OF_ONE_KEY: Final = (
    *("unknown-key", "dotted-key", "comment-key", "removed-key", "key-of-another-release"),
    *("wrong-type", "wrong-value", "both-names", "auto-value"),
)


def fixed_text(document: Document, *, release: str | None = None) -> str:
    """The text with everything mended that has one safe answer; the same text where nothing has.

    Args:
        document: what was read.
        release: DeepSpeed's version; left out: the newest known.
    """
    for _ in range(_MOST_ROUNDS):  # edits that clash wait for the next round
        edits = safe_edits(document, release=release)
        if not edits:
            break
        document = parse_hjson(apply_edits(document, edits), name=document.name)
    return document.text


def safe_edits(document: Document, *, release: str | None = None) -> Sequence[Edit]:
    """Edits that go together and of which none makes the file worse."""
    table = load_table(release)
    problems = lint(document, release=release)
    edits = _together(
        edit for problem in problems for edit in _answers(problem, document.value, table)
    )
    before = _errors(problems)
    if not edits or _is_better(document.value, edits, before, release):
        return edits
    return [
        edit for edit in edits[:_MOST_TRIALS] if _is_better(document.value, [edit], before, release)
    ]


def _errors(problems: Sequence[Problem]) -> Counter[tuple[str, str]]:
    return Counter(
        (problem.kind, problem.key) for problem in problems if problem.severity == "error"
    )


def _is_better(
    value: Any, edits: Sequence[Edit], before: Counter[tuple[str, str]], release: str | None
) -> bool:
    """Check whether the edits bring no error with them."""
    after = _errors(lint(Document("", edited_value(value, edits)), release=release))
    renamed = [
        dotted((*edit.path[:-1], edit.name)) for edit in edits if isinstance(edit, RenameKey)
    ]
    inside = tuple(f"{key}." for key in renamed)
    return all(
        (kind in _OF_ONE_KEY and key.startswith(inside))
        or (kind == "wrong-type" and key in renamed)  # quotes: mended next
        for kind, key in after - before
    )


def _together(edits: Iterator[Edit]) -> Sequence[Edit]:
    chosen: list[Edit] = []
    for edit in edits:
        if all(edit != other and not clash(edit, other) for other in chosen):
            chosen.append(edit)
    return chosen


def _answers(problem: Problem, values: Any, table: KeyTable) -> Iterator[Edit]:
    path: KeyPath = tuple(problem.key.split("."))
    if not _has(values, path):
        return  # left out, or a name with a dot in it
    if problem.kind == "unknown-key":
        yield from _for_unknown(path, values, table)
    elif problem.kind == "removed-key" and was_off(problem.key, problem.value):
        yield RemoveMember(path)
    elif problem.kind in ("loose-type", "wrong-type"):
        key = table.get(list(map(str, path)), variant_of(values, path))
        if key is not None:
            meant = _in_its_type(problem.value, key, is_dropped=problem.kind == "loose-type")
        else:
            meant = None
        if meant is not None:
            yield ReplaceValue(path, meant)


def _for_unknown(path: KeyPath, values: Any, table: KeyTable) -> Iterator[Edit]:
    """Another name in the same section, or the same name in the only other section that has it."""
    guesses = table.nearest(list(map(str, path)), variant_of(values, path))
    if len(guesses) != 1:
        return
    *section, name = guesses[0].split(".")
    key = table.get(guesses[0], variant_of(values, (*section, name)))
    value = at(values, path)
    if key is None or key.status != "read" or not _suits(value, key):
        return
    if tuple(section) == path[:-1]:
        if is_slip(str(path[-1]), name) and not _has(values, (*section, name)):
            yield RenameKey(path, name)
    elif path[-1] == name and not isinstance(value, Mapping) and _is_free((*section, name), values):
        yield MoveMember(path, (*section, name))


def _is_free(path: KeyPath, values: Any) -> bool:
    """Check whether a key can be put there: its section is there or can be made, and has none of
    the name.
    """
    for depth in range(1, len(path)):
        if not _has(values, path[:depth]):
            # `enabled` and the like are not ours to say: only a section that works without them is
            # made
            return path[0] == "zero_optimization" or depth > 1
        if not isinstance(at(values, path[:depth]), Mapping):
            return False
    return not _has(values, path)


def _suits(value: Any, key: Key) -> bool:
    """Check whether the value can be meant for the key; quotes around a number are mended in the
    next round.
    """
    if value is None or "any" in key.types:
        return True
    kind = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}.get(
        type(value), "object"
    )
    fits = kind in key.types or (kind == "integer" and "number" in key.types)
    return fits or _in_its_type(value, key, is_dropped=False) is not None


def _in_its_type(value: Any, key: Key, *, is_dropped: bool) -> Any:
    """The value as it was meant; None where that is not clear. What DeepSpeed converts itself is
    converted as it does.
    """
    if len(key.types) != 1 or key.from_python or not (is_dropped or isinstance(value, str)):
        return None
    kind = key.types[0]
    if kind == "boolean":
        word = value.strip().lower() if isinstance(value, str) else value
        if is_dropped and not isinstance(word, str):
            return bool(word)
        if word in TRUE:
            return True
        if word in FALSE:
            return False
        return None
    if kind not in ("integer", "number"):
        return None
    try:
        number = float(value)
        if not isinstance(value, str) or value.strip().lstrip("+-").isdecimal():
            exact = int(value)
        else:
            exact = None
    except (ValueError, OverflowError):
        return None
    # a truth value is no number that somebody meant
    if not abs(number) < float("inf") or isinstance(value, bool):
        return None
    if kind == "number":
        return number
    if exact is not None:
        return exact
    if number.is_integer():
        return int(number)
    return None


def _has(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
