"""Gradients are divided as DeepSpeed divides them; torch's fused Adam divides them as it reads
them.
"""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from framework.engine.gradient_divisor import clipping_divisor, dividing


@pytest.mark.parametrize(
    ("norm", "limit", "scale", "expected"),
    [
        (3.0, 0.0, 1.0, None),
        (3.0, 0.0, 8.0, 8.0),
        (0.5, 1.0, 1.0, 1.0),
        (4.0, 1.0, 1.0, 4.000001),
        (16.0, 1.0, 8.0, 16.000008),
    ],
)
def test_the_divisor_clips_and_unscales(
    norm: float, limit: float, scale: float, expected: float | None
) -> None:
    divisor = clipping_divisor(torch.tensor(norm), limit=limit, scale=scale)
    assert (divisor is None) == (expected is None)
    if divisor is not None:
        assert float(divisor) == pytest.approx(expected)


def test_a_norm_that_is_not_finite_leaves_no_finite_gradient() -> None:
    divisor = clipping_divisor(torch.tensor(torch.inf), limit=1.0, scale=1.0)
    gradient = torch.tensor([1.0, torch.inf])
    with dividing(torch.optim.SGD([torch.zeros(2, requires_grad=True)]), [gradient], divisor):
        assert float(gradient[0]) == 0.0
        assert gradient[1].isnan()


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_is_that_of_divided_gradients(fused: bool) -> None:
    stepped = []
    for divides in (False, True):
        torch.manual_seed(0)
        weight = torch.randn(100, requires_grad=True)
        optimizer = AdamW([weight], lr=0.1, fused=fused)
        for _ in range(3):
            weight.grad = torch.randn(100)
            divisor = torch.tensor(3.0)
            if not divides:
                weight.grad /= divisor
                divisor = None  # type: ignore[assignment]
            before = weight.grad.clone()
            with dividing(optimizer, [weight.grad], divisor):
                # the fused kernel divides them by itself
                assert torch.equal(weight.grad, before) == (fused or not divides)
                optimizer.step()
        assert not hasattr(optimizer, "grad_scale")
        stepped.append(weight.detach())
    torch.testing.assert_close(*stepped, rtol=1e-6, atol=1e-6)
