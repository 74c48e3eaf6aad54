"""The choice of a kernel of attention: from a table of times, from kernels that are there and that
are not, and what it changes for a run. Torch's own on processors, flash and math, are real here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from framework.config.load import config_from_values
from framework.engine import attention_kernels
from framework.engine.attention_kernels import (
    AttentionShape,
    Kernel,
    attention_shape,
    choose_kernel,
    kernel_of_run,
    measured,
)
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from tests.models.operator_calls import Calls

CPU = torch.device("cpu")
SMALL = AttentionShape(batch=2, heads=4, kv_heads=2, length=8, head_size=16)
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "rank", lambda: 0)
    monkeypatch.setattr(attention_kernels, "from_rank0", lambda value: value)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    printed: list[str] = []
    monkeypatch.setattr(attention_kernels, "print_line", printed.append)
    return printed  # type: ignore[return-value]


def plan_of(**values: Any) -> Plan:
    base: dict[str, Any] = {
        "model": {"kind": "gpt", "size": "tiny", "num_heads": 4, "num_kv_heads": 2},
        "data": {"kind": "text", "sequence_length": 32},
        "task": {"kind": "causal_lm"},
        "precision": {"dtype": "bf16"},
        "zero": {"stage": 1},
        "batch": {"micro_size": 3},
    }
    return make_plan(config_from_values(base | values), Cluster(devices_per_host=1, device="cpu"))


def operators() -> set[str]:
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    with Calls() as calls:
        scaled_dot_product_attention(query, query, query, is_causal=True)
    return set(calls.of)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"flash": 3.0, "efficient": 5.0, "cudnn": 2.0}, "cudnn"),
        ({"flash": 3.0, "efficient": 5.0, "cudnn": 2.9}, None),  # two measurements differ so
        ({"flash": 3.0, "fa3": 1.5, "cudnn": 2.0}, "fa3"),
        ({"flash": 3.0, "efficient": 5.0}, None),
        ({"efficient": 5.0, "cudnn": 4.0}, "cudnn"),  # a mask, which flash does not take
        ({"cudnn": 4.0}, None),
        ({}, None),
    ],
)
def test_another_kernel_is_chosen_only_if_it_is_faster(
    times: dict[str, float], expected: str | None
) -> None:
    assert choose_kernel(times) == expected


def test_kernels_that_are_there_are_measured_and_others_have_a_reason() -> None:
    times, reasons = measured(SMALL, torch.float32, CPU)
    assert times.keys() == {"flash"}
    assert times["flash"] > 0
    assert reasons.keys() == {"efficient", "cudnn", "fa3"}
    assert all(reasons.values())
    times, _ = measured(SMALL._replace(is_causal=False, is_masked=True), torch.float32, CPU)
    assert times.keys() == {"flash"}  # of processors takes masks


@pytest.mark.parametrize("name", ["flash", "math"])
def test_a_named_kernel_computes_attention_and_only_within_the_block(name: str) -> None:
    before = operators()
    with kernel_of_run(plan_of(training={"max_steps": 1, "attention": name}), nn.Identity(), CPU):
        within = operators()
    assert (FLASH in within) == (name == "flash")
    assert operators() == before


def test_both_kernels_compute_the_same() -> None:
    query = torch.randn(2, 4, 8, 16, dtype=torch.float64)
    results = []
    for name in ("flash", "math"):
        with Kernel(name).first():
            results.append(scaled_dot_product_attention(query, query, query, is_causal=True))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["cudnn", "efficient", "fa3"])
def test_a_named_kernel_that_is_not_there_is_refused_with_the_reason(name: str) -> None:
    plan = plan_of()
    training = plan.config.training.model_copy(update={"attention": name})
    config = plan.config.model_copy(update={"training": training})
    asked: Any = SimpleNamespace(config=config, layout=plan.layout)
    with (
        pytest.raises(
            ConfigError, match=r"cannot compute attention .* set training.attention: auto"
        ),
        kernel_of_run(asked, nn.Identity(), CPU),
    ):
        pass


@pytest.mark.parametrize("name", ["cudnn", "efficient", "fa3"])
def test_check_knows_that_processors_have_no_such_kernel(name: str) -> None:
    with pytest.raises(ConfigError, match="attention-kernel-on-cpu"):
        plan_of(training={"max_steps": 1, "attention": name})


def test_the_fastest_is_taken_and_a_line_has_the_times(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"flash": 0.003, "cudnn": 0.002}
    monkeypatch.setattr(attention_kernels, "measured", lambda *_: (table, {"fa3": "not installed"}))
    used: list[str] = []
    monkeypatch.setattr(Kernel, "first", lambda self: used.append(self.name) or nullcontext())  # type: ignore[func-returns-value]
    with kernel_of_run(plan_of(), nn.Identity(), CPU):
        pass
    assert used == ["cudnn"]
    assert lines == [
        "training.attention: auto takes cudnn (ms forward and backward: flash 3.00, cudnn 2.00)"
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"precision": {"dtype": "fp32"}},
        {"training": {"max_steps": 1, "deterministic": True}},
        {
            "data": {"kind": "digits"},
            "model": {"kind": "lenet"},
            "task": {"kind": "classification"},
        },
    ],
    ids=["fp32", "deterministic", "no-attention"],
)
def test_nothing_is_measured_where_nothing_is_to_be_chosen(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(attention_kernels, "measured", refuse)
    with kernel_of_run(plan_of(**values), nn.Identity(), CPU):
        pass


def test_shapes_are_those_of_a_rank() -> None:
    shape = attention_shape(plan_of(), nn.Identity())
    assert shape == AttentionShape(batch=3, heads=4, kv_heads=2, length=32, head_size=32)
    masked = attention_shape(
        plan_of(
            model={"kind": "bert", "size": "tiny"},
            data={"kind": "text_pairs", "sequence_length": 32},
            task={"kind": "masked_lm"},
        ),
        nn.Identity(),
    )
    assert masked == AttentionShape(3, 2, 2, 32, 64, is_causal=False, is_masked=True)


def test_models_of_transformers_have_theirs() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].config = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=16
    )
    plan = plan_of(model={"target": "torch.nn:Identity"})
    assert attention_shape(plan, model) == AttentionShape(3, 8, 2, 32, 16)
    assert attention_shape(plan, nn.Identity()) is None
