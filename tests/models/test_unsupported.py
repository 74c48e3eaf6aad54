"""Modules and weights that DeepSpeed would train as another model are refused by their names,
others pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.models.unsupported import (
    in_rows,
    refuse_sparse_gradients,
    refuse_unsupported,
    store_in_rows,
)
from framework.setup.components import gather_parts
from framework.setup.user_code import Objects


def run_of(stage: int = 0, dtype: str = "fp32", **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"zero": {"stage": stage}, "precision": {"dtype": dtype}} | sections
    )


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))


def lazy_buffer() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False))


def with_deepspeed_moe() -> nn.Module:
    moe_layer = pytest.importorskip(
        "deepspeed.moe.layer", reason="DeepSpeed comes with the train extra"
    )

    class Experts(moe_layer.MoE):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:  # without the groups of ranks that DeepSpeed asks for
            nn.Module.__init__(self)

    return nn.ModuleDict({"block": nn.ModuleDict({"mlp": Experts()})})


def tied_by_memory(weight: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(weight(model[0].weight.data))
    return model


@pytest.mark.parametrize(
    ("build", "kind", "named"),
    [
        (lazy, "lazy-weight", "the first is 1.weight"),
        (lazy_buffer, "lazy-weight", "the first is 1.running_mean"),
        (with_deepspeed_moe, "deepspeed-moe", "its module block.mlp is DeepSpeed's own"),
        (lambda: tied_by_memory(lambda one: one), "weights-share-memory", "0.weight and 1.weight"),
        (
            lambda: tied_by_memory(lambda one: one.t()),
            "weights-share-memory",
            "0.weight and 1.weight",
        ),
        (
            lambda: tied_by_memory(lambda one: one[:2]),
            "weights-share-memory",
            "1.weight and 0.weight",
        ),
    ],
)
def test_it_is_refused_by_name(build: Callable[[], nn.Module], kind: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(build(), run_of(1))
    (problem,) = caught.value.problems
    assert problem.kind == kind
    assert named in problem.reason


def test_layers_of_a_stage_are_named_as_in_the_whole_model() -> None:
    with pytest.raises(ConfigError, match=r"the first is 7\.1\.weight"):
        refuse_unsupported(lazy(), run_of(), prefix="7.")


def test_two_names_of_one_parameter_and_parts_of_one_memory_pass() -> None:
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    parts = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    memory = torch.randn(8, 4)  # as cuDNN keeps the weights of recurrent layers
    parts[0].weight, parts[1].weight = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    columns = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    wide = torch.randn(4, 8)
    columns[0].weight, columns[1].weight = nn.Parameter(wide[:, :4]), nn.Parameter(wide[:, 4:])
    empty = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0))])
    for model in (tied, parts, columns, empty, nn.LSTM(3, 4, num_layers=2)):
        refuse_unsupported(model, run_of(3))


def test_a_tie_by_memory_stays_where_nothing_is_copied() -> None:
    """At stage 0 in fp32 DeepSpeed steps the parameters themselves, unless they have to be stored
    anew.
    """
    refuse_unsupported(tied_by_memory(lambda one: one), run_of(0))
    for weight, dtype in ((lambda one: one.t(), "fp32"), (lambda one: one, "bf16")):
        with pytest.raises(ConfigError, match="weights-share-memory"):
            refuse_unsupported(tied_by_memory(weight), run_of(0, dtype))


@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("stage", "dtype", "is_refused"),
    [
        (0, "fp32", False),
        (0, "bf16", False),
        (1, "fp32", True),
        (2, "fp32", True),
        (3, "bf16", True),
    ],
)
def test_sparse_embeddings(embedding: Any, stage: int, dtype: str, is_refused: bool) -> None:
    model = nn.Sequential(embedding(4, 2, sparse=True))
    refuse_sparse_gradients(nn.Sequential(embedding(4, 2)), run_of(stage, dtype))
    frozen = nn.Sequential(embedding(4, 2, sparse=True).requires_grad_(False))
    refuse_sparse_gradients(frozen, run_of(stage, dtype))
    if not is_refused:
        refuse_sparse_gradients(model, run_of(stage, dtype))
        return
    with pytest.raises(
        ConfigError, match=r"its embedding 0 has sparse gradients.*\[sparse-gradient\]"
    ):
        refuse_sparse_gradients(model, run_of(stage, dtype))


def test_weights_are_stored_in_rows_with_the_same_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 5)).to(
            memory_format=torch.channels_last
        )
        model[1].weight = nn.Parameter(torch.randn(4, 5).t())
        return model

    expected = build()
    assert store_in_rows(build()) == ["0.weight", "1.weight"]
    make = in_rows(build, run_of())
    model = make()
    make()
    for name, weight in model.named_parameters():
        assert weight.is_contiguous(), name
        assert torch.equal(weight, expected.get_parameter(name))
    printed = capsys.readouterr().err
    assert printed.count("2 weights are not stored row by row") == 1
    in_rows(build, run_of(training={"channels_last": True}))()
    assert "row by row" not in capsys.readouterr().err


def test_a_model_that_is_handed_over_is_refused_before_any_rank_waits() -> None:
    config = run_of(task={"kind": "classification"}, batch={"micro_size": 2})
    with pytest.raises(ConfigError, match=r"\[lazy-weight\]"):
        gather_parts(config, Objects(model=lazy()))
    with pytest.raises(ConfigError, match=r"\[lazy-weight\]"):
        gather_parts(config, Objects(model=lazy)).build_model()
