"""The arithmetic of benchmarks/pipeline_idle.py."""

from __future__ import annotations

import pytest
import torch

from benchmarks.pipeline_idle import Sleeper, idle_share, summary, theory


@pytest.mark.parametrize(
    ("num_micro_batches", "num_stages", "expected"), [(1, 1, 0.0), (4, 2, 1 / 5), (8, 4, 3 / 11)]
)
def test_theory(num_micro_batches: int, num_stages: int, expected: float) -> None:
    assert theory(num_micro_batches, num_stages) == pytest.approx(expected)


def test_a_step_of_the_ideal_length_has_the_ratio_one() -> None:
    # Two stages, 4 micro-batches of 3 x 10 ms: five slots of 30 ms, of which each stage works in
    # four.
    rows = [{"step_seconds": 5 * 0.03, "slept_seconds": 4 * 0.03}] * 3
    found = summary(rows, num_micro_batches=4, forward_seconds=0.01)
    assert idle_share(5 * 0.03, 4 * 0.03) == pytest.approx(0.2)
    assert (found["idle"], found["ratio"], found["ratio_by_measured_sleep"]) == (0.2, 1.0, 1.0)
    assert found["added_ms_per_micro_batch"] == 0.0


def test_what_a_step_takes_longer_is_idle_and_is_reported_per_micro_batch() -> None:
    rows = [
        {"step_seconds": 5 * 0.03 + extra, "slept_seconds": 4 * 0.03} for extra in (0.0, 0.01, 0.05)
    ]
    found = summary(rows, num_micro_batches=4, forward_seconds=0.01)
    assert found["idle"] == pytest.approx(1 - 0.12 / 0.16)
    assert (found["idle_lowest"], found["idle_highest"]) == (0.2, pytest.approx(0.4))
    assert found["added_ms_per_micro_batch"] == pytest.approx(10 / 5)


def test_a_sleeping_layer_has_the_gradients_of_a_product_and_states_how_long_it_slept() -> None:
    layer = Sleeper(seconds=0.001)
    value = torch.randn(3, 8, requires_grad=True)
    before = Sleeper.slept_seconds
    layer(value).sum().backward()
    assert torch.equal(layer.weight.grad, value.sum(0))
    assert torch.equal(value.grad, layer.weight.expand(3, 8))
    assert Sleeper.slept_seconds - before >= 0.003
