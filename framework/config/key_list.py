"""The keys of a run config as a list, from its JSON Schema: for the command `keys`, completion and
the page of the docs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from framework.config.schema import schema_text

Schema = Mapping[str, Any]
_FOLDER_OF_ONE_KEY: Final = "deepspeed"
_TYPES: Final[Mapping[str, str]] = {
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "string": "text",
    "array": "list",
    "object": "section",
}
_LIMITS: Final = (
    ("minimum", "≥ "),
    ("exclusiveMinimum", "> "),
    ("maximum", "≤ "),
    ("exclusiveMaximum", "< "),
)


@dataclass(frozen=True)
class KeyForm:
    """What a key is in one kind of its section, or in several that have it alike.

    Attributes:
        kinds: names of the kinds; none where the section has no kinds.
        type: words for the values that it takes.
        default: what holds where it is left out; empty: it is required.
        meaning: its sentence.
        example: a value that it takes, as it is written in a setting.
    """

    kinds: tuple[str, ...]
    type: str
    default: str
    meaning: str
    example: str


@cache
def key_forms() -> dict[str, tuple[KeyForm, ...]]:
    """Return every dotted key with its forms, in the order of the schema."""
    found: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for title, path, schema in schema_sections():
        kind = title.removeprefix(path).strip().rpartition(" ")[2]
        for name, field in schema.get("properties", {}).items():
            if "const" in field:
                continue
            is_required = name in schema.get("required", ())
            default = "" if is_required else value_words(field.get("default"))
            form = (type_words(field), default, sentences(field), _example(field))
            forms = found.setdefault(f"{path}.{name}".strip("."), {})
            forms.setdefault(form, []).append(kind)
    keys: dict[str, tuple[KeyForm, ...]] = {}
    for key, forms in found.items():
        keys[key] = tuple(
            KeyForm(tuple(filter(None, kinds)), *form) for form, kinds in forms.items()
        )
    return keys


def schema_sections() -> Iterator[tuple[str, str, Schema]]:
    """Yield heading, dotted path and schema of each section and of each kind of one."""
    schema = json.loads(schema_text())
    definitions = schema["$defs"]
    for name, field in schema["properties"].items():
        if name in ("$schema", _FOLDER_OF_ONE_KEY):
            continue
        found = _members(field, definitions)
        if len(found) > 1:
            yield name, name, _union(field, found)
        for member in found:
            yield f"{name}{_tag_words(member)}", name, member
            yield from _nested(name, member, definitions)


def _members(field: Schema, definitions: Mapping[str, Schema]) -> list[Schema]:
    each = field.get("items", field)  # of a list its items
    references = [each, *each.get("oneOf", ()), *each.get("anyOf", ())]
    return [definitions[each["$ref"].rpartition("/")[2]] for each in references if "$ref" in each]


def _union(field: Schema, found: list[Schema]) -> Schema:
    tags = [next(_tags(member), ("", "")) for member in found]
    kinds = {
        "enum": [value for _, value in tags if value],
        "description": "Which of the kinds below.",
    }
    return {"description": field["description"], "properties": {tags[0][0]: kinds}}


def _nested(
    path: str, section: Schema, definitions: Mapping[str, Schema], *, is_deep: bool = False
) -> Iterator[tuple[str, str, Schema]]:
    for name, field in section.get("properties", {}).items():
        found = _members(field, definitions)
        if is_deep and len(found) > 1:
            continue  # a set of data within `data.parts` has the keys of `data`
        if len(found) > 1:
            yield f"{path}.{name}", f"{path}.{name}", _union(field, found)
        for member in found:
            yield f"{path}.{name}{_tag_words(member)}", f"{path}.{name}", member
            yield from _nested(f"{path}.{name}", member, definitions, is_deep=True)


def _tags(schema: Schema) -> Iterator[tuple[str, str]]:
    for key, value in schema.get("properties", {}).items():
        if "const" in value:
            yield key, value["const"]


def _tag_words(schema: Schema) -> str:
    """Return `` kind: lenet``, by which a member of a union differs from the others."""
    key, value = next(_tags(schema), ("", ""))
    if key:
        return f" {key}: {value}"
    if "target" in schema.get("properties", {}):
        return " target"
    return ""


def type_words(field: Schema) -> str:
    """Return the values that a key takes, in words; what is code stands in backticks."""
    members = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if members:
        names = dict.fromkeys(type_words(each) for each in members if each.get("type") != "null")
        return " or ".join(names)
    if "$ref" in field:
        return "section"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    words = [_TYPES.get(field.get("type", ""), "any")]
    words += [f"{sign}{_number(field[key])}" for key, sign in _LIMITS if key in field]
    return " ".join(words)


def value_words(value: Any) -> str:
    """Return a default in words; a value stands in backticks."""
    if value is None:
        return "left out"
    if type(value) in (int, float):
        return f"`{_number(value)}`"
    text = json.dumps(value).replace('"', "")
    return f"`{text}`" if text else "empty"


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) < 10_000:
        return str(value)
    text = f"{value:g}".replace("e+0", "e")
    return text if float(text) == value else str(value)


def sentences(schema: Schema) -> str:
    """Return the description of a key or section on one line."""
    text: str = schema.get("description", "")
    return " ".join(text.replace("``", "`").split())


def _example(field: Schema) -> str:
    """Return a value that a key takes: its default, one of its choices, or a small number."""
    default = field.get("default")
    if default not in (None, "", [], {}):
        return _as_setting(default)
    for member in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
        example = _example_of_type(member)
        if example:
            return example
    return "'{...}'"


_EXAMPLES: Final = {"boolean": "true", "string": "TEXT", "array": "'[...]'"}


def _example_of_type(field: Schema) -> str:
    """Return a value of a plain type: a choice, a small number, or text; empty for a section."""
    if "enum" in field:
        return str(field["enum"][0])
    if "const" in field:
        return str(field["const"])
    if field.get("type") in ("integer", "number"):
        return _number(max(1, field.get("minimum", 1), field.get("exclusiveMinimum", 0)))
    return _EXAMPLES.get(field.get("type", ""), "")


def _as_setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, str):
        return value
    return f"'{json.dumps(value).replace(chr(34), '')}'"
