"""Clipping at ZeRO stage 0 in fp32: the numbers of torch, and nothing that waits for the device."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from framework.engine.workarounds.grad_norm import KeptNorm

COPIES = {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::_to_copy"}


class Copies(TorchDispatchMode):
    """Notes operators by which a number of the host comes to the device, or one of the device to
    the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        self.found += [name] if name in COPIES else []
        return func(*args, **(kwargs or {}))


def model(scale: float, seed: int = 0) -> torch.nn.Module:
    """A model with gradients; one layer in bf16, one parameter without a gradient."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(7, 31), torch.nn.Linear(31, 3).to(torch.bfloat16), torch.nn.Linear(3, 1)
    )
    for parameter in (*made[0].parameters(), *made[1].parameters(), made[2].weight):
        parameter.grad = (scale * torch.randn(parameter.shape)).to(parameter.dtype)
    return made


def kept(module: torch.nn.Module, limit: float) -> KeptNorm:
    engine: Any = SimpleNamespace(
        module=module, gradient_clipping=lambda: limit, device=torch.device("cpu"), mpu=None
    )
    return KeptNorm(engine)


@pytest.mark.parametrize("limit", [0.1, 1.0, 1.7, 1e9])
@pytest.mark.parametrize("scale", [1e-6, 0.3, 17.0, math.nan, math.inf])
def test_norm_and_gradients_are_those_of_torch(scale: float, limit: float) -> None:
    ours, theirs = model(scale), model(scale)
    norm = kept(ours, limit)
    norm()
    for parameter in theirs.parameters():  # torch rounds the norm of a bf16 gradient to bf16
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.float()
        parameter.grad = None if gradient is None else gradient.float()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    assert norm.norm is not None
    torch.testing.assert_close(norm.norm, expected, equal_nan=True)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad, other.grad.to(own.dtype), equal_nan=True)


def test_sparse_gradients_are_clipped_like_dense_ones() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 4, sparse=True)
    dense = torch.nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
    rows = torch.tensor([1, 3, 3, 1, 7])
    for made in (table, dense):
        (made(rows) * torch.arange(1.0, 6.0)[:, None]).sum().backward()
    norm = kept(table, 0.5)
    norm()
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
    assert norm.norm is not None
    torch.testing.assert_close(norm.norm, expected)
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense(), dense.weight.grad)


def test_nothing_is_copied_between_host_and_device() -> None:
    made = model(1.0)
    made[1].float()  # of another type a gradient is copied, on the device
    norm = kept(made, 1.0)
    with Copies() as copies:  # `tensor` copies its number: such a copy is found
        torch.tensor(1.0)
    assert copies.found == ["aten::lift_fresh"]
    with Copies() as copies:
        norm()
    assert copies.found == []


def test_gradients_are_forgotten() -> None:
    made = model(1.0)
    kept(made, 1.0).forget_gradients()
    assert all(parameter.grad is None for parameter in made.parameters())


def test_no_gradient_at_all_is_a_norm_of_zero() -> None:
    norm = kept(torch.nn.Linear(2, 2), 1.0)
    norm()
    assert norm.norm == 0.0
