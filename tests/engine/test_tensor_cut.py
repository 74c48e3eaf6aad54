"""Inside a tensor group of two ranks: how often it meets, what it holds, what it draws, which plans
it refuses.
"""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.parallelism import Parallelism
from framework.plan.plan import make_plan
from framework.plan.work import work_of
from tests.launched import found_by_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip(
        "transformers", reason="a tied model of transformers is among those refused"
    )
    folder = tmp_path_factory.mktemp("facts")
    facts: dict[str, Any] = found_by_ranks("tensor_facts.py", num_ranks=2, folder=folder)
    return facts


@pytest.mark.parametrize("model", ["gpt", "llama", "bert"])
def test_a_block_costs_two_sums_each_way_as_the_time_of_a_plan_has_it(
    found: dict[str, Any], model: str
) -> None:
    kind, data, task = (
        ("bert", "text_pairs", "masked_lm") if model == "bert" else ("gpt", "text", "causal_lm")
    )
    sections: dict[str, Any] = {
        "model": {
            "kind": kind,
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 4,
            "max_positions": 16,
        },
        "data": {"kind": data, "sequence_length": 16},
        "task": {"kind": task},
        "batch": {"micro_size": 1},
        "parallel": {"tensor": 2},
    }
    plan = make_plan(config_from_values(sections), Cluster(devices_per_host=2))
    work = work_of(plan)
    assert work is not None
    (block,) = (part for part in work.parts if part.name.startswith("blocks"))
    sums = Parallelism.from_plan(plan).block_sums
    assert sums == (2, 2)
    assert found[model] == [[block.output_bytes // 4] * count for count in sums]


def test_parts_are_the_weights_of_one_process(found: dict[str, Any]) -> None:
    assert found["joined"]
    assert found["whole"]


def test_models_of_transformers_without_a_plan_give_whole_logits(found: dict[str, Any]) -> None:
    assert found["families"] == {"gpt2": True, "bert": True, "generated": True}


def test_divided_logits_give_the_whole_loss(found: dict[str, Any]) -> None:
    assert found["loss"] == {"nats": True, "gradient": True, "guesses": True}


def test_a_weight_may_be_named_as_summed(found: dict[str, Any]) -> None:
    assert found["summed weight"] < 1e-6


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
        (
            "a weight",
            "blocks.0.norm.weight: it is a weight, and only a module can be split as column",
        ),
        ("uneven", "its 5 outputs cannot be divided over 2 ranks"),
        ("attention of torch", "nn.MultiheadAttention takes the weight"),
        ("weight norm", "0: its weight is computed from others"),
        ("heads", "cannot share the model's 1 num_key_value_heads evenly"),
        ("tied", "model.model.embed_tokens: its weight is that of a layer that is divided"),
        ("by hand", "0: ScaledByHand has a forward() of its own, which reads the weight itself"),
        (
            "head",
            "the plan of Headed divides 1.5% of the numbers in its matrices (1 weight, such as head.weight)",
        ),
        ("heads of a block", "cannot share the model's 1 num_attention_heads evenly"),
        ("own head", "words: a later layer uses its weight as the output layer"),
    ],
)
def test_plans_that_cannot_be_are_refused(found: dict[str, Any], name: str, words: str) -> None:
    assert words in found["refused"][name]
    kind = "tensor-not-divisible" if name.startswith("heads") else "tensor-plan"
    assert found["refused"][name].endswith(f"[{kind}]")


def test_layers_of_a_stage_are_cut_as_those_of_a_whole_model(found: dict[str, Any]) -> None:
    by_layer = found["by layer"]
    assert by_layer["gpt"]
    assert by_layer["bert"]
    assert by_layer["gpt vocabulary"] == by_layer["bert vocabulary"] == [18, 19]
    assert by_layer["outputs"]
    assert by_layer["within"] == "cut"
    assert "0: no row layer follows this column layer within one layer" in by_layer["apart"]
    assert "parallel.tensor_plan.3" in by_layer["idle"]
    assert "nothing in the model has such a name" in by_layer["idle"]


def test_a_plan_that_leaves_most_numbers_whole_is_mentioned(found: dict[str, Any]) -> None:
    assert [line.partition(" of the numbers")[0] for line in found["small"]] == [
        "parallel.tensor_plan: the plan of Headed divides 11.1%",
        "parallel.tensor_plan: the plan of Headed divides 1.5%",
    ]
