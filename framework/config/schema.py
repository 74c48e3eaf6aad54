"""The JSON Schema of run configs, as committed in ``run.schema.json`` for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from framework.config.base import TAG_KEYS
from framework.config.deepspeed_words import PASSED_THROUGH, SHARED, TYPED
from framework.config.run_config import RunConfig

# A file beside the code that writes it: nothing of that code is needed for it.
_DEEPSPEED: Final = Path(__file__).parents[1] / "dslint/deepspeed.schema.json"


def run_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a run config file; a test keeps the committed copy equal."""
    schema = RunConfig.model_json_schema()
    from_python = [name for name in schema["$defs"] if name.endswith("Object")]
    for name in from_python:  # a file cannot ask for an object that was handed over
        del schema["$defs"][name]
    for section in schema["$defs"].values():
        _describe_kind(section)
    for section in (schema, *schema["$defs"].values()):
        for field in section["properties"].values():
            field.pop("title", None)  # the key in capitals: editors would show it above the sentence
            members = field.get("oneOf", [])
            members[:] = [member for member in members if member["$ref"].rpartition("/")[2] not in from_python]
    schema["properties"] |= {"$schema": {"type": "string", "description": "Where editors find this schema."}}
    schema["properties"]["deepspeed"] |= _further_keys()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dsf-trainer run config"}


def _further_keys() -> dict[str, Any]:
    """Return the schemas of keys under `deepspeed:`: those of DeepSpeed's own schema, without what a typed section
    decides.
    """
    theirs: dict[str, Any] = json.loads(_DEEPSPEED.read_text(encoding="utf-8"))["properties"]
    found = {name: theirs[name] for name in sorted(PASSED_THROUGH)}
    for name in sorted(SHARED):
        found[name] = _without_typed(theirs[name], name)
    return {
        "properties": _moved({name: section for name, section in found.items() if section}),
        "additionalProperties": False,
    }


def _without_typed(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A section without the keys that ours decides, and without what speaks of them; empty where nothing is left."""
    members: dict[str, Any] = {}
    for name, member in schema.get("properties", {}).items():
        inner = f"{path}.{name}"
        if inner not in TYPED and "$ref" not in member and not member.get("deprecated"):
            members[name] = _without_typed(member, inner) if "properties" in member and _has_typed(inner) else member
    members = {name: member for name, member in members.items() if member}
    if not members:
        return {}
    kept: dict[str, Any] = {key: schema[key] for key in ("description", "additionalProperties") if key in schema}
    return {**kept, "type": "object", "properties": members}


def _has_typed(path: str) -> bool:
    return any(key.startswith(f"{path}.") for key in TYPED)


def _moved(schema: Any) -> Any:
    """With its references leading to where it stands now."""
    if isinstance(schema, dict):
        return {
            key: f"#/properties/deepspeed{value[1:]}" if key == "$ref" else _moved(value)
            for key, value in schema.items()
        }
    return [_moved(item) for item in schema] if isinstance(schema, list) else schema


def _describe_kind(section: dict[str, Any]) -> None:
    """The key that tells the members of a union apart must be written, and its sentence is the class's."""
    for key in TAG_KEYS:
        tag = section["properties"].get(key, {})
        if "const" in tag:
            del tag["default"]
            tag["description"] = section["description"]
            section["required"] = [key, *section.get("required", [])]
