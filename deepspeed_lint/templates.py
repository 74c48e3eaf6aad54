"""Templates of configs, which a script fills in: named for what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from deepspeed_lint.errors import Problem

_LONGEST_LIST: Final = 8
_PLACEHOLDER: Final = re.compile(
    "|".join(
        (
            r"\$\{[^{}]*\}",  # ${NAME}
            r"\$[A-Za-z_]\w*",  # $NAME
            r"<[A-Za-z][^<>]*>",  # <name>
            r"\{\{.*\}\}",  # {{ name }}
            r"\{%.*%\}",  # {% if %}
            r"@[A-Za-z_]\w*@",  # @NAME@
            r"%\(\w+\)[sdf]",  # %(name)s
            r"\{[A-Za-z_]\w*\}",  # {name}
            r"__[A-Z][A-Z0-9_]*__",  # __NAME__
        )
    )
)
# ``ZERO_STAGE`` where a number or a truth value belongs.
_CAPITALS: Final = re.compile(r"[A-Z][A-Z0-9_]+")
_WORDS: Final = frozenset(
    {"TRUE", "FALSE", "NULL", "NONE", "NAN", "INF", "YES", "NO", "ON", "OFF", "AUTO"}
)
_JINJA: Final = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
# In JSON without quotes, where `without_placeholders` never gets to see a value.
_BARE: Final = re.compile(r":[ \t]*(\$\{\w+\}|\$\w+|<\w+>|[A-Z][A-Z0-9_]+)[ \t]*(?=[,}\]\n])")


def without_placeholders(problems: Iterable[Problem], *, file: str) -> list[Problem]:
    """Return the problems, or one for the whole file if it has placeholders, values that a script
    fills in.
    """
    all_problems = list(problems)
    names: dict[str, Problem] = {}
    for problem in all_problems:
        name = _placeholder(problem)
        if name:
            names.setdefault(name, problem)
    if not names:
        return all_problems
    first = next(iter(names.values()))
    shown = ", ".join(list(names)[:_LONGEST_LIST])
    if len(names) > _LONGEST_LIST:
        more = f" and {len(names) - _LONGEST_LIST} more"
    else:
        more = ""
    reason = f"a template: {shown}{more} stand for values that a script fills in"
    # The other problems are left out: what the rules find depends on these values.
    template = Problem(
        "config-template",
        reason,
        "name the file that it writes",
        file=file,
        line=first.line,
        column=first.column,
    )
    return [template]


def template_problem(text: str, *, file: str) -> Problem | None:
    """Return the problem of a text that cannot be read because it is a template, or None."""
    jinja = _JINJA.search(text)
    if jinja is not None:
        name = jinja.group()
        start = jinja.start()
    else:
        bare = _bare_placeholder(text)
        if bare is None:
            return None
        name = bare.group(1)
        start = bare.start()
    line = text.count("\n", 0, start) + 1
    reason = f"a template: {name} stands for something that a script fills in"
    return Problem(
        "config-template", reason, "name the file that it writes", file=file, line=line, column=1
    )


def _bare_placeholder(text: str) -> re.Match[str] | None:
    for match in _BARE.finditer(text):
        if match.group(1) not in _WORDS:
            return match
    return None


def _placeholder(problem: Problem) -> str:
    """Return the placeholder that a value is; empty if it is none."""
    value = problem.value
    if isinstance(value, Mapping):
        return _name_in_braces(value)
    if not isinstance(value, str):
        return ""
    text = value.strip().rstrip(",").strip("\"'")
    if _PLACEHOLDER.fullmatch(text) or _stands_for_number(problem, text):
        return text
    return ""


def _name_in_braces(value: Mapping[Any, Any]) -> str:
    """Return {name}, which YAML reads as an object with one key and no value."""
    if list(value.values()) == [None]:
        return "{" + str(next(iter(value))) + "}"
    return ""


def _stands_for_number(problem: Problem, text: str) -> bool:
    if problem.kind not in ("wrong-type", "loose-type") or text in _WORDS:
        return False
    return _CAPITALS.fullmatch(text) is not None
