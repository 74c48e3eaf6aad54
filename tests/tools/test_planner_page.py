"""The pages show what the planner answers today."""

from __future__ import annotations

import pytest

from tests.places import ROOT
from tools.planner_page import CHART, PAGES, pages

pytestmark = pytest.mark.slow  # three seconds


def test_pages_show_what_the_planner_answers() -> None:
    found = pages()
    assert set(found) == {*PAGES, CHART}
    for name, text in found.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: run python -m tools.planner_page"
    assert "best      the fastest first" in found["docs/index.md"]
    assert found["docs/planner.md"].count("| DeepSpeed, ZeRO 3, ") == 2
