"""Files of other training tools, recognised by their keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from framework.errors import MISSING, Problem

# A few keys of another tool in a file with this many sections of ours make it no file of that tool.
_MOST_OF_OURS: Final = 2
_DEEPEST: Final = 6
_TABLE: Final = Path(__file__).parent / "tables/other_tools.json"


def other_tool(values: Any, ours: Iterable[str]) -> str | None:
    """Return the training tool that these values are a config of, or None.

    Only tools that `import` does not read are recognised.

    Args:
        values: of a file.
        ours: sections that only a run config has.
    """
    if not isinstance(values, Mapping):
        return None
    sections = set(ours) - {"run", "model", "data"}
    if len(sections & values.keys()) >= _MOST_OF_OURS:
        return None
    return _first_tool(values)


def _first_tool(values: Mapping[str, Any]) -> str | None:
    """Return the first tool of the table that has a config like these values, or None."""
    names = {str(name).replace("-", "_") for name in values}
    for tool, row in _table().items():
        if any(_is_met(alternative, values, names) for alternative in row["alternatives"]):
            return tool
    return None


def other_tool_problem(tool: str, values: Mapping[str, Any], *, file: str) -> Problem:
    """Return the problem of a file of another tool: which of its keys are what in a run config."""
    kind = "gpt-neox-config" if tool == "GPT-NeoX" else "other-tools-config"
    pairs = _known_pairs(values, _table()[tool]["keys"])
    by_hand = f": {', '.join(pairs)}" if pairs else ""
    reason = (
        f"this is a config of {tool}, neither a run config nor DeepSpeed JSON, and `import` "
        "does not read it"
    )
    return Problem(kind, reason, f"write a run config by hand{by_hand}", "", MISSING, file, 1, 1)


def _known_pairs(values: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """List what keys of another tool are in a run config, of those that are known."""
    pairs = []
    for name in values:
        key = str(name).replace("-", "_")
        if key in known:
            pairs.append(f"{name} is {known[key]}")
    return pairs


def _is_met(alternative: Mapping[str, Any], values: Mapping[str, Any], names: set[str]) -> bool:
    """Check whether values look as one row of the table describes a tool's config."""
    if "nested" in alternative:
        return _holds(values, alternative["nested"], _DEEPEST)
    if "two_of" in alternative:
        return len(names & set(alternative["two_of"])) > 1
    if not names >= set(alternative["needs"]):
        return False
    for section, keys in alternative.get("inside", {}).items():
        if not _has_one_of(values.get(section), keys):
            return False
    return "beside" not in alternative or bool(names & set(alternative["beside"]))


def _has_one_of(section: Any, keys: Iterable[str]) -> bool:
    """Check whether a value is a section with one of the keys."""
    return isinstance(section, Mapping) and not section.keys().isdisjoint(keys)


def _holds(value: Any, name: str, depth: int) -> bool:
    """Check whether a mapping has the key `name`, at most `depth` levels of mappings and lists
    down.
    """
    if depth == 0:
        return False
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        if name in value:
            return True
        items = value.values()
    elif isinstance(value, list):
        items = value
    return any(_holds(item, name, depth - 1) for item in items)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((_TABLE).read_text(encoding="utf-8"))
    return table
