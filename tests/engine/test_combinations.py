"""Every allowed combination was held against plain PyTorch, or `check` refuses it."""

from __future__ import annotations

import pytest

from tests.engine.combinations import BEGIN, END, PAGE, Table, shown, table


@pytest.fixture(scope="module")
def found() -> Table:
    return table()


def test_every_way_at_every_stage_is_proven_or_refused(found: Table) -> None:
    open_ones = [
        place for place, (ranks, kind) in found.by_stage.items() if bool(ranks) == bool(kind)
    ]
    assert open_ones == [], (
        "hold a run of it against plain PyTorch, or refuse it in plan/rules; never both"
    )


def test_every_way_with_everything_else_is_proven_or_refused(found: Table) -> None:
    open_ones = [
        place for place, cell in found.by_feature.items() if not cell.stages and cell.unknown
    ]
    assert open_ones == []
    both = [
        place for place, cell in found.by_feature.items() if set(cell.stages) & set(cell.refused)
    ]
    assert both == []


def test_two_ways_at_once_are_proven_or_refused(found: Table) -> None:
    cells = found.by_ways.items()
    assert [place for place, cell in cells if not cell.stages and cell.unknown] == []
    assert [place for place, cell in cells if set(cell.stages) & set(cell.refused)] == []


def test_the_page_has_these_tables() -> None:
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert page.strip() == shown().strip(), "python -m tests.engine.combinations"
