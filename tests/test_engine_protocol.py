"""What a run asks of an engine: both engines have all of it, and no caller reaches through to
DeepSpeed's own object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.engine.pipeline_engine import PipelineEngine
from framework.engine.plain_engine import PlainEngine
from framework.engine_protocol import Engine
from tests.places import ROOT


def _reaches(path: Path) -> Iterator[str]:
    """Yield the places where a file takes the `engine` of an engine."""
    text = path.read_text(encoding="utf-8")
    if "engine.engine" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or node.attr != "engine":
            continue
        owner = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
        if owner.lstrip("_") == "engine":
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_no_room_reaches_through_the_engine() -> None:
    offenders: list[str] = []
    for path in sorted((ROOT / "framework").rglob("*.py")):
        if path.parts[len(ROOT.parts) + 1] != "engine":
            offenders += _reaches(path)
    assert offenders == []


@pytest.mark.parametrize("kind", [PlainEngine, PipelineEngine])
def test_an_engine_has_all_that_a_run_asks_of_it(kind: type) -> None:
    asked = {name for name in vars(Engine) if not name.startswith("_")}
    assert {"train_step", "module", "steps_taken", "gathered"} <= asked
    # set in the constructor, as it depends on the config
    asked.remove("bad_steps")
    assert {name for name in asked if not hasattr(kind, name)} == set()
