"""`check --fix` for run configs: edits of the text for problems with one safe fix.

A fix is safe if the file meant the same: a misspelt key or kind with one likely name, a key in the
wrong section that only one other section has, a number in quotes, a truth value in another word.
Every edit is tried on a copy. It is not made if its problem stays, or if another problem appears in
the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepspeed_lint.text.document import Document, KeyPath, at, document_of, parse_scalar
from deepspeed_lint.text.edits import (
    Edit,
    InsertMember,
    MoveMember,
    RenameKey,
    ReplaceValue,
    edited_value,
)
from deepspeed_lint.text.typos import only_alike
from framework.config.base import choices_of
from framework.config.edits import edited
from framework.config.explain import (
    MAIN_KEYS,
    TRUTH,
    WANTED,
    descend,
    explain,
    fields_of,
    homes_of,
    is_at_home,
)
from framework.config.other_words import meaning, same_key, value_here
from framework.config.run_config import RunConfig, kind_of_default
from framework.errors import ConfigError

Edits = tuple[Edit, ...]

_MOST_EDITS: Final = 100
_ALIKE: Final = 0.75  # "stge" and "stage" are, "rate" and "ratio" are not
_KIND_ALIKE: Final = 0.8  # a kind changes what the run does: "fp61" could be fp16 or bf16


def fixed_run_config(text: str, path: Path, *, name: str) -> str:
    """Return the text of a run config with every problem fixed that has one safe fix, by 100 edits
    at most.

    Args:
        text: content of the file.
        path: the file; its ending decides between YAML and JSON.
        name: the file as the user gave it.

    Raises:
        ConfigError: the text cannot be read.
    """
    for _ in range(_MOST_EDITS):
        document = document_of(text, path, name=name)
        if not isinstance(document.value, dict):
            break
        new_text = _first_fix(document)
        if new_text is None:
            break
        text = new_text
    return text


def _first_fix(document: Document) -> str | None:
    """Return the text after the first good edit that the text allows, or None."""
    for edits in _good_edits(document.value):
        new_text = edited(document, edits)
        if new_text is not None:
            return new_text
    return None


def _good_edits(values: Mapping[str, Any]) -> Iterator[Edits]:
    """Yield the edits that solve their problem and bring no other to its place."""
    problems = _problems(values)
    paths_before = {path for path, _ in problems}
    for _, candidates in problems:
        for edits in candidates:
            new_paths = _paths_without_value_fix(edited_value(values, edits)) - paths_before
            if not any(_spoils(edits[-1], path) for path in new_paths):
                yield edits


def _paths_without_value_fix(values: Mapping[str, Any]) -> set[KeyPath]:
    """Return the places of problems that no other value in the same place would solve."""
    paths: set[KeyPath] = set()
    for path, candidates in _problems(values):
        if not any(isinstance(edits[-1], ReplaceValue) for edits in candidates):
            paths.add(path)
    return paths


def _spoils(edit: Edit, problem: KeyPath) -> bool:
    """Check whether a new problem speaks against the edit.

    Problems inside of a renamed section were there before, unseen.
    """
    if isinstance(edit, MoveMember):
        return problem[:1] == edit.to[:1]
    return problem == (edit.made or edit.path)


def _problems(values: Mapping[str, Any]) -> list[tuple[KeyPath, list[Edits]]]:
    """Return the path of every problem, and the edits that may solve it."""
    try:
        RunConfig.model_validate(dict(values))
    except ValidationError as error:
        paths = [path for path, _ in explain(error, RunConfig)]
        edits = [list(_candidates(details, values)) for details in error.errors(include_url=False)]
        return list(zip(paths, edits, strict=True))
    return []


def _candidates(details: ErrorDetails, values: Mapping[str, Any]) -> Iterator[Edits]:
    """Yield the edits, all made together, that may solve one of pydantic's errors."""
    path, owner, annotation = descend(details["loc"], RunConfig)
    kind = details["type"]
    value = details["input"]
    if not path or not all(isinstance(part, str) for part in path):
        return
    if kind == "extra_forbidden":
        yield from _for_unknown_key(path, owner, values)
    elif kind in ("union_tag_not_found", "union_tag_invalid"):
        yield from _for_unknown_kind(path, value, annotation)
    elif path == ("zero",) and isinstance(value, int) and not isinstance(value, bool):
        yield (ReplaceValue(path, {MAIN_KEYS["zero"]: value}),)
    elif kind in WANTED:
        converted = _convert(value, WANTED[kind])
        if converted is not None:
            yield (ReplaceValue(path, converted),)


def _for_unknown_key(path: KeyPath, owner: Any, values: Mapping[str, Any]) -> Iterator[Edits]:
    """Yield the key that another tool's word names, another name in the same section, or the move
    to the only section that has the name.
    """
    name = str(path[-1])
    known = fields_of(owner)
    if name == "kind" and "target" in known:
        return
    same = same_key(name, str(path[0]))
    if same is not None and same.count(".") == 1:
        yield from _moved(path, same, values)
        return
    homes = list(homes_of(name, RunConfig))
    word = meaning(name, str(path[0]))
    if word is not None and not is_at_home(word, homes):
        return  # another tool's word, for which there is more than one answer
    guess = only_alike(name, known, least=_ALIKE)
    siblings = at(values, path[:-1])
    is_plain = not isinstance(siblings[name], (Mapping, list))
    if guess is not None and not homes and guess not in siblings:
        yield (RenameKey(path, guess),)
    # A home such as "zero.x of cpu" is in one kind of a section only.
    if len(homes) == 1 and guess is None and is_plain and " " not in homes[0]:
        yield from _moved(path, homes[0], values)


def _moved(path: KeyPath, to: str, values: Mapping[str, Any]) -> Iterator[Edits]:
    """Yield what makes a member the key ``section.key`` named `to`, if that is not set."""
    section, _, key = to.partition(".")
    home = values.get(section)
    if section not in values:
        # A section that is written needs its kind, the default's.
        edits: list[Edit] = []
        for tag, kind in kind_of_default(section).items():
            edits.append(InsertMember((section, tag), kind))
        edits.append(MoveMember(path, (section, key)))
        yield tuple(edits)
    elif isinstance(home, Mapping) and home and key not in home:
        if path[:-1] == (section,):
            yield (RenameKey(path, key),)
        else:
            yield (MoveMember(path, (section, key)),)


def _for_unknown_kind(path: KeyPath, value: Any, union: Any) -> Iterator[Edits]:
    """Yield a section for a kind in the section's place, or the kind that a misspelt one means."""
    tag_key, choices = choices_of(union)
    if isinstance(value, str) and value in choices:
        yield (ReplaceValue(path, {tag_key: value}),)
    elif isinstance(value, Mapping):
        written = value.get(tag_key)
        if isinstance(written, str):
            guess = only_alike(written, choices, least=_KIND_ALIKE)
            here = value_here(".".join(map(str, (*path, tag_key))), written)
            if here is not None:
                guess = here[0] if not here[1] else None
            if guess is not None:
                yield (ReplaceValue((*path, tag_key), guess),)


def _convert(value: Any, wanted: str) -> Any:
    """Return the value in the type that belongs there; None if its meaning is not clear."""
    if wanted == "true or false":
        truth = TRUTH.get(str(value).lower())
        return None if truth is None else truth == "true"
    if wanted in ("a whole number", "a number") and isinstance(value, str):
        try:
            number = parse_scalar(value.strip())
        except ConfigError:
            return None
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if is_number and abs(number) < float("inf"):
            return number
    return None
