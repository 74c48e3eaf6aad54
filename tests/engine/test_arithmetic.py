"""fp32 that is fp32, and runs that are equal to the bit where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.config.load import config_from_values
from framework.engine import plain_engine
from framework.engine.known_failures import known_failure
from framework.engine.plain_engine import arithmetic_of
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan


def plan_of(**values: Any) -> Plan:
    return make_plan(config_from_values(values), Cluster(devices_per_host=1))


def state() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.parametrize(("matmul", "tf32"), [("highest", False), ("high", True), ("medium", True)])
def test_convolutions_take_tf32_where_products_may(matmul: str, tf32: bool) -> None:
    before = state()
    with arithmetic_of(plan_of(precision={"dtype": "fp32", "matmul": matmul})):
        assert state() == (matmul, tf32, before[2], False)
    assert state() == before


def test_deterministic_runs_refuse_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a user's own stays
    before = state()
    with arithmetic_of(plan_of(training={"deterministic": True})):
        assert torch.are_deterministic_algorithms_enabled()
        indices = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        with pytest.raises(RuntimeError) as caught:
            torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), indices, 1)
    assert state() == before
    assert str(known_failure(caught.value)).startswith(
        "max_unpooling2d_forward_out gives other bits in every run"
    )
    assert str(known_failure(caught.value)).endswith("[not-deterministic]")


def test_the_operation_whose_gradient_is_nan_is_named() -> None:
    number = torch.zeros(1, requires_grad=True)
    with arithmetic_of(plan_of(training={"detect_anomaly": True})):
        root = torch.sqrt(number * 0)
        with pytest.raises(RuntimeError) as caught, pytest.warns(UserWarning, match=r"number \* 0"):
            root.backward()
    assert not torch.is_anomaly_enabled()
    assert str(known_failure(caught.value)).startswith("the gradient of Mul is NaN; ")


class WithHead(torch.nn.Linear):
    """A model that is its own output layer."""

    def get_output_embeddings(self) -> torch.nn.Module:
        return self


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "is_warned"),
    [
        ("cuda", "bf16", 50257, True),
        ("cpu", "bf16", 50257, False),
        ("cuda", "fp32", 50257, False),
        ("cuda", "bf16", 50304, False),
    ],
)
def test_an_output_layer_that_gpus_compute_slowly_is_mentioned(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    dtype: str,
    tokens: int,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(plain_engine, "device_name", lambda: device)
    plain_engine._tiles(WithHead(1, tokens), plan_of(precision={"dtype": dtype}), None)
    assert ("rows of 50,257 numbers" in capsys.readouterr().err) == is_warned
