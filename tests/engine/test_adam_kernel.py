"""A run goes on with its own kernel of torch's Adam from the checkpoint of any other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import AdamW, Optimizer

from framework.engine.adam_kernel import keep_kernels, kernels_of


def stepped(optimizer: Optimizer, num_steps: int, *, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def made(*, fused: bool) -> AdamW:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size)) for size in (5, 33)]
    return AdamW([{"params": [weight]} for weight in weights], lr=0.1, fused=fused)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_resumed_run_steps_by_its_own_kernel(before: bool, after: bool) -> None:
    first = made(fused=before)
    weights = stepped(first, 3, seed=1)
    saved = copy.deepcopy(first.state_dict())
    unbroken = stepped(first, 3, seed=2)
    resumed = made(fused=after)
    kernels = kernels_of(resumed)
    resumed.load_state_dict(saved)
    keep_kernels(resumed, kernels)
    for group, weight in zip(resumed.param_groups, weights, strict=True):
        assert group["fused"] is after
        group["params"][0].data.copy_(weight)
    found = stepped(resumed, 3, seed=2)
    for one, other in zip(found, unbroken, strict=True):
        if before == after:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_counters_lie_where_the_kernel_reads_them() -> None:
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = AdamW([weight], fused=False)
    optimizer.state[weight] = {"step": torch.tensor(4.0), "exp_avg": torch.empty(3, device="meta")}
    keep_kernels(optimizer, [{"fused": True, "foreach": None}])
    assert optimizer.state[weight]["step"].device.type == "meta"
    optimizer.state[weight]["step"] = torch.tensor(4, dtype=torch.int64)
    keep_kernels(optimizer, [{"fused": None, "foreach": None}])
    assert optimizer.state[weight]["step"].device.type == "cpu"
    assert optimizer.state[weight]["step"].dtype == torch.float32


def test_other_optimizers_are_left_alone() -> None:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert kernels_of(sgd) == []
    keep_kernels(sgd, [])
