"""The table beside other trainers names a test for each row, and each is there."""

from __future__ import annotations

import re

from tests.places import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/compared.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]


def test_every_row_names_a_test_that_is_there() -> None:
    assert len(ROWS) > 40
    for feature, *_, test in ROWS[1:]:
        paths = re.findall(r"`([^`]+)`", test)
        assert paths, feature
        assert [path for path in paths if not (ROOT / path).exists()] == [], feature
