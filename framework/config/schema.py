"""The JSON Schema of run configs, as packaged in ``run.schema.json`` for editors.

python -m framework.config.schema        builds it anew and writes the file
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from framework import registry

if TYPE_CHECKING:
    from framework.config.base import Section

PACKAGED: Final = Path(__file__).with_name("run.schema.json")


def schema_text() -> str:
    """Return the packaged JSON Schema, or build it anew if the file is missing or empty, or where
    installed packages register kinds.

    A test keeps the packaged one current.

    Raises:
        ConfigError: a kind of an installed package cannot be loaded.
    """
    has_plug_ins = any(registry.installed(group) for group in registry.KINDS)
    if PACKAGED.exists() and not has_plug_ins:
        text = PACKAGED.read_text(encoding="utf-8")
        if text.strip():
            return text
    return new_schema_text()


def new_schema_text() -> str:
    """Build the JSON Schema from the models, which takes ten times as long as reading it."""
    from framework.config.base import load_all_kinds

    load_all_kinds()
    return json.dumps(run_schema(), indent=2) + "\n"


def _build_sections(section: type[Section]) -> None:
    """Build the deferred classes below one: pydantic before 2.14 writes no default of others."""
    for kind in section.__subclasses__():
        kind.model_rebuild()
        _build_sections(kind)


def run_schema() -> dict[str, Any]:
    """Build the JSON Schema (draft 2020-12) of a run config file, with the built-in kinds and those
    of packages that are loaded.
    """
    # here: the models take half a second
    from framework.config.base import Section
    from framework.config.run_config import AUTO, AUTO_KEYS, RunConfig

    _build_sections(Section)
    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    _remove_objects(schema)
    for section in definitions.values():
        _require_tag(section)
    for section in (schema, *definitions.values()):
        for field in section["properties"].values():
            # The title is the key in capitals; editors would show it above the sentence.
            field.pop("title", None)
    for key in AUTO_KEYS:
        section_name, _, name = key.partition(".")
        _accept_auto(definitions[section_name.title()]["properties"][name], AUTO)
    _accept_auto(schema["properties"]["parallel"], AUTO)
    schema["properties"]["$schema"] = {
        "type": "string",
        "description": "Where editors find this schema.",
    }
    schema["properties"]["deepspeed"]["properties"] = _further_keys()
    schema["properties"]["deepspeed"]["additionalProperties"] = False
    schema["title"] = "dsf-trainer run config"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _remove_objects(schema: dict[str, Any]) -> None:
    """Remove the sections of objects from Python, which a file cannot name."""
    definitions = schema["$defs"]
    objects = ("Object", "DataObject", "OptimizerObject")
    for name in objects:
        del definitions[name]
    for section in (schema, *definitions.values()):
        for field in section["properties"].values():
            if "oneOf" in field:
                field["oneOf"] = [
                    member
                    for member in field["oneOf"]
                    if member["$ref"].rpartition("/")[2] not in objects
                ]


def _require_tag(section: dict[str, Any]) -> None:
    """Require the key that distinguishes the members of a union; its sentence is the class's."""
    from framework.config.base import TAG_KEYS

    for key in TAG_KEYS:
        tag = section["properties"].get(key, {})
        if "const" in tag:
            del tag["default"]
            tag["description"] = section["description"]
            section["required"] = [key, *section.get("required", [])]


def _accept_auto(field: dict[str, Any], auto: str) -> None:
    """Let a field also be ``auto``; default and description stay where editors look for them."""
    kept: dict[str, Any] = {}
    for key in ("default", "description"):
        if key in field:
            kept[key] = field.pop(key)
    members = field.pop("anyOf", None) or [dict(field)]
    field.clear()
    field["anyOf"] = [*members, {"const": auto}]
    field.update(kept)


def _further_keys() -> dict[str, Any]:
    """Return the schemas of the keys that a file may write under `deepspeed:`.

    These are all of PASSED_THROUGH, and of the SHARED sections the keys that the run config has no
    field of its own for (TYPED).
    """
    from deepspeed_lint.schema import deepspeed_schema
    from framework.config.deepspeed_words import PASSED_THROUGH, SHARED, TYPED

    of_deepspeed: dict[str, Any] = deepspeed_schema()["properties"]
    schemas = {name: of_deepspeed[name] for name in sorted(PASSED_THROUGH)}
    for name in sorted(SHARED):
        section = _without(TYPED.keys(), of_deepspeed[name], name)
        if section:
            schemas[name] = section
    text = json.dumps(schemas)
    # References are to the root of the run config's schema.
    moved: dict[str, Any] = json.loads(
        text.replace('"$ref": "#', '"$ref": "#/properties/deepspeed')
    )
    return moved


def _without(typed: Set[str], schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a section's schema without typed keys, references and deprecated keys; empty if no key
    is left.

    `path` is the section's, such as ``zero_optimization``.
    """
    members: dict[str, Any] = {}
    for name, member in schema.get("properties", {}).items():
        kept_member = _member_without(typed, member, f"{path}.{name}")
        if kept_member:
            members[name] = kept_member
    if not members:
        return {}
    kept: dict[str, Any] = {
        key: schema[key] for key in ("description", "additionalProperties") if key in schema
    }
    kept["type"] = "object"
    kept["properties"] = members
    return kept


def _member_without(typed: Set[str], schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of a key as `_without` has it; empty for one that is left out."""
    if path in typed or "$ref" in schema or schema.get("deprecated"):
        return {}
    has_typed = any(key.startswith(f"{path}.") for key in typed)
    if "properties" in schema and has_typed:
        return _without(typed, schema, path)
    return schema


if __name__ == "__main__":
    PACKAGED.write_text(json.dumps(run_schema(), indent=2) + "\n", encoding="utf-8")
