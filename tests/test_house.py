"""The house keeps its promises: the formatter decides, docstrings and names in the field's
words.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import plain_code
from tests.places import ROOT

PACKAGES = ("deepspeed_lint", "framework")
LONGEST_FUNCTION = 100
MOST_WITHOUT_A_VERB_PERCENT = 2.0
MOST_VAGUE_REMARKS = 60
# Words for which the field has others: log, report, fix, summary, timeout, connection, address ...
FORBIDDEN = re.compile(
    r"(?:^|_)(told|tells?|telling|said|says?|guests?|keeper|mend|mended|praise|patience|heed|heeded|heeding|forgive|obituary|"
    r"bury|strangers?|slips|essence)(?:_|$)",
    re.IGNORECASE,
)
# There patience is the field's word.
OF_EARLY_STOPPING = ("metric_watch.py", "training.py")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def identifiers(file: Path) -> Iterator[str]:
    """Yield names of functions, classes, arguments and variables that a module defines."""
    for node in plain_code.nodes(file):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_the_formatter_decides_every_line() -> None:
    opt_out = "# fmt" + ":"
    assert [
        str(path)
        for path in sources(*PACKAGES, "tests", "benchmarks", "tools")
        if opt_out in path.read_text("utf-8")
    ] == []
    pytest.importorskip("ruff", reason="ruff comes with the dev extra")
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "-q", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("room", plain_code.rooms())
def test_code_is_plain(room: str) -> None:
    """Smoke alarms: what counts is that a function is understood at the first reading."""
    dense = []
    for name, rate in plain_code.rates(plain_code.rooms()[room]).items():
        if rate > plain_code.MOST_PER_1000[name]:
            dense.append(f"{rate:.1f} {name} per 1,000 lines")
    assert dense == []


@pytest.mark.parametrize("room", plain_code.rooms())
def test_functions_have_few_branches(room: str) -> None:
    pytest.importorskip("radon", reason="radon comes with the dev extra")
    mean, most = plain_code.complexities(plain_code.rooms()[room])
    assert mean <= plain_code.MOST_COMPLEX, f"{mean:.2f} on average:\n" + "\n".join(most)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    num_docstrings = 0
    without = []
    for path in sources(*PACKAGES):
        for name, docstring in plain_code.function_docstrings(path):
            num_docstrings += 1
            if plain_code.NOT_A_VERB.match(docstring):
                without.append(f"{path.relative_to(ROOT)}: {name}: {docstring.splitlines()[0]}")
    assert num_docstrings > 1000
    assert 100 * len(without) / num_docstrings < MOST_WITHOUT_A_VERB_PERCENT, "\n".join(without)


def test_docstrings_and_comments_name_who_does_what() -> None:
    vague = []
    for path in sources(*PACKAGES):
        for remark in plain_code.remarks(path):
            vague += [
                f"{path.relative_to(ROOT)}: {word}" for word in plain_code.VAGUE.findall(remark)
            ]
    assert len(vague) <= MOST_VAGUE_REMARKS, "\n".join(vague)


def test_names_are_the_fields() -> None:
    wrong = []
    for path in sources(*PACKAGES):
        names = set(path.relative_to(ROOT).with_suffix("").parts)
        names.update(identifiers(path))
        if path.name in OF_EARLY_STOPPING:
            names -= {"patience", "_patience"}
        for name in sorted(names):
            if FORBIDDEN.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_functions_are_short() -> None:
    long = []
    for path in sources(*PACKAGES):
        for node in plain_code.nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}: {node.name}: {num_lines} lines")
    assert long == []


def test_the_map_names_files_that_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", page)) - {"framework/"}
    places = [ROOT, ROOT / "framework", *(ROOT / "framework").glob("*/"), ROOT / "deepspeed_lint"]
    assert len(named) > 40
    assert [
        name for name in sorted(named) if not any((place / name).exists() for place in places)
    ] == []
