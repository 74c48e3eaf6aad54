"""Attention over a part of the keys: torch's kernel and the steps by hand, against each other and
against the definition, queries that see nothing included.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from framework.models import attention_blocks
from framework.models.attention_blocks import block_backward, block_forward

HOW: dict[str, Any] = {"is_causal": False, "dropout": 0.0, "scale": 0.4}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Five queries, and seven keys and values, of two heads."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return query, key, value


def half_seen() -> Tensor:
    """A mask in which one query sees nothing."""
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[1, 0, 2] = False
    mask[0, 0, 1] = False
    return mask


def both(monkeypatch: pytest.MonkeyPatch, mask: Tensor | None, how: dict[str, Any]) -> Any:
    """Return the results of torch's kernel and of the steps, with what the backward pass makes."""
    made = []
    query, key, value = inputs()
    gradient = torch.ones(2, 2, 5, 8, dtype=torch.float64)
    for _ in range(2):
        mixed, sums, state = block_forward(query, key, value, mask, **how)
        safe = sums.masked_fill(sums == -torch.inf, 0.0)
        backward = block_backward(gradient, query, key, value, mixed, safe, mask, state, **how)
        made.append((mixed, sums, *backward))
        monkeypatch.setattr(attention_blocks, "_kernel_of", lambda *_: "")
    return made


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_kernel_is_the_steps(monkeypatch: pytest.MonkeyPatch, is_masked: bool) -> None:
    """The kernel's own sum of a query that sees nothing is 0, as of one that sees a score of 0."""
    monkeypatch.setattr(attention_blocks, "_QUERIES", 2)
    mask = half_seen() if is_masked else None
    kernel, steps = both(monkeypatch, mask, HOW)
    for one, other in zip(kernel, steps, strict=True):
        torch.testing.assert_close(one, other)
    assert bool((kernel[1] == -torch.inf).any()) == is_masked
    assert not any(tensor.isnan().any() for tensor in kernel)


def test_a_triangle_is_what_a_mask_of_it_sees() -> None:
    query, key, value = inputs()
    key = key[:, :, :5]
    value = value[:, :, :5]
    triangle = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    for one, other in zip(
        block_forward(query, key, value, None, **HOW | {"is_causal": True})[:2],
        block_forward(query, key, value, triangle, **HOW)[:2],
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gradients_are_those_of_the_weights_that_dropout_left() -> None:
    query, key, value = given = inputs()
    for tensor in given:
        tensor.requires_grad_()
    how = HOW | {"dropout": 0.3}
    with torch.no_grad():
        mixed, sums, kept = block_forward(query, key, value, None, **how)
    assert 0.5 < kept[0].double().mean() < 0.9
    weights = (query @ key.transpose(-2, -1) * 0.4).softmax(-1)
    expected = (weights * kept[0] / 0.7) @ value
    torch.testing.assert_close(mixed, expected)
    gradient = torch.randn_like(mixed)
    found = block_backward(gradient, query, key, value, mixed, sums, None, kept, **how)
    for one, other in zip(found, torch.autograd.grad(expected, given, gradient), strict=True):
        torch.testing.assert_close(one, other)


def test_the_kernel_of_gpus_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the shapes of torch's own operators; tests/gpu has the numbers."""
    monkeypatch.setattr(attention_blocks, "_kernel_of", lambda *_: "cuda")
    query, key, value = given = [tensor.to("meta", torch.bfloat16) for tensor in inputs()]
    mixed, sums, state = block_forward(query, key, value, None, **HOW)
    assert (mixed.shape, sums.shape, sums.dtype) == ((2, 2, 5, 8), (2, 2, 5), torch.float32)
    made = block_backward(mixed, query, key, value, mixed, sums, None, state, **HOW)
    assert [tensor.shape for tensor in made] == [tensor.shape for tensor in given]


@pytest.mark.parametrize(
    ("device", "dtype", "size", "value_size", "is_masked", "dropout", "kernel"),
    [
        ("cuda", torch.bfloat16, 64, 64, False, 0.1, "cuda"),
        ("cuda", torch.float16, 64, 64, True, 0.0, ""),
        ("cuda", torch.float32, 64, 64, False, 0.0, ""),
        ("cuda", torch.bfloat16, 60, 60, False, 0.0, ""),
        ("cuda", torch.bfloat16, 512, 512, False, 0.0, ""),
        ("cuda", torch.bfloat16, 64, 32, False, 0.0, ""),
        ("cpu", torch.float32, 5, 5, True, 0.0, "cpu"),
        ("cpu", torch.float32, 5, 5, False, 0.1, ""),
    ],
)
def test_which_kernel_computes_a_block(
    device: str,
    dtype: torch.dtype,
    size: int,
    value_size: int,
    is_masked: bool,
    dropout: float,
    kernel: str,
) -> None:
    class Heads:
        def __init__(self, size: int) -> None:
            self.shape = (1, 1, 4, size)
            self.dtype = dtype
            self.device = torch.device(device)

    mask = torch.ones(1) if is_masked else None
    found = attention_blocks._kernel_of(Heads(size), Heads(value_size), mask, dropout)  # type: ignore[arg-type]
    assert found == kernel
