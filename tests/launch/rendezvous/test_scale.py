"""A coordinator and many agents, the real ones, in two processes; `python -m
benchmarks.control_plane` takes more.
"""

from __future__ import annotations

import pytest

from benchmarks.control_plane import measure

pytestmark = [pytest.mark.slow, pytest.mark.timing]


def test_what_many_agents_cost_one_coordinator() -> None:
    found = measure(250, quiet_seconds=5.0)
    assert found["meet_seconds"] < 5
    assert max(found["stop_seconds"], found["fail_seconds"]) < 2
    assert found["idle_core_percent"] < 5
