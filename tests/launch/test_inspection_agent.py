"""Answers of an inspected host: checks travel whole, and an answer of another release is refused."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from framework.doctor.node.findings import Check
from framework.errors import Problem
from framework.launch.inspection_agent import Answer


def test_checks_travel_whole() -> None:
    problem = Problem("disk-full", "it has 3 GiB", "make room", key="folder", value="/runs")
    check = Check("storage", "3 GiB free", (problem,), {"free_bytes": 3 << 30})
    answer = Answer(checks=[check], seconds=1.5, mark="/runs/mark")
    assert Answer.model_validate_json(answer.model_dump_json()) == answer


@pytest.mark.parametrize(
    "content",
    [
        {"later": 1},
        {"seconds": "1"},
        {"checks": {}},
        {"checks": [3]},
        {"checks": [{"name": "storage"}]},
        {"checks": [{"name": "a", "found": "b", "facts": {}, "problems": [{"kind": "x"}]}]},
    ],
)
def test_an_answer_of_another_shape_is_refused(content: object) -> None:
    with pytest.raises(ValidationError):
        Answer.model_validate_json(json.dumps(content))
