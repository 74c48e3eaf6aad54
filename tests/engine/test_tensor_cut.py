"""Inside a tensor group of two ranks: how often it meets, what it holds, what it draws, which plans it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launched import ROOT, run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers", reason="a tied model of transformers is among those refused")
    folder = tmp_path_factory.mktemp("facts")
    run_ranks(ROOT / "tests/jobs/tensor_facts.py", str(folder / "found.json"), num_ranks=2, cwd=folder)
    facts: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return facts


@pytest.mark.parametrize("model", ["gpt", "llama", "bert"])
def test_a_block_costs_two_sums_each_way(found: dict[str, Any], model: str) -> None:
    assert found[model] == [2.0, 2.0]


def test_parts_are_the_weights_of_one_process(found: dict[str, Any]) -> None:
    assert found["joined"]
    assert found["whole"]


def test_divided_logits_give_the_whole_loss(found: dict[str, Any]) -> None:
    assert found["loss"] == {"nats": True, "gradient": True, "guesses": True}


def test_dropout_differs_where_ranks_do(found: dict[str, Any]) -> None:
    assert found["draws"] == {
        "attention differs": True,
        "again": True,
        "block is the same": True,
        "hidden is the same": True,
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no plan", "FusedVision has no plan of its own"),
        ("nothing", "nothing in the model has such a name"),
        ("no row", "blocks.0.mlp.1: no row layer follows"),
        ("no column", "blocks.0.mlp.3: no column layer stands before"),
        ("no linear", "blocks.0.norm: it is a LayerNorm"),
        ("uneven", "its 5 outputs cannot be divided over 2 ranks"),
        ("attention of torch", "nn.MultiheadAttention takes the weight"),
        ("tied", "model.model.embed_tokens: its weight is that of a layer that is divided"),
    ],
)
def test_plans_that_cannot_be_are_refused(found: dict[str, Any], name: str, words: str) -> None:
    assert words in found["refused"][name]
    assert found["refused"][name].endswith("[tensor-plan]")
