"""The page of faults is that of the cases: the same names and the same exit codes. What was
measured, the campaign writes.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.campaign.fault_cases import BY_NAME, CASES
from tests.campaign.launch_faults import by_hand, reported
from tests.places import ROOT

PAGE = ROOT / "docs/launch-faults.md"


def rows(text: str) -> list[list[str]]:
    """Cells of the tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in found if row[0] not in ("case", "type")]


def test_the_page_has_every_case_with_its_exit_codes() -> None:
    written = {
        row[0]: row[2] for row in rows(PAGE.read_text(encoding="utf-8").removesuffix(by_hand(PAGE)))
    }
    expected = {case.name: reported(case.codes) for case in CASES}
    assert written == expected


def test_the_pages_count_as_many_faults_as_there_are() -> None:
    faults = PAGE.read_text(encoding="utf-8")
    assert f"{len(CASES)} of {len(CASES)} cases are as they must be" in faults
    assert f"Of {len(CASES)} faults" in (ROOT / "docs/promises.md").read_text(encoding="utf-8")


def test_what_shows_a_type_of_failure_exists() -> None:
    types = rows(by_hand(PAGE))
    assert len({row[0] for row in types}) == 21
    for name, shown, *_ in types:
        found = re.findall(r"`([^`]+)`", shown)
        assert bool(found) != shown.startswith("not covered"), name
        for case in found:
            path, _, test = case.partition("::")
            is_test = Path(ROOT / path).is_file() and f"def {test}" in (ROOT / path).read_text(
                encoding="utf-8"
            )
            assert case in BY_NAME or is_test, f"{name}: {case}"


def test_every_case_can_fail_on_what_is_reported() -> None:
    assert [case.name for case in CASES if not case.culprit] == []
