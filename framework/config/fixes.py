"""`check --fix` for run configs: the problems that have one safe answer, made good in the text.

Safe means that the answer says what the file already meant: a misspelt key or kind with one likely name, a key in the
wrong section that only one other section has, a number in quotes, a truth value in another word. Every edit is tried on
a copy: what does not make its problem go away, or brings another one to the same place, is not made.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from framework.config.base import Target, choices_of
from framework.config.explain import TRUTH, WANTED, descend, explain, homes_of, members_of
from framework.config.run_config import RunConfig, kind_of_default
from framework.errors import ConfigError
from framework.text.document import KeyPath, at, document_of, parse_scalar
from framework.text.yaml_edits import Edit, Move, Rename, Replace, edited, edited_value

_MOST_EDITS: Final = 100
_ALIKE: Final = 0.75  # "stge" and "stage" are, "rate" and "ratio" are not
_KIND_ALIKE: Final = 0.8  # a kind changes what the run does: "fp61" could be fp16 or bf16
_SECOND: Final = 0.6  # as near as this, another name may have been meant...
_AHEAD: Final = 0.25  # ...unless the nearest one is nearer by this much


def fixed_run_config(text: str, path: Path, *, name: str) -> str:
    """The text of a run config with everything mended that has one safe answer; the same text where nothing has.

    Args:
        text: what the file holds.
        path: the file, whose ending says YAML or JSON.
        name: the file as the user gave it.

    Raises:
        ConfigError: the text cannot be read.
    """
    for _ in range(_MOST_EDITS):
        value = document_of(text, path, name=name).value
        if not isinstance(value, dict):
            break
        attempts = (edited(text, edit, path) for edit in _good_edits(value))
        after = next((attempt for attempt in attempts if attempt is not None), None)
        if after is None:
            break
        text = after
    return text


def _good_edits(values: Mapping[str, Any]) -> Iterator[Edit]:
    """Edits after which their problem is gone and their place is in order."""
    before = {path for path, _ in _problems(values)}
    for details in _details(values):
        for edit in _answers(details, values):
            if not any(_spoils(edit, path) for path in _unanswered(edited_value(values, edit)) - before):
                yield edit


def _spoils(edit: Edit, problem: KeyPath) -> bool:
    """Check whether a new problem speaks against the edit. What is wrong inside of a renamed section was wrong before,
    unseen.
    """
    if isinstance(edit, Move):
        return problem[:1] == edit.to[:1]
    return problem == ((*edit.path[:-1], edit.name) if isinstance(edit, Rename) else edit.path)


def _unanswered(values: Mapping[str, Any]) -> set[KeyPath]:
    """Places of the problems that another value in the same place would not solve for sure."""
    answered = {
        edit.path for details in _details(values) for edit in _answers(details, values) if isinstance(edit, Replace)
    }
    return {path for path, _ in _problems(values)} - answered


def _details(values: Mapping[str, Any]) -> list[ErrorDetails]:
    try:
        RunConfig.model_validate(dict(values))
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _problems(values: Mapping[str, Any]) -> list[tuple[KeyPath, Any]]:
    try:
        RunConfig.model_validate(dict(values))
    except ValidationError as error:
        return list(explain(error, RunConfig))
    return []


def _answers(details: ErrorDetails, values: Mapping[str, Any]) -> Iterator[Edit]:
    path, owner, annotation = descend(details["loc"], RunConfig)
    kind, value = details["type"], details["input"]
    if not path or not all(isinstance(part, str) for part in path):
        return
    if kind == "extra_forbidden":
        yield from _for_unknown_key(path, owner, values)
    elif kind in ("union_tag_not_found", "union_tag_invalid"):
        yield from _for_unknown_kind(path, value, members_of(annotation))
    elif kind in WANTED:
        meant = _as_wanted(value, WANTED[kind])
        if meant is not None:
            yield Replace(path, meant)


def _for_unknown_key(path: KeyPath, owner: Any, values: Mapping[str, Any]) -> Iterator[Edit]:
    name, known = str(path[-1]), list(owner.model_fields) if _is_model(owner) else []
    if name == "kind" and _is_model(owner) and issubclass(owner, Target):
        return
    elsewhere, guess = list(homes_of(name, RunConfig)), _only_alike(name, known, least=_ALIKE)
    siblings = at(values, path[:-1])
    if guess is not None and not elsewhere and guess not in siblings:
        yield Rename(path, guess)
    if len(elsewhere) == 1 and guess is None and " " not in elsewhere[0]:  # "zero.x of cpu" holds for one kind only
        section, _, key = elsewhere[0].partition(".")
        home = values.get(section, {})
        if isinstance(home, Mapping) and key not in home:
            # A section that is left out is of a kind all the same, which has to be said once it is written.
            kind = None if section in values else next(iter(kind_of_default(section).items()), None)
            yield Move(path, (section, key), kind)


def _for_unknown_kind(path: KeyPath, value: Any, known: Mapping[str, type[BaseModel]]) -> Iterator[Edit]:
    tag_key, choices = choices_of(known)
    if isinstance(value, str) and value in choices:
        yield Replace(path, {tag_key: value})
    elif isinstance(value, Mapping) and isinstance(written := value.get(tag_key), str):
        meant = _only_alike(written, choices, least=_KIND_ALIKE)
        if meant is not None:
            yield Replace((*path, tag_key), meant)


def _as_wanted(value: Any, wanted: str) -> Any:
    """The same value in the type that belongs there; None where that is not clear."""
    if wanted == "true or false":
        return {"true": True, "false": False}.get(TRUTH.get(str(value).lower(), ""))
    if wanted in ("a whole number", "a number") and isinstance(value, str):
        try:
            number = parse_scalar(value.strip(), name="")
        except ConfigError:
            return None
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        return number if is_number and abs(number) < float("inf") else None
    return None


def _only_alike(word: str, known: Iterable[str], *, least: float) -> str | None:
    """The one known word that is like a misspelt one, if no other comes near."""
    written = _plain(word[:100])
    ranked = sorted(((_likeness(written, _plain(name)), name) for name in known), reverse=True)
    if not ranked or ranked[0][0] < least:
        return None
    second = ranked[1][0] if len(ranked) > 1 else 0.0
    return ranked[0][1] if second < _SECOND or ranked[0][0] - second >= _AHEAD else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _is_model(owner: Any) -> bool:
    return isinstance(owner, type) and issubclass(owner, BaseModel)
