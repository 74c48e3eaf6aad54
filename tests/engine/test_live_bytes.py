"""Between steps a rank holds its weights and what the optimizer keeps, and no gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import ROOT, run_ranks

pytestmark = pytest.mark.slow

# Bytes per parameter with Adam on two ranks: weights, fp32 copies of half-precision ones (at stages 1 and 2 of all),
# two fp32 moments; what belongs to the optimizer is spread over the ranks at stages 1 and 2.
AT_START = {"z0-fp32": 4, "z0-bf16": 2 + 4 + 8, "z1-fp32": 4 + 4 / 2, "z1-bf16": 2 + 4 / 2}
AFTER_STEPS = {"z0-fp32": 4 + 8, "z0-bf16": 2 + 4 + 8, "z1-fp32": 4 + (4 + 8) / 2, "z1-bf16": 2 + (4 + 8) / 2}


@pytest.fixture(scope="module")
def bytes_per_parameter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder: Path = tmp_path_factory.mktemp("live")
    run_ranks(ROOT / "tests/jobs/live_bytes.py", str(folder / "found.json"), num_ranks=2, cwd=folder)
    found: dict[str, list[float]] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_but_states_is_alive_between_steps(
    bytes_per_parameter: dict[str, list[float]], stage: int, dtype: str, accumulation: int
) -> None:
    at_start, after_steps = bytes_per_parameter[f"z{stage}-{dtype}-{accumulation}"]
    case = f"z{min(stage, 1)}-{dtype}"
    assert at_start == pytest.approx(AT_START[case], rel=0.01)
    assert after_steps == pytest.approx(AFTER_STEPS[case], rel=0.01)
