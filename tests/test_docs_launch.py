"""The page names every kind of finding that a preflight has, and no other."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.places import ROOT


def kinds(folder: Path) -> set[str]:
    """Every text given as `kind=` where a problem is made."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "kind"
                and isinstance(node.value, ast.Constant)
            ):
                found.add(str(node.value.value))
    return found - {
        "run-folder",
        "tmp",
        "nvme-path",
        "cache",
    }  # what is in the way of writing there is named KIND-unwritable


def test_every_kind_of_finding_is_described() -> None:
    page = (ROOT / "docs/launch.md").read_text(encoding="utf-8").partition("## Preflight")[2]
    missing = {
        kind for kind in kinds(ROOT / "framework/launch/preflight") if f"`{kind}`" not in page
    }
    assert not missing
