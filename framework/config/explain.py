"""Turns pydantic's validation errors into `Problem`s: dotted key, value, reason, fix, stable
kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deepspeed_lint.text.document import KeyPath
from deepspeed_lint.text.typos import nearest
from framework.config.base import WORDS_OF_PATTERNS, Target, choices_of, members_of
from framework.config.deepspeed_words import OWNED, TYPED, place_here, place_of_further
from framework.config.other_words import OtherWord, meaning, same_key, value_here
from framework.errors import Problem, Written, show_value

_WORDS: Final = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Optimizers that DeepSpeed knows by name and this framework does not: why, and what to write.
_OTHER_OPTIMIZERS: Final[dict[str, tuple[str, str]]] = _WORDS["other_optimizers"]
_SECTION: Final = "a section of keys"
# A key and a value, which YAML reads as one text.
_NO_SPACE: Final = re.compile(r"[a-z_]+:\S.*")
# The place of a class or function: package.module:name.
_OF_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# pydantic's error type -> the type that belongs there.
WANTED: Final[Mapping[str, str]] = _WORDS["wanted"]
# pydantic's error type -> (reason, fix), filled in from the error's context.
_OUT_OF_RANGE: Final[Mapping[str, Sequence[str]]] = _WORDS["out_of_range"]
# Keys where people write null to turn something off.
_TURNS_OFF: Final[Mapping[str, str]] = {
    "training.clip_grad_norm": "write 0 to turn clipping off, or leave the key out for 1.0"
}
# Keys of text that other tools switch on and off -> truth value -> what to write.
_SWITCHED: Final[Mapping[str, Mapping[bool, str]]] = {
    "checkpoint.resume": {
        True: "write auto, for the newest checkpoint of the run, or a path",
        False: "leave the key out",
    }
}
# Section -> the key that a number in the section's place means.
MAIN_KEYS: Final[Mapping[str, str]] = {
    "zero": "stage",
    "batch": "global_size",
    "training.lora": "r",
    "training.ema": "decay",
}
TRUTH: Final[Mapping[str, str]] = dict.fromkeys(
    ("yes", "on", "y", "true", "1"), "true"
) | dict.fromkeys(("no", "off", "n", "false", "0"), "false")


def explain(
    error: ValidationError, model: type[BaseModel], *, texts: Mapping[KeyPath, str] | None = None
) -> list[tuple[KeyPath, Problem]]:
    """Return all problems of one validation, each with the path of its value.

    Args:
        error: of pydantic.
        model: the class that was validated for.
        texts: texts of numbers that are written otherwise than they would be shown.
    """
    explained: dict[KeyPath, list[Problem]] = {}
    for details in error.errors(include_url=False):
        path, problem = _problem(details, model, texts or {})
        explained.setdefault(path, []).append(problem)
    merged = []
    for path, problems in explained.items():
        if _is_union_of_values(path, model):
            problems = [_one_of(problems)]
        merged += [(path, problem) for problem in problems]
    return merged


def _is_union_of_values(path: KeyPath, model: type[BaseModel]) -> bool:
    """Check whether a key takes values of several plain types, such as a word or a number: pydantic
    has an error for each of them.
    """
    annotation = descend(path, model)[2]
    members = [member for member in get_args(annotation) if member is not type(None)]
    return get_origin(annotation) in (Union, UnionType) and len(members) > 1


def _one_of(problems: Sequence[Problem]) -> Problem:
    """Join the problems of one value into the last one, whose fix names all that the key takes."""
    *others, last = problems
    alternatives = [problem.fix.removeprefix("write ") for problem in others]
    return replace(last, fix=", or ".join([last.fix, *alternatives]))


def numbers_for_text(error: ValidationError, model: type[BaseModel]) -> Iterator[KeyPath]:
    """Yield the paths of numbers and truth values where text belongs."""
    for details in error.errors(include_url=False):
        if details["type"] == "string_type" and isinstance(details["input"], (bool, int, float)):
            yield descend(details["loc"], model)[0]


def _problem(
    details: ErrorDetails, model: type[BaseModel], texts: Mapping[KeyPath, str]
) -> tuple[KeyPath, Problem]:
    """Return the path and the problem of one of pydantic's errors; `texts` as for `explain`."""
    path, owner, annotation = descend(details["loc"], model)
    key = ".".join(map(str, path))
    kind = details["type"]
    value = details["input"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        return path, _unknown_key(path, value, owner, model)
    if kind == "missing":
        return path, Problem("missing-key", "the key is required here", "add it", key)
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _unknown_kind(path, value, annotation)
    if kind == "plug_in":
        kind_path = (*path, "kind")
        key = ".".join(map(str, kind_path))
        return kind_path, replace(context["problem"], key=key, value=value["kind"])
    if kind in WANTED:
        return path, _value_of_wrong_type(path, value, WANTED[kind], texts)
    if kind == "string_pattern_mismatch":
        reason, suggest = WORDS_OF_PATTERNS[context["pattern"]]
        return path, Problem("wrong-value", reason, suggest(str(value)), key, value)
    reason, fix = _OUT_OF_RANGE.get(kind, ("{message}", ""))
    limits = {
        name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()
    }
    limits["message"] = details["msg"]
    return path, Problem("wrong-value", reason.format(**limits), fix.format(**limits), key, value)


def descend(loc: Sequence[str | int], model: type[BaseModel]) -> tuple[KeyPath, Any, Any]:
    """Return the path in the user's values, the type that owns its last key, and the type of the
    value there.

    pydantic puts the tag of a union's member between the keys of the path; the annotations
    distinguish the two.
    """
    path: list[str | int] = []
    owner: Any = model
    annotation: Any = model
    for part in loc:
        members = members_of(annotation)
        if part in members:
            annotation = members[str(part)]
        elif isinstance(part, int) and get_args(annotation):  # an item of a list
            path.append(part)
            owner = annotation
            annotation = _item_of(annotation)
        elif part != "[key]" and not _is_label(part, annotation):
            path.append(part)
            owner = annotation
            annotation = _type_of_field(annotation, str(part))
    return tuple(path), owner, annotation


def _item_of(annotation: Any) -> Any:
    """Return the type of the items of a list, or the union of sections that they are of."""
    item = get_args(annotation)[0]
    while not members_of(item) and get_args(item):
        item = get_args(item)[0]
    return item


def _type_of_field(owner: Any, name: str) -> Any:
    """Return the type of a section's field; of a section that may be left out the section's."""
    field = fields_of(owner).get(name)
    if field is None:
        return None
    if get_args(field.annotation)[1:] == (type(None),):
        return get_args(field.annotation)[0]
    return field.annotation


def _is_label(part: str | int, annotation: Any) -> bool:
    """Check whether pydantic names a member of a union of plain types, as ``literal['auto']``."""
    return get_origin(annotation) in (Union, UnionType) and not isinstance(part, int)


def fields_of(owner: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by name; empty for any other type."""
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return owner.model_fields
    return {}


def _value_of_wrong_type(
    path: KeyPath, value: Any, wanted: str, texts: Mapping[KeyPath, str]
) -> Problem:
    """Return the problem of a value that is not `wanted`, with the fix that its key is known for;
    `texts` as for `explain`.
    """
    key = ".".join(map(str, path))
    reason, fix = _wrong_type(value, wanted)
    shown = value
    if wanted == "text" and isinstance(value, (bool, int, float)):
        shown = Written(texts.get(path, show_value(value)))
        fix = f'write "{shown}", in quotes'
    fix = _fix_of_key(key, value, wanted) or fix
    return Problem("wrong-type", reason, fix, key, shown)


def _fix_of_key(key: str, value: Any, wanted: str) -> str:
    """Return the fix that a key is known for; empty if there is none."""
    if isinstance(value, bool):
        if key in _SWITCHED:
            return _SWITCHED[key][value]
        return ""
    if value is None:
        return _TURNS_OFF.get(key, "")
    if isinstance(value, (int, float)) and wanted != "text" and key in MAIN_KEYS:
        return f"write {{{MAIN_KEYS[key]}: {show_value(value)}}}"
    return ""


def _unknown_key(path: KeyPath, value: Any, owner: Any, root: type[BaseModel]) -> Problem:
    """Return the problem of a key that the section `owner` does not have, with the best guess at
    what was meant: a name of DeepSpeed or of another tool, a key of another section of `root`, or
    a similar key.
    """
    name = str(path[-1])
    known = fields_of(owner)
    reason = "there is no such key"
    fix = _fix_of_notation(name, value, known) or _name_of_deepspeed(path, value)
    if name == "kind" and "target" in known:
        reason = "the section names a target as well"
        fix = "keep kind or target, not both"
    if not fix:
        homes = list(homes_of(name, root))
        fix = _name_of_other_tools(path, owner, homes)
        if homes and not fix:
            reason = "there is no such key here"
            fix = f"it exists as {' and '.join(homes[:3])}"
    fix = fix or _similar_or_known(name, known)
    return Problem("unknown-key", reason, fix, ".".join(map(str, path)), value)


def _fix_of_notation(name: str, value: Any, known: Container[str]) -> str:
    """Return the fix of a key that YAML has made of other text; empty for other keys."""
    if value is not None:
        return ""
    before_colon = name.partition(":")[0]
    if before_colon in known and before_colon != name:
        return _with_space(name)
    if name.isdigit():
        return "write decimals with a point, such as 0.5, not with a comma"
    return ""


def _name_of_deepspeed(path: KeyPath, value: Any) -> str:
    """Return where a run config takes a key of DeepSpeed's; empty if it is none, or a switch."""
    name = str(path[-1])
    if len(path) > 1 and name not in OWNED:
        if path[:-1] == ("zero",):
            return _further_key_of_zero(name)
        return ""
    if is_plain_switch(name, value):
        return ""
    return place_here(name)


def _further_key_of_zero(name: str) -> str:
    """Return where a key of DeepSpeed's section of ZeRO goes that has no key in `zero`; empty if
    DeepSpeed has no such key.
    """
    from deepspeed_lint.keys import load_table  # for messages alone

    key = f"zero_optimization.{name}"
    if key in TYPED or load_table().exact(key) is None:
        return ""
    return place_of_further(key)


def _name_of_other_tools(path: KeyPath, owner: Any, homes: Sequence[str]) -> str:
    """Return what a word of other tools is here; empty if it is none, or adds nothing to the places
    of a key of this name.
    """
    if _is_own_code(owner):
        return ""
    word = meaning(str(path[-1]), str(path[0]))
    if word is None or is_at_home(word, homes):
        return ""
    return word.hint()


def _similar_or_known(name: str, known: Mapping[str, Any]) -> str:
    """Return the fix with the key that a name resembles, or else with all keys of the section."""
    guess = nearest(name, known)
    if guess:
        return f"did you mean '{guess}'?"
    if known:
        return f"known here: {', '.join(known)}"
    return "remove it"


def _is_own_code(owner: Any) -> bool:
    return isinstance(owner, type) and issubclass(owner, Target)


def is_plain_switch(name: str, value: Any) -> bool:
    """Check whether a name of DeepSpeed's is meant as a key of ours of the same name: `compile:
    true` is one, `compile: {deepcompile: true}` is DeepSpeed's section.
    """
    return name not in OWNED and not isinstance(value, Mapping) and same_key(name) is not None


def is_at_home(word: OtherWord, homes: Sequence[str]) -> bool:
    """Check whether the places of a key of ours are all that a word of other tools adds."""
    if not homes:
        return False
    places = {home.partition(" ")[0] for home in homes}
    return not word.keys or bool(places & set(word.keys))


# Kinds for code of the user's own, which has its own keys.
_OWN_CODE: Final = {"target", "object"}


def homes_of(name: str, root: type[BaseModel]) -> Iterator[str]:
    """Yield the places of a key of this name: ``section.key``, with the kinds that have it if not
    all have.
    """
    for section, field in root.model_fields.items():
        members = members_of(field.annotation)
        kinds = [tag for tag, member in members.items() if name in member.model_fields]
        lacking = members.keys() - {*kinds}
        if kinds and lacking <= _OWN_CODE:
            yield f"{section}.{name}"
        elif kinds:
            yield f"{section}.{name} of {', '.join(kinds)}"
        elif name in fields_of(field.annotation):
            yield f"{section}.{name}"


def _unknown_kind(path: KeyPath, value: Any, union: Any) -> tuple[KeyPath, Problem]:
    """Return path and problem of a section without a kind, or with one that `union` does not have.

    `path` is the section's; the path of the problem may be that of its key.
    """
    tag_key, choices = choices_of(union)
    choices_text = ", ".join(choices)
    if "target" in members_of(union):
        choices_text += ", or target: package.module:name"
    if not isinstance(value, Mapping):
        reason, fix = _wrong_type(value, _SECTION)
        if isinstance(value, str):
            fix = _section_for_text(path, value, union, choices_text)
        return path, Problem("wrong-type", reason, fix, ".".join(map(str, path)), value)
    kind = value.get(tag_key)
    if kind is None and value.get("target") is not None:
        target_path = (*path, "target")
        reason = "this section takes no code of your own"
        fix = f"use {tag_key}: one of {choices_text}"
        key = ".".join(map(str, target_path))
        return target_path, Problem("unsupported-target", reason, fix, key, value["target"])
    kind_path = (*path, tag_key)
    key = ".".join(map(str, kind_path))
    if kind is None:
        reason = "the section does not say which kind it is"
        fix = f"add {tag_key}: one of {choices_text}{_other_words_in(value, path, union)}"
        if path == ("data",) and tag_key not in value:
            fix += (
                "; keys without a kind belong to data that Python hands over (train_data=...), "
                "and none was"
            )
        return kind_path, Problem("missing-kind", reason, fix, key)
    if path[0] == "optimizer" and str(kind).lower() in _OTHER_OPTIMIZERS:
        return kind_path, _other_optimizer(key, kind)
    similar = _kind_for(path, tag_key, str(kind), choices)
    if similar:
        fix = f"did you mean '{similar[0]}'{similar[1]}? known: {choices_text}"
    else:
        fix = f"known: {choices_text}"
    return kind_path, Problem("unknown-kind", "there is no such kind", fix, key, kind)


def _section_for_text(path: KeyPath, text: str, union: Any, choices_text: str) -> str:
    """Return the fix of a text in the place of a section with a kind."""
    tag_key, choices = choices_of(union)
    if "target" in members_of(union) and _OF_CODE.fullmatch(text):
        return f"write {{target: {text}}}"
    guess = _kind_for(path, tag_key, text, choices)
    if guess is not None:
        return f"write {{{tag_key}: {guess[0]}}}{guess[1]}"
    return f"write {{{tag_key}: ...}}, one of {choices_text}"


def _kind_for(
    path: KeyPath, tag_key: str, text: str, choices: Sequence[str]
) -> tuple[str, str] | None:
    """Return the kind that a text means, and a remark in brackets or nothing: the kind itself, a
    value of another tool, or a misspelt one.
    """
    if text in choices:
        return text, ""
    here = value_here(".".join(map(str, (*path, tag_key))), text)
    if here is not None:
        ours, remark = here
        return ours, f" ({remark})" if remark else ""
    similar = nearest(text, choices)
    if similar is not None:
        return similar, ""
    return None


def _other_words_in(section: Mapping[str, Any], path: KeyPath, union: Any) -> str:
    """Return what keys of other tools mean in a section without a kind, to stand after a fix: a
    kind that is written as a switch, such as `bf16: true`, or another name of a key.
    """
    tag_key, choices = choices_of(union)
    hints = []
    known = {name for member in members_of(union).values() for name in member.model_fields}
    for name in map(str, section):
        here = value_here(".".join(map(str, (*path, tag_key))), name)
        word = meaning(name, str(path[0]))
        if name in choices:
            hints.append(f"for {name} write {tag_key}: {name}")
        elif here is not None:
            hints.append(f"for {name} write {tag_key}: {here[0]}")
        elif word is not None and word.keys and name not in known:
            hints.append(word.hint())
    return "".join(f"; {hint}" for hint in hints)


def _other_optimizer(key: str, kind: Any) -> Problem:
    reason, fix = _OTHER_OPTIMIZERS[str(kind).lower()]
    return Problem("unknown-kind", reason, fix, key, kind)


def _wrong_type(value: Any, wanted: str) -> tuple[str, str]:
    """Return the reason and the fix of a value of another type."""
    reason = f"{_type_name(value)} where {wanted} belongs"
    if wanted == _SECTION:
        return reason, _fix_of_no_section(value)
    if value is None:
        return reason, f"write {wanted}, or leave the key out"
    if isinstance(value, str) and wanted in ("a whole number", "a number"):
        return reason, _fix_of_no_number(value, wanted)
    if wanted == "true or false" and str(value).lower() in TRUTH:
        return reason, f"write {TRUTH[str(value).lower()]}"
    return reason, f"write {wanted}"


def _fix_of_no_section(value: Any) -> str:
    if value is None:
        return "write its keys under it, or leave the section out"
    if isinstance(value, str) and _NO_SPACE.fullmatch(value):
        return _with_space(value)
    return "write its keys under it"


def _fix_of_no_number(text: str, wanted: str) -> str:
    """Return the fix of a text where a number belongs."""
    if _is_number(text):
        return f"write {text.strip()} without quotes"
    if wanted == "a number" and text.strip().lower().lstrip("+-.") in ("nan", "inf", "infinity"):
        return "write a finite number"
    return f"write {wanted}"


def _with_space(text: str) -> str:
    """Return the fix of a key and a value without a space between them."""
    name, _, value = text.partition(":")
    return f"put a space after the colon: {name}: {value}"


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text[:100]))
    except ValueError:
        return False


def _type_name(value: Any) -> str:
    names: Mapping[type, str] = {
        str: "text",
        bool: "a truth value",
        int: "a whole number",
        float: "a number with a fraction",
        list: "a list",
        dict: _SECTION,
        type(None): "nothing",
    }
    return names.get(type(value), f"a {type(value).__name__}")
