"""Answers of an inspected host: checks travel whole, and an answer of another release is refused."""

from __future__ import annotations

import json
import sys
import time

import pytest
from pydantic import ValidationError

from framework.doctor.node.findings import Check
from framework.errors import Problem
from framework.hosts.hostfile import Host
from framework.launch import inspection
from framework.launch.inspection_agent import Answer, InspectionJob, Meet


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


SILENT = "import sys, time; "
ENDLESS = "time.sleep(60)"


@pytest.mark.parametrize(
    ("program", "num_bytes", "reason"),
    [
        (SILENT + ENDLESS, 10, "no answer within 0 s"),
        (SILENT + ENDLESS, 1 << 20, "no answer within 0 s"),  # more than a pipe takes
        (SILENT + "import os; os.close(1); " + ENDLESS, 10, "closed its output, and does not end"),
        ("import sys; sys.exit('no such host')", 10, "ssh ended with 1: no such host"),
        ("import sys; sys.exit(3)", 10, "ssh ended with 3: it printed nothing"),
    ],
)
def test_a_host_is_not_waited_for_longer_than_its_limit(
    program: str, num_bytes: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_seconds = 0.2 if ENDLESS in program else 20.0
    monkeypatch.setattr(inspection, "_END_SECONDS", end_seconds)
    seconds = 0.3 if "0 s" in reason else 20.0
    job = InspectionJob(
        node=0, names=["a"], master_addr="127.0.0.1", master_port=1, token="x" * num_bytes
    )
    agent = inspection.HostAgent(Host("a", 1), [sys.executable, "-c", program], number=0)
    started = time.monotonic()
    try:
        with pytest.raises(inspection.HostFailed, match=reason):
            agent.ask(Meet(job=job, marks=[]), seconds=seconds)
    finally:
        agent.close()
    assert time.monotonic() - started < 40
