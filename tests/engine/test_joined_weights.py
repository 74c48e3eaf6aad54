"""In ZeRO's flat buffers the weights of query, key and value lie one behind the other, so that
their product needs no copy.
"""

from __future__ import annotations

import pytest

from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("joined")
    found: dict[str, dict[str, int]] = found_by_ranks(
        "joined_weights.py", num_ranks=2, folder=folder
    )
    return found


@pytest.mark.parametrize("name", ["llama-z1", "llama-z2"])
def test_a_block_without_biases_has_four_products(
    kernels: dict[str, dict[str, int]], name: str
) -> None:
    found = kernels[name]
    # query with key and value, attention's output, gate with up, down; and the logits
    assert found["mm"] == 5
    assert "cat" not in found


def test_biases_in_a_group_of_their_own_do_not_part_the_weights(
    kernels: dict[str, dict[str, int]],
) -> None:
    assert kernels["biases-apart-z1"]["addmm"] == 4
    assert kernels["biases-between-z1"]["addmm"] == 6
