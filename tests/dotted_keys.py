"""Dotted keys of a config, as tests list them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as sections."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return sections
