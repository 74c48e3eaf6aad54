"""Attention of chunks on a CUDA device, by torch's kernel: added over two chunks of keys it is that
over all of them, and so are its gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from framework.models.attention_blocks import block_backward, block_forward
from framework.models.ring import add_chunk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: attention of chunks by torch's kernel not run",
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [256, 100])
def test_two_chunks_are_the_whole(dtype: torch.dtype, length: int) -> None:
    """Of the second chunk's queries: all of the first chunk's keys, and their own up to each."""
    torch.manual_seed(1)
    shape = (2, 4, 2 * length, 64)
    given = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    query, key, value = given
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)[:, :, length:]
    upper = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, given, upper)
    how: dict[str, Any] = {"dropout": 0.0, "scale": 0.125}
    second = slice(length, None)
    mixed = torch.zeros(expected.shape, device="cuda")
    sums = torch.full(expected.shape[:3], -torch.inf, device="cuda")
    chunks = ((slice(0, length), False), (second, True))
    states: list[Any] = []
    with torch.no_grad():
        queries = query[:, :, second]
        for keys, is_causal in chunks:
            made, made_sums, state = block_forward(
                queries, key[:, :, keys], value[:, :, keys], None, is_causal=is_causal, **how
            )
            add_chunk(mixed, sums, made, made_sums)
            states.append(state)
        found = [torch.zeros(shape, device="cuda") for _ in range(3)]
        for (keys, is_causal), state in zip(chunks, states, strict=True):
            gradients = block_backward(
                upper,
                queries,
                key[:, :, keys],
                value[:, :, keys],
                mixed.to(dtype),
                sums,
                None,
                state,
                is_causal=is_causal,
                **how,
            )
            for whole, part, place in zip(found, gradients, (second, keys, keys), strict=True):
                whole[:, :, place] += part
    bound = 1e-4 if dtype == torch.float32 else 0.03
    for one, other in zip((mixed, *found), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(one, other.float(), atol=bound, rtol=bound)
