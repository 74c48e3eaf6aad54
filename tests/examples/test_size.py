"""Every recipe is short, says what it shows, and has a test that runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.places import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_tested(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    tests = [test.read_text(encoding="utf-8") for test in (ROOT / "tests").rglob("*.py")]
    assert any(path.name in text or f'"{path.stem}"' in text for text in tests)
