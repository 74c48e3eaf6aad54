"""Attention around a ring of ranks, and in teams of a ring, against attention over whole sequences
in one process: outputs and gradients in fp64, so that nothing but the order of sums differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.ring_cases import CASES
from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder: Path = tmp_path_factory.mktemp("ring")
    made: dict[str, list[float]] = found_by_ranks("ring_cases.py", num_ranks=4, folder=folder)
    return made


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_whole_sequences(found: dict[str, list[float]], name: str) -> None:
    bound = 0.02 if "dtype" in CASES[name] else 1e-12
    assert len(found[name]) == 4
    assert max(found[name]) < bound, "output, gradients of queries, keys and values"
