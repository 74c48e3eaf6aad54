"""A kill under a real launcher, which ends the other rank: `python -m tests.campaign.kills
--launcher torchrun` does it often.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.kills import Campaign, Found
from tests.torchrun_ranks import TorchrunRanks
from tests.warm_ranks import WarmRanks

# Where a kill hits depends on how fast the run is.
pytestmark = [pytest.mark.slow, pytest.mark.timing]


def test_torchrun_ends_the_others_and_the_next_start_goes_on(
    warm: WarmRanks, tmp_path: Path
) -> None:
    found = Found()
    Campaign(TorchrunRanks(warm), tmp_path, seed=1, found=found).case(
        "zero1", num_kills=1, others_from=warm
    )
    assert found.wrong == []
    assert len(found.kills) == 1
    assert found.finished["zero1"] >= 1  # once more for a run that ends before the kill
