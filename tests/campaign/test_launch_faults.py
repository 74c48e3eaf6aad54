"""A slice of the faults; `python -m tests.campaign.launch_faults` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.fault_cases import BY_NAME, CASES
from tests.campaign.launch_faults import Row, run_case, table
from tests.hosts.network import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]


@pytest.mark.parametrize("name", ["agent-killed", "rank-duplicate"])
def test_a_fault_ends_the_job_as_published(name: str, tmp_path: Path) -> None:
    assert run_case(BY_NAME[name], tmp_path, unbroken=None).wrong == []


def test_the_table_counts_and_marks_what_is_wrong() -> None:
    row = Row("rank-killed", "SIGKILL", "node-0 76", "node-0 0", 1.0, "a | b", 0, "yes")
    text = table([row, Row(**{**vars(row), "wrong": ["it ended with 0"]})], seconds=60)
    assert "1 of 2 cases" in text
    assert text.count("**wrong**") == 1
    assert "`a / b`" in text
    assert len({case.name for case in CASES}) == len(CASES)
