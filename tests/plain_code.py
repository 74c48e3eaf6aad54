"""Counts of what makes code hard to read at the first reading, per room of framework/ and for the
linter.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tests.places import ROOT

# Per 1,000 lines of code: the densest of the codebases that the house is measured by have 14
# ternaries, 10 tuple assignments, 1.9 walruses, 24 comprehensions and 6 starred expressions
# (decision 0049).
MOST_PER_1000: Final[Mapping[str, float]] = {
    "ternaries": 18,
    "tuple assignments": 4,
    "walruses": 2.5,
    "comprehensions": 30.5,
    "starred expressions": 8,
    "products of conditions": 0,
    "lines of more than 100 columns": 0,
}
MOST_COMPLEX: Final = 3.6
"""Largest mean cyclomatic complexity of a room."""
COMPLEX: Final = 8
"""A function with more is named where the mean of its room is too large."""
# A smaller room has too few lines for a rate.
FEWEST_LINES: Final = 1000
# What stands where a thought begins, and hides who does what.
VAGUE: Final = re.compile(
    r"\b(nobody|somebody|whoever|whomever|whatever|whose|told|tells?|says?|said|so many"
    r"|where there is none|of which|those of)\b",
    re.IGNORECASE,
)
NOT_A_VERB: Final = re.compile(
    r"(The|A|An|As|Of|What|Who|Whom|Whose|Whether|Where|Wherever|Which|How|That|Those|These|Every"
    r"|Each|All|Any|No|None|Bytes|In|On|At|By|For|From|With|Without|Not|One|Two|It|Its|This|There"
    r"|If|When|While|True|False|Text|Names?|Numbers?|Same)\b"
)


def rates(files: list[Path]) -> dict[str, float]:
    """Count each of `MOST_PER_1000` in the files, per 1,000 lines of code; empty for fewer lines
    than `FEWEST_LINES`.
    """
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(_counts(file))
    if counts["code lines"] < FEWEST_LINES:
        return {}
    return {name: 1000 * counts[name] / counts["code lines"] for name in MOST_PER_1000}


def complexities(files: list[Path]) -> tuple[float, list[str]]:
    """Return the mean cyclomatic complexity of the files, as ``radon cc --average`` counts it, and
    the functions that have most, a line for each. The mean is 0 for fewer lines than
    `FEWEST_LINES`.
    """
    from radon.complexity import cc_visit_ast

    counts: Counter[str] = Counter()
    values: list[int] = []
    complex_functions: list[tuple[int, str]] = []
    for file in files:
        counts.update(_counts(file))
        for block in cc_visit_ast(tree(file)):
            values.append(block.complexity)
            if block.complexity > COMPLEX:
                place = f"{file.relative_to(ROOT)}:{block.lineno}: {block.fullname}"
                complex_functions.append((block.complexity, place))
    most = [f"{place}: {value}" for value, place in sorted(complex_functions, reverse=True)]
    if counts["code lines"] < FEWEST_LINES:
        return 0.0, most
    return sum(values) / len(values), most


def rooms() -> dict[str, list[Path]]:
    """List the Python files of each room, and those of the linter; those that stand in no room under
    ``framework``.
    """
    found = {"deepspeed_lint": sorted((ROOT / "deepspeed_lint").rglob("*.py"))}
    for file in sorted((ROOT / "framework").rglob("*.py")):
        path = file.relative_to(ROOT / "framework").parts
        found.setdefault(path[0] if len(path) > 1 else "framework", []).append(file)
    return found


@cache
def tree(file: Path) -> ast.Module:
    """Parse a file once for all tests of a process."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's tree."""
    return tuple(ast.walk(tree(file)))


def function_docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of each function that has one; a property is named by a noun."""
    for node in nodes(file):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if docstring and not any("property" in decorator for decorator in decorators):
                yield node.name, docstring


def remarks(file: Path) -> Iterator[str]:
    """Yield all docstrings and comments of a module."""
    for node in nodes(file):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            yield ast.get_docstring(node) or ""
    for line in file.read_text(encoding="utf-8").split("\n"):
        yield line.partition("#")[2]


@cache
def _counts(file: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in nodes(file):
        if isinstance(node, ast.IfExp):
            counts["ternaries"] += 1
        elif isinstance(node, ast.NamedExpr):
            counts["walruses"] += 1
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            counts["comprehensions"] += 1
        elif isinstance(node, ast.Starred):
            counts["starred expressions"] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            counts["tuple assignments"] += isinstance(node.value, ast.Tuple)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            counts["products of conditions"] += any(_is_condition_or_text(side) for side in sides)
        counts["code lines"] -= _docstring_lines(node)
    stripped = [line.rstrip() for line in file.read_text(encoding="utf-8").split("\n")]
    lines = [line for line in stripped if line and not line.lstrip().startswith("#")]
    counts["code lines"] += len(lines)
    counts["lines of more than 100 columns"] = sum(len(line) > 100 for line in lines)
    return counts


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(
        node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    ) or not ast.get_docstring(node):
        return 0
    docstring = node.body[0]
    return (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1


def _is_condition_or_text(side: ast.expr) -> bool:
    if isinstance(side, ast.Constant):
        return isinstance(side.value, str)
    return isinstance(side, (ast.Compare, ast.BoolOp, ast.List))
