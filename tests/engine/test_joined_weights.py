"""In ZeRO's flat buffers the weights of query, key and value lie one behind the other, so that
their product needs no copy.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launched import ROOT, run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder: Path = tmp_path_factory.mktemp("joined")
    out = folder / "found.json"
    run_ranks(ROOT / "tests/jobs/joined_weights.py", str(out), num_ranks=2, cwd=folder)
    found: dict[str, dict[str, int]] = json.loads(out.read_text(encoding="utf-8"))
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
