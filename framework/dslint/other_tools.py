"""Files of other training tools, by their keys, and templates that a script fills in: named for
what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from framework.dslint.key_files import TABLES
from framework.errors import MISSING, Problem

# A few keys of another tool in a file with this many sections of ours make it no file of that tool.
_MOST_OF_OURS: Final = 2
_DEEPEST: Final = 6
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
    names = {str(name).replace("-", "_") for name in values}
    for tool, row in _table().items():
        if any(_is_met(alternative, values, names) for alternative in row["alternatives"]):
            return tool
    return None


def other_tool_problem(tool: str, values: Mapping[str, Any], *, file: str) -> Problem:
    """Return the problem of a file of another tool: which of its keys are what in a run config."""
    kind = "gpt-neox-config" if tool == "GPT-NeoX" else "other-tools-config"
    known = _table()[tool]["keys"]
    pairs = []
    for name in values:
        key = str(name).replace("-", "_")
        if key in known:
            pairs.append(f"{name} is {known[key]}")
    if pairs:
        by_hand = f": {', '.join(pairs)}"
    else:
        by_hand = ""
    reason = (
        f"this is a config of {tool}, neither a run config nor DeepSpeed JSON, and `import` "
        "does not read it"
    )
    return Problem(kind, reason, f"write a run config by hand{by_hand}", "", MISSING, file, 1, 1)


def without_placeholders(problems: Iterable[Problem], *, file: str) -> list[Problem]:
    """Return the problems, or one for the whole file if it has placeholders, values that a script
    fills in.
    """
    all_problems = list(problems)
    names: dict[str, Problem] = {}
    for problem in all_problems:
        for name in _placeholders(problem):
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


def _placeholders(problem: Problem) -> Iterator[str]:
    """Yield the placeholder that a value is, if it is one."""
    value = problem.value
    if isinstance(value, Mapping) and len(value) == 1 and next(iter(value.values())) is None:
        yield "{" + str(next(iter(value))) + "}"  # as YAML reads {name}
        return
    if not isinstance(value, str):
        return
    text = value.strip().rstrip(",").strip("\"'")
    stands_for_number = problem.kind in ("wrong-type", "loose-type") and text not in _WORDS
    if _PLACEHOLDER.fullmatch(text) or (stands_for_number and _CAPITALS.fullmatch(text)):
        yield text


def _is_met(alternative: Mapping[str, Any], values: Mapping[str, Any], names: set[str]) -> bool:
    """Check whether values look as one row of the table describes a tool's config."""
    if "nested" in alternative:
        return _holds(values, alternative["nested"], _DEEPEST)
    if "two_of" in alternative:
        return len(names & set(alternative["two_of"])) > 1
    if not names >= set(alternative["needs"]):
        return False
    for section, keys in alternative.get("inside", {}).items():
        inner = values.get(section)
        if not isinstance(inner, Mapping) or not inner.keys() & set(keys):
            return False
    return "beside" not in alternative or bool(names & set(alternative["beside"]))


def _holds(value: Any, name: str, depth: int) -> bool:
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return name in value or any(_holds(item, name, depth - 1) for item in value.values())
    return isinstance(value, list) and any(_holds(item, name, depth - 1) for item in value)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((TABLES / "other_tools.json").read_text(encoding="utf-8"))
    return table
