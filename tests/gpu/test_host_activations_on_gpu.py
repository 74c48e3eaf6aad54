"""On a GPU: saved values in page-locked memory of the host, copied beside the computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from framework.models import host_activations
from framework.models.host_activations import HostActivations
from framework.recipes.language_models.gpt import GPT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: activations in page-locked memory not run",
    ),
]


def test_gradients_are_the_same_to_the_bit_and_the_device_holds_less() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 1024, "max_positions": 512, "hidden_size": 512, "num_layers": 8}
    model = GPT.of(**shape, num_heads=8, num_kv_heads=8, mlp_size=2048).cuda().bfloat16()
    ids = torch.randint(0, 1024, (8, 512), device="cuda")
    holding = HostActivations(model, ids.device)

    def step(*, holds: bool) -> tuple[list[Tensor], int]:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        if holds:
            with holding.saving():
                outputs = model(ids)
        else:
            outputs = model(ids)
        outputs.float().square().mean().backward()
        gradients = [weight.grad.clone() for weight in model.parameters()]
        return gradients, torch.cuda.max_memory_allocated()

    step(holds=False)  # kernels are loaded
    expected, peak = step(holds=False)
    again, _ = step(holds=False)
    is_exact = all(map(torch.equal, expected, again))  # attention's gradients may differ by run
    for _ in range(2):  # the second time in memory of the first
        found, held_peak = step(holds=True)
        for one, other in zip(found, expected, strict=True):
            if is_exact:
                assert torch.equal(one, other)
            torch.testing.assert_close(one, other, rtol=0.05, atol=1e-4)
    assert held_peak < 0.8 * peak
    assert holding.held_bytes == 0
    assert holding.most_bytes > 0.2 * peak


def test_an_error_of_locking_memory_is_no_error_of_the_next_kernel() -> None:
    memory = torch.zeros(1 << 16)
    lock = host_activations._runtime().cudaHostRegister
    assert int(lock(memory.data_ptr(), memory.nbytes, 0)) == 0
    try:
        assert int(lock(memory.data_ptr(), memory.nbytes, 0)) != 0
        host_activations._forget_error(torch.device("cuda"))
        assert float(torch.ones(3, device="cuda").sum()) == 3.0
    finally:
        host_activations._unpin([memory])
