"""Torch's kernels of attention on a GPU: which are there, that they agree, and that a named one is
the one that runs.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from framework.engine.attention_kernels import AttentionShape, Kernel, choose_kernel, measured
from tests.models.operator_calls import Calls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GPT2 = AttentionShape(batch=8, heads=12, kv_heads=12, length=1024, head_size=64)
OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


def test_kernels_are_measured_and_one_is_chosen() -> None:
    times, reasons = measured(GPT2, torch.bfloat16, torch.device("cuda"))
    assert {"flash", "efficient"} <= times.keys(), reasons
    assert choose_kernel(times) in (None, *times)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_first_kernel_runs_and_agrees_with_math(name: str) -> None:
    times, reasons = measured(GPT2, torch.bfloat16, torch.device("cuda"))
    if name not in times:
        pytest.skip(reasons[name])
    query = torch.randn(2, 12, 128, 64, device="cuda", dtype=torch.bfloat16)
    with Kernel("math").first():
        expected = scaled_dot_product_attention(
            query.double(), query.double(), query.double(), is_causal=True
        )
    with Kernel(name).first(), Calls() as calls:
        found = scaled_dot_product_attention(query, query, query, is_causal=True)
    assert OPERATORS[name] in calls.of
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
