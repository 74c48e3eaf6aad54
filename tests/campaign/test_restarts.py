"""A slice of the kills in a job of agents; `python -m tests.campaign.restarts --nodes 3` runs as
many as asked for.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from tests.campaign.restarts import campaign
from tests.warm_ranks import WarmRanks

# A killed rank and a lost node 0 are met by the job of tests/deploy/test_hosts_kubernetes.py, too,
# which ends with the losses of an unbroken run.
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.exhaustive]


def test_agents_start_their_ranks_again_after_any_kill(warm: WarmRanks, tmp_path: Path) -> None:
    """A rank, and node 0: its agent with its rank. The others call it until it is back."""
    found = campaign(tmp_path, 2, seed=0, nodes=2, kinds=("rank", "node:0"), others_from=warm)
    assert (found["kills"], found["codes"], found["equal"]) == (2, [0, 0], True)
    log = (tmp_path / "killed.log").read_text()
    assert "start 2 of at most 1001, from step" in log
    assert re.search(r"node 0 is lost \(.*\); calling it again \[rejoining\]", log)
