"""Five kills of real runs: a slice of `python -m tests.campaign.kills`, which kills as often as it
is told to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import kills
from tests.campaign.kills import Campaign, Found, summary
from tests.warm_ranks import WarmRanks

# Where a kill hits depends on how fast the run is.
pytestmark = [pytest.mark.slow, pytest.mark.timing]

SLICE = {"zero2": 1, "stream": 1, "zero2-async": 2}
TOTAL_STEPS = 24  # of 48
# Of its four kills two are aimed at saves, one at a manifest, one at a name.
SEED = 8


def test_killed_runs_end_as_the_unbroken_one(
    warm: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "TOTAL_STEPS", TOTAL_STEPS)
    found = Found()
    campaign = Campaign(warm, tmp_path, seed=SEED, found=found)
    for case, num_kills in SLICE.items():
        campaign.case(case, num_kills=num_kills)
    counts = summary(found, seed=SEED, seconds=0)
    assert counts["wrong"] == []
    assert counts["by_case"] == SLICE
    assert set(counts["runs_ended_and_compared"]) == set(SLICE)
    # A third is promised of the long campaign; four may have less luck, but a campaign that never
    # hits a save proves nothing.
    assert counts["kills_inside_a_save"] >= 1, counts


# Shares of several data-parallel ranks are those of the cases above.
@pytest.mark.parametrize(
    "case",
    ["pipe2-tensor2", pytest.param("pipe2-tensor2-data2", marks=pytest.mark.exhaustive)],
)
def test_killed_stages_of_tensor_groups_end_as_the_unbroken_ones(
    case: str, warm: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kill that is aimed at a save."""
    monkeypatch.setattr(kills, "TOTAL_STEPS", 12)
    monkeypatch.setattr(kills, "AIMS", {"manifest": 1})
    num_inside = 0
    for folder in (tmp_path / "first", tmp_path / "second"):
        found = Found()
        Campaign(warm, folder, seed=20, found=found).case(case, num_kills=1)
        counts = summary(found, seed=20, seconds=0)
        assert counts["wrong"] == []
        assert counts["by_case"] == {case: 1}
        num_inside += counts["kills_inside_a_save"]
        if num_inside:
            break  # one kill of ten comes when the save is over
    assert num_inside == 1
