"""Failures of training that become errors of the framework; code that exits in mid-run is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.engine.distributed import claims_error_report
from framework.errors import FrameworkError, explaining
from framework.plan.plan import Plan
from framework.system.exits import refusing_exits


@contextmanager
def explaining_failures(logs: Path, plan: Plan | None = None) -> Iterator[None]:
    """Turn failures of training that can be explained into errors of the framework: known messages,
    failed batches, lost peers, and exits of the user's code. An explanation may take seconds.
    """

    def explained(error: Exception) -> FrameworkError | None:
        from framework.engine.known_failures import explain

        return explain(error, logs=logs, plan=plan)

    with explaining(explained), refusing_exits(speaks=claims_error_report):
        yield
