"""`check --fix` for run configs: the problems that have one safe answer, made good in the text.

Safe means that the answer says what the file already meant: a misspelt key or kind with one likely
name, a key in the wrong section that only one other section has, a number in quotes, a truth value
in another word. Every edit is tried on a copy: what does not make its problem go away, or brings
another one to the same place, is not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from framework.config.base import choices_of, members_of
from framework.config.explain import TRUTH, WANTED, descend, explain, fields_of, homes_of
from framework.config.run_config import RunConfig, kind_of_default
from framework.errors import ConfigError
from framework.text.document import KeyPath, at, document_of, parse_scalar
from framework.text.edits import (
    Edit,
    InsertMember,
    MoveMember,
    RenameKey,
    ReplaceValue,
    edited,
    edited_value,
)
from framework.text.typos import only_alike

Answer = tuple[Edit, ...]

_MOST_EDITS: Final = 100
_ALIKE: Final = 0.75  # "stge" and "stage" are, "rate" and "ratio" are not
_KIND_ALIKE: Final = 0.8  # a kind changes what the run does: "fp61" could be fp16 or bf16


def fixed_run_config(text: str, path: Path, *, name: str) -> str:
    """The text of a run config with everything mended that has one safe answer; the same text where
    nothing has.

    Args:
        text: what the file holds.
        path: the file, whose ending says YAML or JSON.
        name: the file as the user gave it.

    Raises:
        ConfigError: the text cannot be read.
    """
    for _ in range(_MOST_EDITS):
        document = document_of(text, path, name=name)
        if not isinstance(document.value, dict):
            break
        attempts = (edited(document, edits) for edits in _good_edits(document.value))
        after = next((attempt for attempt in attempts if attempt is not None), None)
        if after is None:
            break
        text = after
    return text


def _good_edits(values: Mapping[str, Any]) -> Iterator[Answer]:
    """Answers after which their problem is gone and their place is in order."""
    found = _found(values)
    before = {path for path, _ in found}
    for _, answers in found:
        for answer in answers:
            after = _found(edited_value(values, answer))
            # Another value in the same place would solve those that have one.
            new = {
                path
                for path, further in after
                if not any(isinstance(edit, ReplaceValue) for *_, edit in further)
            }
            if not any(_spoils(answer[-1], path) for path in new - before):
                yield answer


def _spoils(edit: Edit, problem: KeyPath) -> bool:
    """Check whether a new problem speaks against the edit. What is wrong inside of a renamed
    section was wrong before, unseen.
    """
    if isinstance(edit, MoveMember):
        return problem[:1] == edit.to[:1]
    return problem == (edit.made or edit.path)


def _found(values: Mapping[str, Any]) -> list[tuple[KeyPath, list[Answer]]]:
    """The path of every problem, and what may be done about it."""
    try:
        RunConfig.model_validate(dict(values))
    except ValidationError as error:
        paths = [path for path, _ in explain(error, RunConfig)]
        answers = [list(_answers(details, values)) for details in error.errors(include_url=False)]
        return list(zip(paths, answers, strict=True))
    return []


def _answers(details: ErrorDetails, values: Mapping[str, Any]) -> Iterator[Answer]:
    path, owner, annotation = descend(details["loc"], RunConfig)
    kind = details["type"]
    value = details["input"]
    if not path or not all(isinstance(part, str) for part in path):
        return
    if kind == "extra_forbidden":
        yield from _for_unknown_key(path, owner, values)
    elif kind in ("union_tag_not_found", "union_tag_invalid"):
        yield from _for_unknown_kind(path, value, members_of(annotation))
    elif kind in WANTED:
        meant = _as_wanted(value, WANTED[kind])
        if meant is not None:
            yield (ReplaceValue(path, meant),)


def _for_unknown_key(path: KeyPath, owner: Any, values: Mapping[str, Any]) -> Iterator[Answer]:
    name = str(path[-1])
    known = fields_of(owner)
    if name == "kind" and "target" in known:
        return
    elsewhere = list(homes_of(name, RunConfig))
    guess = only_alike(name, known, least=_ALIKE)
    siblings = at(values, path[:-1])
    is_plain = not isinstance(siblings[name], (Mapping, list))
    if guess is not None and not elsewhere and guess not in siblings:
        yield (RenameKey(path, guess),)
    # "zero.x of cpu": one kind only
    if len(elsewhere) == 1 and guess is None and is_plain and " " not in elsewhere[0]:
        section, _, key = elsewhere[0].partition(".")
        home = values.get(section)
        # it is of a kind all the same, which has to be said once it is written
        if section not in values:
            kind = [
                InsertMember((section, tag), name) for tag, name in kind_of_default(section).items()
            ]
            yield (*kind, MoveMember(path, (section, key)))
        elif isinstance(home, Mapping) and home and key not in home:
            yield (MoveMember(path, (section, key)),)


def _for_unknown_kind(
    path: KeyPath, value: Any, known: Mapping[str, type[BaseModel]]
) -> Iterator[Answer]:
    tag_key, choices = choices_of(known)
    if isinstance(value, str) and value in choices:
        yield (ReplaceValue(path, {tag_key: value}),)
    elif isinstance(value, Mapping) and isinstance(written := value.get(tag_key), str):
        meant = only_alike(written, choices, least=_KIND_ALIKE)
        if meant is not None:
            yield (ReplaceValue((*path, tag_key), meant),)


def _as_wanted(value: Any, wanted: str) -> Any:
    """The same value in the type that belongs there; None where that is not clear."""
    if wanted == "true or false":
        return {"true": True, "false": False}.get(TRUTH.get(str(value).lower(), ""))
    if wanted in ("a whole number", "a number") and isinstance(value, str):
        try:
            number = parse_scalar(value.strip())
        except ConfigError:
            return None
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if is_number and abs(number) < float("inf"):
            return number
        return None
    return None
