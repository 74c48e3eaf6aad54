"""Agents for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

psutil = pytest.importorskip(
    "psutil", reason="agents need psutil, which comes with the train extra"
)

from tests.launch.rendezvous.members import Members  # noqa: E402


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    """Yield two nodes with a rank each."""
    job = Members(tmp_path)
    yield job
    job.close()
