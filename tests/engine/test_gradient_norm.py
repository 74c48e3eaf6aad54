"""One norm of many gradients, as exact for long ones as for short ones."""

from __future__ import annotations

import pytest
import torch

from framework.engine.gradient_norm import norm_of

CPU = torch.device("cpu")


def test_the_norm_of_none_is_zero() -> None:
    assert float(norm_of([], device=CPU)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_gradients_count_whatever_their_shape_and_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    image = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last).to(dtype)
    gradients = [torch.randn(7, 3).to(dtype), image, torch.randn(()).to(dtype)]
    expected = torch.cat([one.double().flatten() for one in gradients]).norm()
    assert float(norm_of(gradients, device=CPU)) == pytest.approx(float(expected), rel=1e-6)


def test_long_gradients_lose_no_digits() -> None:
    torch.manual_seed(0)
    gradient = 1e-3 * torch.randn(2**23 + 5)
    expected = float(gradient.double().norm())
    assert float(norm_of([gradient], device=CPU)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_shows(value: float) -> None:
    gradient = torch.zeros(2**20)
    gradient[-1] = value
    assert not torch.isfinite(norm_of([torch.ones(3), gradient], device=CPU))
