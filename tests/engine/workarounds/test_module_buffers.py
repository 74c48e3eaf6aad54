"""Buffers of two ranks, one after the other in this process: what the first sends is what the
second gets.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from framework.engine.workarounds import module_buffers
from framework.engine.workarounds.module_buffers import share_buffers

DTYPES = [
    torch.bool,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.uint8,
    torch.float64,
    torch.int16,
]


class Net(nn.Module):
    """Buffers of many types and odd sizes, one that is not contiguous, one that is shared, one that
    no checkpoint holds.
    """

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(5)
        with torch.no_grad():
            for tensor in (
                self.norm.running_mean,
                self.norm.running_var,
                self.norm.num_batches_tracked,
            ):
                assert tensor is not None
                tensor.fill_(fill)
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"of_type_{number}", torch.full((number + 1, 3), fill).to(dtype))
        self.register_buffer("turned", torch.full((2, 3), float(fill)).t())
        self.register_buffer("twice", self.norm.running_mean)
        self.register_buffer("missing", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mask", torch.full((2,), fill), persistent=False)
        self.weight = nn.Parameter(torch.full((2,), float(fill)))


class Ranks:
    """Stands in for a group of two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_first = True
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
        monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: 4 + rank)
        monkeypatch.setattr(torch.distributed, "broadcast", self._broadcast)

    def _broadcast(self, tensor: torch.Tensor, source: int, *, group: Any) -> None:
        assert source == 4
        if self.is_first:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))

    def share(self, first: nn.Module, second: nn.Module, **options: Any) -> int:
        """Returns the number of messages."""
        messages = 0
        for module in (first, second):
            self.is_first = module is first
            engine: Any = SimpleNamespace(
                module=module, data_parallel_group=None, device=torch.device("cpu")
            )
            share_buffers(engine, **options)
            messages = len(self.sent) if self.is_first else messages
        assert not self.sent
        return messages


def test_every_rank_gets_the_buffers_of_the_first_and_keeps_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Net(1), Net(0)
    places = {name: buffer.data_ptr() for name, buffer in second.named_buffers()}
    assert Ranks(monkeypatch).share(first, second) == 1
    known = dict(first.named_buffers())
    for name, buffer in second.named_buffers():
        assert torch.equal(buffer, known[name]) is (name != "mask")
        assert buffer.data_ptr() == places[name]
    assert second.weight.tolist() == [0.0, 0.0]
    assert second.twice is second.norm.running_mean


def test_what_no_checkpoint_holds_is_sent_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Net(1), Net(0)
    Ranks(monkeypatch).share(first, second, unsaved=True)
    assert second.get_buffer("mask").tolist() == [1, 1]


def test_large_buffers_are_sent_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_buffers, "_BUCKET_BYTES", 64)
    first, second = Net(1), Net(0)
    assert Ranks(monkeypatch).share(first, second) > 3
    known = dict(first.named_buffers())
    assert all(
        torch.equal(buffer, known[name])
        for name, buffer in second.named_buffers()
        if name != "mask"
    )


def test_one_number_seen_in_many_places_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for net in (first, second):
        net.register_buffer("ones", torch.ones(1).expand(4), persistent=False)
    assert Ranks(monkeypatch).share(first, second, unsaved=True) == 0


def test_a_model_without_buffers_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch).share(nn.Linear(2, 2), nn.Linear(2, 2), unsaved=True) == 0
