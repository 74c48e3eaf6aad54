"""The JSON Schema of DeepSpeed JSON, built from the key table of a release; `deepspeed.schema.json`
is the newest one.

Stricter than DeepSpeed on purpose: a key that DeepSpeed drops in silence is an error here, and so
is "auto", which only other tools fill in. What a schema cannot express is left to `check`: rules
between keys, and 1e3 where a whole number belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from deepspeed_lint.errors import MISSING
from deepspeed_lint.key_files import without_variant
from deepspeed_lint.keys import Key, KeyTable, load_table

Schema = dict[str, Any]
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_LIMITS: Final = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusive_minimum": "exclusiveMinimum",
    "exclusive_maximum": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu")


def deepspeed_schema(release: str | None = None) -> Schema:
    """Build the JSON Schema (draft 2020-12) of the DeepSpeed JSON that a release reads.

    Args:
        release: DeepSpeed's version; left out: the newest known.

    Raises:
        UsageError: there is no table of that release.
    """
    table = load_table(release)
    members = _members(table, "")
    editors = {
        "type": "string",
        "description": "Where editors find this schema; DeepSpeed does not look at it.",
    }
    return {
        "$schema": _DIALECT,
        "title": f"DeepSpeed {table.release} config",
        "description": f"What DeepSpeed {table.release} reads. Keys that it would drop in silence "
        "are refused here.",
        "type": "object",
        "properties": {"$schema": editors, **members.pop("properties")},
        **members,
        "additionalProperties": False,
        "anyOf": [{"required": [name]} for name in _BATCH],
    }


def _members(table: KeyTable, section: str) -> Schema:
    """Return the keys of a section: properties, which of them are required, and names that exclude
    each other.
    """
    named = _named_keys(table, section)
    properties = {key.name: _schema(table, key) for key in named}
    for key in named:
        for alias in key.aliases:
            same = {"$ref": _pointer(key.path), "description": f"Another name of {key.name}."}
            properties.setdefault(alias, same)
    schema: Schema = {"properties": properties}
    required = [key.name for key in named if key.required]
    if required:
        schema["required"] = required
    exclusive = list(_exclusive(named))
    if section and exclusive:
        schema["allOf"] = exclusive
    return schema


def _exclusive(keys: list[Key]) -> Iterator[Schema]:
    """Yield, for each alias, that it does not stand beside its key."""
    for key in keys:
        for alias in key.aliases:
            yield {"not": {"type": "object", "required": [key.name, alias]}}


def _named_keys(table: KeyTable, section: str) -> list[Key]:
    named = []
    for path in table.children(section):
        key = table.exact(path)
        if key is not None and key.name != "*":
            named.append(key)
    return named


def _schema(table: KeyTable, key: Key) -> Schema:
    """Return the schema of one key."""
    schema: Schema = {"description": _description(key, table.release)}
    if key.status == "refused":
        return {**schema, "not": {}}
    if key.from_python:
        return {**schema, "type": "null"} if key.nullable else {**schema, "not": {}}
    schema |= _type(key)
    if key.default is not MISSING:
        schema["default"] = key.default
    if key.status == "deprecated":
        schema["deprecated"] = True
    if key.examples:
        schema["examples"] = list(key.examples)
    return schema | _limits(key) | _inside(table, key)


def _inside(table: KeyTable, key: Key) -> Schema:
    """Return what stands in a list, or in a section."""
    schema: Schema = {}
    if "array" in key.types:
        schema |= _items(table, key)
    if "object" in key.types:
        schema |= _section(table, key)
    return schema


def _limits(key: Key) -> Schema:
    schema: Schema = {}
    for field, word in _LIMITS.items():
        limit = getattr(key, field)
        if limit is not None:
            schema[word] = limit
    return schema


def _type(key: Key) -> Schema:
    """Return the JSON type of a key, or its choices."""
    if key.enum:
        return _choices(key)
    if "any" in key.types:
        return {}
    types = list(key.types)
    if key.nullable:
        types.append("null")
    if len(types) == 1:
        return {"type": types[0]}
    return {"type": types}


def _choices(key: Key) -> Schema:
    choices = list(key.enum)
    adds_null = key.nullable and None not in key.enum
    if adds_null:
        choices.append(None)
    if not key.any_case:
        return {"enum": choices}
    spellings = "|".join(_in_any_case(str(choice)) for choice in key.enum)
    text_type = ["string", "null"] if adds_null else "string"
    return {"anyOf": [{"enum": choices}, {"type": text_type, "pattern": f"^({spellings})$"}]}


def _items(table: KeyTable, key: Key) -> Schema:
    element = table.exact(f"{key.path}.*")
    if element is not None:
        return {"items": _schema(table, element)}
    if key.items and key.items != "any":
        return {"items": {"type": key.items}}
    return {}


def _section(table: KeyTable, key: Key) -> Schema:
    """Return the keys in a section, and what else may stand there."""
    if key.status == "deprecated" and key.replaced_by and not table.children(key.path):  # bfloat16
        return {"$ref": _pointer(key.replaced_by[0])}
    schema = _members(table, key.path)
    schema |= _further_names(table, key)
    if not schema["properties"]:
        del schema["properties"]
    by_type = list(_by_type(table, key))
    if by_type:
        schema["allOf"] = by_type + schema.get("allOf", [])
    return schema


def _further_names(table: KeyTable, key: Key) -> Schema:
    """Return what may stand in a section beside its known keys."""
    any_name = table.exact(f"{key.path}.*")
    if any_name is not None and "array" not in key.types:
        return {"additionalProperties": _schema(table, any_name)}
    if key.unknown != "free" and not table.variants(key.path):
        return {"additionalProperties": False}
    return {}


def _by_type(table: KeyTable, key: Key) -> Iterator[Schema]:
    """Yield, for `optimizer` and `scheduler`, which parameters each type takes.

    torch's own types take what torch takes.
    """
    kind = table.exact(f"{key.path}.type")
    if kind is None:
        return
    params = f"{key.path}.params"
    for path in table:
        if path.startswith(f"{params}[") and path.endswith("]"):
            entry = table.exact(path)
            assert entry is not None
            yield _of_type(table, kind, path[len(params) + 1 : -1], entry)


def _of_type(table: KeyTable, kind: Key, variant: str, entry: Key) -> Schema:
    """Return the parameters of one type; of a refused type the name itself is wrong."""
    if kind.any_case:
        value = {"pattern": f"^{_in_any_case(variant)}$"}
    else:
        value = {"const": variant}
    where = "type" if entry.status == "refused" else "params"
    return {
        "if": {"required": ["type"], "properties": {"type": value}},
        "then": {"properties": {where: _schema(table, entry)}},
    }


def _description(key: Key, release: str) -> str:
    if key.status == "refused":
        return f"{key.sentence} DeepSpeed {release} refuses it: {_instead(key)}."
    if key.status == "deprecated":
        return f"{key.sentence} Deprecated: {_instead(key)}."
    if key.status == "inert":
        return f"{key.sentence} DeepSpeed does nothing with it: {_instead(key)}."
    if key.taken_by:
        return f"{key.sentence} Taken by {' and '.join(key.taken_by)} only."
    return key.sentence


def _instead(key: Key) -> str:
    if key.instead:
        return key.instead
    if key.replaced_by:
        return f"use {' or '.join(without_variant(path) for path in key.replaced_by)}"
    return "remove it"


def _in_any_case(word: str) -> str:
    """Return a pattern of the word; JSON Schema's have no flag for upper and lower case."""
    pattern = ""
    for letter in word:
        if letter.isalpha():
            pattern += f"[{letter.lower()}{letter.upper()}]"
        else:
            pattern += letter
    return pattern


def _pointer(path: str) -> str:
    return "#/" + "/".join(f"properties/{part}" for part in path.split("."))
