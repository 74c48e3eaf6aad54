"""The JSON Schema of run configs, as packaged in ``run.schema.json`` for editors.

python -m framework.config.schema        builds it anew and writes the file
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, Final

PACKAGED: Final = Path(__file__).with_name("run.schema.json")
# A file beside the code that writes it: nothing of that code is needed for it.
_DEEPSPEED: Final = Path(__file__).parents[1] / "dslint/deepspeed.schema.json"


def schema_text() -> str:
    """The JSON Schema as packaged, which a test keeps current; built anew where the file is missing
    or empty.
    """
    if PACKAGED.exists():
        text = PACKAGED.read_text(encoding="utf-8")
    else:
        text = ""
    if text.strip():
        return text
    return new_schema_text()


def new_schema_text() -> str:
    """The same, built from the models, which takes ten times as long."""
    return json.dumps(run_schema(), indent=2) + "\n"


def run_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a run config file; a test keeps the committed copy equal."""
    from framework.config.base import TAG_KEYS

    # the models take half a second
    from framework.config.run_config import AUTO, AUTO_KEYS, RunConfig

    schema = RunConfig.model_json_schema()
    from_python = [name for name in schema["$defs"] if name.endswith("Object")]
    for name in from_python:  # a file cannot ask for an object that was handed over
        del schema["$defs"][name]
    for section in schema["$defs"].values():
        for key in TAG_KEYS:
            tag = section["properties"].get(key, {})
            # what tells the members of a union apart is required, and its sentence is the class's
            if "const" in tag:
                del tag["default"]
                tag["description"] = section["description"]
                section["required"] = [key, *section.get("required", [])]
    for section in (schema, *schema["$defs"].values()):
        for field in section["properties"].values():
            # the key in capitals: editors would show it above the sentence
            field.pop("title", None)
            members = field.get("oneOf", [])
            members[:] = [
                member for member in members if member["$ref"].rpartition("/")[2] not in from_python
            ]
    homes = [
        (key.partition(".")[2], schema["$defs"][key.partition(".")[0].title()]) for key in AUTO_KEYS
    ]
    for name, section in (*homes, ("parallel", schema)):
        _accept_auto(section["properties"][name], AUTO)
    schema["properties"] |= {
        "$schema": {"type": "string", "description": "Where editors find this schema."}
    }
    schema["properties"]["deepspeed"] |= {
        "properties": _further_keys(),
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "dsf-trainer run config",
    }


def _accept_auto(field: dict[str, Any], auto: str) -> None:
    """Let a field also be ``auto``; what describes the field stays where editors look for it."""
    about = {key: field.pop(key) for key in ("default", "description") if key in field}
    members = field.pop("anyOf", None) or [dict(field)]
    field.clear()
    field.update({"anyOf": [*members, {"const": auto}]} | about)


def _further_keys() -> dict[str, Any]:
    """Return the schemas of keys under `deepspeed:`: DeepSpeed's own, without what a typed section
    decides.
    """
    from framework.config.deepspeed_words import PASSED_THROUGH, SHARED, TYPED

    theirs: dict[str, Any] = json.loads(_DEEPSPEED.read_text(encoding="utf-8"))["properties"]
    found = {name: theirs[name] for name in sorted(PASSED_THROUGH)}
    shared = {name: _without(TYPED.keys(), theirs[name], name) for name in sorted(SHARED)}
    text = json.dumps(found | {name: section for name, section in shared.items() if section})
    moved: dict[str, Any] = json.loads(
        text.replace('"$ref": "#', '"$ref": "#/properties/deepspeed')
    )
    return moved


def _without(typed: Set[str], schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A section without typed keys, and without what speaks of them; empty where nothing is
    left.
    """
    members: dict[str, Any] = {}
    for name, member in schema.get("properties", {}).items():
        inner = f"{path}.{name}"
        if inner in typed or "$ref" in member or member.get("deprecated"):
            continue
        has_typed = "properties" in member and any(key.startswith(f"{inner}.") for key in typed)
        members[name] = _without(typed, member, inner) if has_typed else member
    members = {name: member for name, member in members.items() if member}
    if not members:
        return {}
    kept: dict[str, Any] = {
        key: schema[key] for key in ("description", "additionalProperties") if key in schema
    }
    return {**kept, "type": "object", "properties": members}


if __name__ == "__main__":
    PACKAGED.write_text(new_schema_text(), encoding="utf-8")
