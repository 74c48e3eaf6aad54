"""Values of a run's lines: of another type they are left out, and the line is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from framework.report.run_lines import EVENT, METRICS, POINT


@pytest.mark.parametrize("value", [None, True, "3", [3], -(10.0**15), 10**15, 10**400, 1e999])
def test_a_number_of_another_type_is_left_out(value: Any) -> None:
    event = {"kind": "save", "step": value, "seconds": value, "path": "here"}
    assert EVENT.validate_python(event) == {"kind": "save", "path": "here"}
    assert POINT.validate_python({"step": 3, "time": value, "epoch": value}) == {"step": 3}


def test_a_number_keeps_its_type() -> None:
    event = EVENT.validate_python({"kind": "save", "step": 20, "seconds": 2.5})
    assert (str(event["step"]), str(event["seconds"])) == ("20", "2.5")


def test_a_kind_is_read_as_a_text() -> None:
    assert EVENT.validate_python({"kind": 3}) == {"kind": "3"}


@pytest.mark.parametrize("line", [None, [], {}, {"step": 3}])
def test_an_event_without_a_kind_is_damaged(line: Any) -> None:
    with pytest.raises(ValidationError):
        EVENT.validate_python(line)


@pytest.mark.parametrize("step", [None, True, "3", -1, 10**15, float("nan"), float("inf")])
def test_a_point_without_a_step_is_damaged(step: Any) -> None:
    with pytest.raises(ValidationError):
        POINT.validate_python({"step": step})


def test_a_step_may_be_a_float() -> None:
    assert POINT.validate_python({"step": 5.0}) == {"step": 5}


def test_what_is_no_number_is_no_metric() -> None:
    values = {"a": 1, "b": None, "c": True, "d": 10**400, "e": "1", "f": [1.0]}
    assert METRICS.validate_python(values) == {"a": 1.0, "b": None, "c": True, "d": 10**400}
