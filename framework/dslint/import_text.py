"""The text of an imported run config: YAML with a comment beside what was decided for the user."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from framework.dslint.import_run import Imported
from framework.errors import printable

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./:-]*[A-Za-z0-9_]|[A-Za-z_]")
_NOT_TEXT: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def run_config_text(imported: Imported, *, name: str) -> str:
    """A run config file."""
    lines = [f"# Imported from {printable(name)}. Model, data and task are not in a DeepSpeed JSON: write yours."]
    if imported.left_out:
        lines.append("# Left out, because it has no effect or is decided elsewhere:")
        lines += [f"#   {printable(line)}" for line in imported.left_out]
    for section, values in imported.values.items():
        lines += ["", *_lines(section, values, section, imported.comments, "")]
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, key: str, comments: Mapping[str, str], indent: str) -> Iterator[str]:
    comment = f"  # {printable(comments[key])}" if key in comments else ""
    if isinstance(value, Mapping) and value:
        yield f"{indent}{_text(name)}:{comment}"
        for inner, item in value.items():
            yield from _lines(inner, item, f"{key}.{inner}", comments, f"{indent}  ")
    else:
        yield f"{indent}{_text(name)}: {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    """Plain where YAML reads it as the same text, in quotes otherwise."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return yaml.dump(text, default_style='"', allow_unicode=False, width=10**9).strip()
