"""Logits whose product has rows filled up, against the plain product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from framework.models import filled_rows
from framework.models.filled_rows import FilledProduct, is_filled, logits_of
from tests.models.operator_calls import Calls


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 16, dtype=dtype, generator=generator)
    weight = torch.randn(67, 16, dtype=dtype, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 0.02)])
def test_logits_and_gradients_are_those_of_the_plain_product(
    dtype: torch.dtype, tolerance: float
) -> None:
    targets = torch.randint(0, 67, (10,), generator=torch.Generator().manual_seed(1))
    results = []
    for product in (FilledProduct.apply, linear):
        hidden, weight = inputs(dtype)
        logits = product(hidden, weight)
        assert logits.shape == (2, 5, 67)
        loss = cross_entropy(logits.flatten(0, -2).float(), targets)
        loss.backward()
        results.append((logits, loss, hidden.grad, weight.grad))
    for filled, plain in zip(*results, strict=True):
        scale = float(plain.abs().max())
        torch.testing.assert_close(filled, plain, rtol=0, atol=tolerance * scale)


def test_every_product_has_rows_that_are_fast() -> None:
    hidden, weight = inputs(torch.bfloat16)
    shapes: list[tuple[int, ...]] = []

    class Shapes(Calls):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.overloadpacket.__name__ == "mm":
                shapes.extend(tuple(arg.shape) for arg in args)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Shapes():
        FilledProduct.apply(hidden, weight).sum().backward()
    assert len(shapes) == 6
    assert sum(128 in shape for shape in shapes) >= 3
    assert not any(67 in shape for shape in shapes)


def test_frozen_weights_have_no_gradient() -> None:
    hidden, weight = inputs(torch.float64)
    FilledProduct.apply(hidden, weight.detach()).sum().backward()
    assert hidden.grad is not None
    hidden, weight = inputs(torch.float64)
    FilledProduct.apply(hidden.detach(), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize(
    ("device", "dtype", "positions", "tokens", "expected"),
    [
        ("cuda", torch.bfloat16, 1024, 50257, True),
        ("cuda", torch.float16, 1024, 50257, True),
        ("cuda", torch.bfloat16, 1024, 50304, False),
        ("cuda", torch.bfloat16, 1024, 50264, False),
        ("cuda", torch.float32, 1024, 50257, False),
        ("cuda", torch.bfloat16, 8, 50257, False),  # a token of each row, as generation has it
        ("cpu", torch.bfloat16, 1024, 50257, False),
    ],
)
def test_when_rows_are_filled_up(
    device: str, dtype: torch.dtype, positions: int, tokens: int, expected: bool
) -> None:
    assert is_filled(device, dtype, positions, tokens) == expected


@pytest.mark.parametrize("autocast", [False, True])
def test_the_type_is_that_of_the_plain_product(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight = inputs(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = linear(hidden, weight)
        monkeypatch.setattr(filled_rows, "is_filled", lambda *_: True)
        filled = logits_of(hidden, weight)
    assert filled.dtype == plain.dtype
    filled.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == weight.dtype
    torch.testing.assert_close(filled, plain)
