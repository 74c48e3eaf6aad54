"""Clipping at ZeRO stage 0 in fp32: DeepSpeed's numbers to the bit, and nothing that waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups
from torch.utils._python_dispatch import TorchDispatchMode

from framework.engine.workarounds.grad_norm import KeptNorm

COPIES = {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::_to_copy"}


@pytest.fixture(autouse=True)
def _group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank with gloo, in which DeepSpeed believes that there are three: a third of a norm is rounded."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    everyone = torch.distributed.group.WORLD
    monkeypatch.setattr(groups, "_get_data_parallel_group", lambda: everyone)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(deepspeed.comm, "all_reduce", lambda tensor, group=None: tensor.mul_(3.0))
    yield
    torch.distributed.destroy_process_group()


class Copies(TorchDispatchMode):
    """Notes operators by which a number of the host comes to the device, or one of the device to the host."""

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
    made = torch.nn.Sequential(torch.nn.Linear(7, 31), torch.nn.Linear(31, 3).to(torch.bfloat16), torch.nn.Linear(3, 1))
    for parameter in (*made[0].parameters(), *made[1].parameters(), made[2].weight):
        parameter.grad = (scale * torch.randn(parameter.shape)).to(parameter.dtype)
    return made


def kept(module: torch.nn.Module, limit: float) -> KeptNorm:
    engine: Any = SimpleNamespace(module=module, gradient_clipping=lambda: limit, device=torch.device("cpu"), mpu=None)
    return KeptNorm(engine)


@pytest.mark.parametrize("limit", [0.1, 1.0, 1.7, 1e9])
@pytest.mark.parametrize("scale", [1e-6, 0.3, 17.0, math.nan, math.inf])
def test_norm_and_gradients_are_those_of_deepspeed_to_the_bit(scale: float, limit: float) -> None:
    for seed in range(8):
        ours, theirs = model(scale, seed), model(scale, seed)
        norm = kept(ours, limit)
        norm()
        expected = clip_grad_norm_(parameters=theirs.parameters(), max_norm=limit)
        assert norm.norm is not None
        assert torch.equal(norm.norm.view(torch.int32), expected.view(torch.int32))
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if other.grad is None:
                assert own.grad is None
            else:
                assert torch.equal(own.grad.view(torch.uint8), other.grad.view(torch.uint8))


def test_nothing_is_copied_between_host_and_device() -> None:
    made = model(1.0)
    made[1].float()  # of another type a gradient is copied, on the device
    norm = kept(made, 1.0)
    with Copies() as copies:
        clip_grad_norm_(parameters=made.parameters(), max_norm=1.0)
    assert copies.found.count("aten::lift_fresh") == 2
    with Copies() as copies:
        norm()
    assert copies.found == []


def test_no_gradient_at_all_is_a_norm_of_zero() -> None:
    norm = kept(torch.nn.Linear(2, 2), 1.0)
    norm()
    assert norm.norm == 0.0
