"""The pages show what the planner answers today."""

from __future__ import annotations

import pytest

from tests.places import ROOT
from tools import planner_page
from tools.planner_page import CHART, PAGES, pages

pytestmark = pytest.mark.slow  # eight seconds


def test_pages_show_what_the_planner_answers(
    exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exhaustive:  # of the table of many GPUs one row is searched for
        page = (
            (ROOT / "docs/planner.md")
            .read_text(encoding="utf-8")
            .partition("<!-- table: scale -->\n")[2]
        )
        shown = [
            line.strip("| ").split(" | ") for line in page.partition("<!-- end -->")[0].splitlines()
        ]
        with monkeypatch.context() as patch:
            patch.setattr(planner_page, "_LLAMA", {"70B": planner_page._LLAMA["70B"]})
            for row in planner_page._scale([512]):
                assert [*row] in shown, "run python -m tools.planner_page"
        monkeypatch.setattr(planner_page, "_scale", lambda: iter([shown[0], *shown[2:]]))
    found = pages()
    assert set(found) == {*PAGES, CHART}
    for name, text in found.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, (
            f"{name}: run python -m tools.planner_page"
        )
    assert "best      the fastest first" in found["docs/planner.md"]
    assert found["docs/planner.md"].count("| DeepSpeed, ZeRO 3, ") == 2
