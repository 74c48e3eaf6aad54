"""The JSON Schema of DeepSpeed JSON, built from the key table of a release; `deepspeed.schema.json`
is the newest one.

Stricter than DeepSpeed on purpose: a key that DeepSpeed drops in silence is an error here, and so
is "auto", which only other tools fill in. What a schema cannot say is left to `check`: rules
between keys, and 1e3 where a whole number belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from framework.dslint.key_files import without_variant
from framework.dslint.keys import Key, KeyTable, load_table
from framework.errors import MISSING

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
    """JSON Schema (draft 2020-12) of the DeepSpeed JSON that a release reads.

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
    """The keys of a section: properties, which of them are required, and names that exclude each
    other.
    """
    keys = [key for path in table.children(section) if (key := table.exact(path)) is not None]
    named = [key for key in keys if key.name != "*"]
    schema: Schema = {"properties": {key.name: _schema(table, key) for key in named}}
    for key in named:
        for alias in key.aliases:
            same = {"$ref": _pointer(key.path), "description": f"Another name of {key.name}."}
            schema["properties"].setdefault(alias, same)
    required = [key.name for key in named if key.required]
    if required:
        schema["required"] = required
    twice = [[key.name, alias] for key in named if section for alias in key.aliases]
    if twice:
        schema["allOf"] = [{"not": {"type": "object", "required": pair}} for pair in twice]
    return schema


def _schema(table: KeyTable, key: Key) -> Schema:
    """One key."""
    description = {"description": _description(key, table.release)}
    if key.status == "refused":
        return {**description, "not": {}}
    if key.from_python:
        return {**description, **({"type": "null"} if key.nullable else {"not": {}})}
    schema = {**description, **_type(key)}
    if key.default is not MISSING:
        schema["default"] = key.default
    if key.status == "deprecated":
        schema["deprecated"] = True
    if key.examples:
        schema["examples"] = list(key.examples)
    schema |= {
        word: limit for name, word in _LIMITS.items() if (limit := getattr(key, name)) is not None
    }
    if "array" in key.types:
        schema |= _items(table, key)
    if "object" in key.types:
        schema |= _section(table, key)
    return schema


def _type(key: Key) -> Schema:
    """The JSON type or the choices."""
    null = [None] if key.nullable and None not in key.enum else []
    if key.enum and key.any_case:
        spellings = "|".join(_in_any_case(str(choice)) for choice in key.enum)
        anything = {"type": ["string", "null"] if null else "string", "pattern": f"^({spellings})$"}
        return {"anyOf": [{"enum": [*key.enum, *null]}, anything]}
    if key.enum:
        return {"enum": [*key.enum, *null]}
    if "any" in key.types:
        return {}
    types = [*key.types, *(["null"] if key.nullable else [])]
    return {"type": types[0] if len(types) == 1 else types}


def _items(table: KeyTable, key: Key) -> Schema:
    element = table.exact(f"{key.path}.*")
    if element is not None:
        return {"items": _schema(table, element)}
    if key.items and key.items != "any":
        return {"items": {"type": key.items}}
    return {}


def _section(table: KeyTable, key: Key) -> Schema:
    """The keys in a section, and what else may stand there."""
    if key.status == "deprecated" and key.replaced_by and not table.children(key.path):  # bfloat16
        return {"$ref": _pointer(key.replaced_by[0])}
    schema = _members(table, key.path)
    names = table.exact(f"{key.path}.*")
    if names is not None and "array" not in key.types:
        schema["additionalProperties"] = _schema(table, names)
    elif key.unknown != "free" and not table.variants(key.path):
        schema["additionalProperties"] = False
    typed = list(_by_type(table, key))
    if not schema["properties"]:
        del schema["properties"]
    if typed:
        return {**schema, "allOf": typed + schema.get("allOf", [])}
    return schema


def _by_type(table: KeyTable, key: Key) -> Iterator[Schema]:
    """For `optimizer` and `scheduler`: which parameters each type takes. torch's own types take
    what torch takes.
    """
    kind = table.exact(f"{key.path}.type")
    params = f"{key.path}.params"
    tables = [path for path in table if path.startswith(f"{params}[") and path.endswith("]")]
    if kind is None:
        return
    for path in tables:
        variant = path[len(params) + 1 : -1]
        if kind.any_case:
            value = {"pattern": f"^{_in_any_case(variant)}$"}
        else:
            value = {"const": variant}
        entry = table.exact(path)
        assert entry is not None
        # Of a refused type the name itself is wrong, whatever its parameters.
        if entry.status == "refused":
            then = {"type": _schema(table, entry)}
        else:
            then = {"params": _schema(table, entry)}
        yield {
            "if": {"required": ["type"], "properties": {"type": value}},
            "then": {"properties": then},
        }


def _description(key: Key, release: str) -> str:
    others = " or ".join(without_variant(path) for path in key.replaced_by)
    use = key.instead or (f"use {others}" if others else "remove it")
    if key.status == "refused":
        return f"{key.sentence} DeepSpeed {release} refuses it: {use}."
    if key.status == "deprecated":
        return f"{key.sentence} Deprecated: {use}."
    if key.status == "inert":
        return f"{key.sentence} DeepSpeed does nothing with it: {use}."
    if key.taken_by:
        return f"{key.sentence} Taken by {' and '.join(key.taken_by)} only."
    return key.sentence


def _in_any_case(word: str) -> str:
    """A pattern of the word; JSON Schema's have no flag for upper and lower case."""
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in word)


def _pointer(path: str) -> str:
    return "#/" + "/".join(f"properties/{part}" for part in path.split("."))
