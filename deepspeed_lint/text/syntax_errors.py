"""Errors of YAML's parser and of JSON's layout, with a reason and a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

# Part of libyaml's (or PyYAML's) message -> reason and fix; any other gets the general advice.
_ADVICE: Final[Mapping[str, tuple[str, str]]] = {
    "mapping values are not allowed": (
        "a colon that no key can have here",
        "check the indentation, or quote the text",
    ),
    "found another document": ("a second document starts here", "keep one document per file"),
    "cannot start any token": ("this character cannot start a value", "put the text in quotes"),
    "found undefined alias": (
        "the alias has no anchor",
        "write the value out, or quote a text that starts with *",
    ),
    "alphabetic or numeric": ("a * or & that starts no alias or anchor", "put the text in quotes"),
}


def describe_syntax_error(
    error: yaml.YAMLError, text: str, *, is_json: bool
) -> tuple[tuple[int, int], str, str]:
    """Return place, reason and fix of an error of PyYAML."""
    mark = getattr(error, "problem_mark", None)
    message = getattr(error, "problem", None)
    place = (0, 0)
    if mark:
        place = (mark.line + 1, mark.column + 1)
    # valid JSON that PyYAML cannot walk, for example a key of more than 1,024 characters
    if is_json:
        reason = f"a layout that cannot be read: {message or 'an odd character'}"
        return place, reason, "lay it out as `python -m json.tool` does"
    message = str(message or getattr(error, "reason", None) or "not YAML")
    reason, fix = _advice(message)
    if mark is None:
        return place, reason, fix
    if _has_tab_before(text, mark):
        return place, "a tab stands where only spaces may", "indent with spaces"
    context_mark = getattr(error, "context_mark", None)
    if context_mark is not None and context_mark.line != mark.line:
        reason += f" (in what began in line {context_mark.line + 1})"
    return place, reason, fix


def _has_tab_before(text: str, mark: Any) -> bool:
    """Check whether a tab stands in the line of a place, up to that place."""
    lines = text.split("\n")
    return mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]


def _advice(message: str) -> tuple[str, str]:
    for words, advice in _ADVICE.items():
        if words in message:
            return advice
    return f"not valid YAML: {message}", "check indentation, colons and quotes"
