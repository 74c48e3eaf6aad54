"""Packed rows on a CUDA device: torch's kernel for texts of different lengths, and text by text,
against a mask of all pairs of positions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from framework.models.packed_attention import (
    attend_within_texts,
    note_texts,
    packed_rows,
    texts_mask,
    why_no_kernel,
)
from framework.recipes.language_models.gpt import GPT
from tests.models.packed import Rows, places_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: torch's kernel for packed rows not run",
    ),
]

ROWS: Rows = ((30, 50, 176), (256,), (1, 1, 254), (128, 128))


def on_device(rows: Rows) -> Tensor:
    places = places_of(rows)
    note_texts(places)
    moved = places.cuda()
    moved.noted_texts = places.noted_texts  # type: ignore[attr-defined]
    return moved


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_texts_are_what_the_mask_computes(
    dtype: torch.dtype, kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(3)
    places = on_device(ROWS)
    inputs = []
    for heads in (4, kv_heads, kv_heads):
        tensor = torch.randn(len(ROWS), heads, 256, 64, device="cuda", dtype=dtype)
        inputs.append(tensor.requires_grad_())
    has_kernel = why_no_kernel(inputs[0], inputs[2]) == ""
    assert has_kernel == (dtype != torch.float32)
    mixed = attend_within_texts(*inputs, packed_rows(places), window=window)
    query, key, value = (tensor.float() for tensor in inputs)
    repeats = 4 // kv_heads
    expected = scaled_dot_product_attention(
        query,
        key.repeat_interleave(repeats, 1),
        value.repeat_interleave(repeats, 1),
        attn_mask=texts_mask(places, window=window),
    )
    atol = 1e-4 if dtype == torch.float32 else 0.03
    upper = torch.randn_like(expected)
    torch.testing.assert_close(mixed.float(), expected, atol=atol, rtol=atol)
    ours = torch.autograd.grad(mixed, inputs, upper.to(dtype))
    for one, other in zip(ours, torch.autograd.grad(expected, inputs, upper), strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2 * atol, rtol=2 * atol)


def test_dropout_is_the_same_in_both_passes() -> None:
    """With the values of a unit matrix the output is the weights themselves, with what was left
    out.
    """
    torch.manual_seed(3)
    length, share = 64, 0.25
    places = on_device([[40, 24]])
    rows, seen = packed_rows(places), texts_mask(places)[0, 0]
    query = torch.zeros(1, 1, length, length, device="cuda", dtype=torch.bfloat16)
    value = torch.eye(length, device="cuda", dtype=torch.bfloat16)[None, None].requires_grad_()
    assert why_no_kernel(query, value) == ""
    mixed = attend_within_texts(query, query, value, rows, dropout=share)
    weights = mixed[0, 0].detach()
    assert (weights[~seen] == 0).all()
    assert 0.2 < (weights[seen] == 0).float().mean() < 0.3
    upper = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upper)
    torch.testing.assert_close(gradient[0, 0], weights.T @ upper[0, 0], atol=0.1, rtol=0.05)


def test_a_gpt_does_not_wait_for_the_device() -> None:
    torch.manual_seed(2)
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_layers": 2, "num_heads": 4}
    model = GPT.of(**sizes, num_kv_heads=2, mlp_size=512, max_positions=2048, positions="rotary")
    model = model.cuda().bfloat16()
    length = 2048
    tokens = torch.randint(0, 512, (2, length), device="cuda")
    places = on_device([[length // 16] * 16] * 2)
    model(tokens, places)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = model(tokens, places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    alone = model(tokens[:, : length // 16])
    torch.testing.assert_close(logits[:, : length // 16], alone, atol=0.05, rtol=0.05)


def test_a_compiled_block_takes_another_number_of_texts() -> None:
    torch.compiler.reset()
    torch.manual_seed(2)
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_layers": 1, "num_heads": 4}
    model = GPT.of(**sizes, num_kv_heads=4, mlp_size=512, max_positions=256, positions="rotary")
    model = model.cuda().bfloat16()
    tokens = torch.randint(0, 512, (4, 256), device="cuda")
    batches = [on_device(rows) for rows in (ROWS, ((256,),) * 4, ((64,) * 4,) * 4)]
    expected = [model(tokens, places) for places in batches]
    model.get_submodule("blocks.0").compile(fullgraph=True)
    for places, logits in zip(batches, expected, strict=True):
        torch.testing.assert_close(model(tokens, places), logits, atol=0.05, rtol=0.05)
