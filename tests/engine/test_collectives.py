"""What a step sends between ranks: gradients, what a loss counts, and nothing that is known
already.
"""

from __future__ import annotations

import pytest

from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("collectives")
    found: dict[str, dict[str, int]] = found_by_ranks(
        "count_collectives.py", num_ranks=2, folder=folder
    )
    return found


def test_stage_0_sends_the_gradients_in_one_bucket_and_no_norm(
    collectives: dict[str, dict[str, int]],
) -> None:
    assert collectives["z0-mean"] == {"all_reduce": 1}


def test_what_a_loss_counts_travels_with_the_gradients_at_stage_0(
    collectives: dict[str, dict[str, int]],
) -> None:
    assert collectives["z0-counts"] == collectives["z0-mean"]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_loss_counts_travels_with_the_norm_at_stages_1_and_2(
    collectives: dict[str, dict[str, int]], stage: int
) -> None:
    mean, counts = collectives[f"z{stage}-mean"], collectives[f"z{stage}-counts"]
    assert counts == mean
