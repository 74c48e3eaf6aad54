"""The page of faults is that of the cases: the same names and the same exit codes. What was measured, the campaign
writes.
"""

from __future__ import annotations

from tests.campaign.fault_cases import CASES
from tests.campaign.launch_faults import reported
from tests.places import ROOT


def test_the_page_has_every_case_with_its_exit_codes() -> None:
    text = (ROOT / "docs/launch-faults.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    written = {row[0]: row[2] for row in rows if row[0] != "case"}
    expected = {case.name: reported(case.codes) for case in CASES}
    assert written == expected


def test_the_pages_count_as_many_faults_as_there_are() -> None:
    faults = (ROOT / "docs/launch-faults.md").read_text(encoding="utf-8")
    assert f"{len(CASES)} of {len(CASES)} cases are as they must be" in faults
    assert f"Of {len(CASES)} faults" in (ROOT / "docs/promises.md").read_text(encoding="utf-8")


def test_every_case_can_fail_on_what_is_said() -> None:
    assert [case.name for case in CASES if not case.culprit] == []
