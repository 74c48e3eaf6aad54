"""Saved values in host memory: the same gradients to the bit, bytes, and waits for copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.training import Training
from framework.models import host_activations
from framework.models.host_activations import CudaCopies, HostActivations, PlainCopies
from framework.models.prepare_model import prepare_model
from tests.models.small_models import IDS, MODELS, gpt

CPU = torch.device("cpu")


class LateCopies(PlainCopies):
    """Copies whose target has no values before the wait, and whose source may change after it."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def copy(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        self.order.append("copy")
        if target.is_floating_point():
            target.fill_(torch.nan)
        return target, source

    def wait(self, mark: tuple[Tensor, Tensor]) -> None:
        self.order.append("wait")
        target, source = mark
        target.copy_(source)


def one_step(
    model: nn.Module, inputs: tuple[Tensor, ...], holding: HostActivations | None
) -> dict[str, Tensor]:
    torch.manual_seed(7)
    if holding is None:
        outputs = model(*inputs)
    else:
        with holding.saving():
            outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.square().mean() for output in outputs).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("recomputed", [{}, {"recompute": "full"}, {"recompute": "selective"}])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("late", [False, True])
def test_gradients_are_the_same_to_the_bit(
    name: str, recomputed: dict[str, Any], late: bool
) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    other = build()
    other.load_state_dict(plain.state_dict())
    model = prepare_model(other, Training(**recomputed))
    copies = LateCopies() if late else None
    holding = HostActivations(model, CPU, copies)
    expected = one_step(plain, inputs, None)
    for _ in range(2):  # the second time in memory of the first
        found = one_step(model, inputs, holding)
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert holding.most_bytes > 0
    assert holding.held_bytes == 0, "what is not needed any more is held"


def test_with_recomputation_the_inputs_of_groups_are_held() -> None:
    torch.manual_seed(0)
    model = prepare_model(gpt(dropout=0.0), Training(recompute="full"))
    holding = HostActivations(model, CPU)
    one_step(model, (IDS,), holding)
    hidden_bytes = IDS.numel() * 32 * 4
    # Inputs of four blocks, norm and head: the tokens are too small to leave, and the sum with
    # positions needs nothing again.
    assert IDS.nbytes < host_activations.LEAST_BYTES
    assert holding.most_bytes == 6 * hidden_bytes


def test_a_tensor_that_several_operations_save_is_held_once() -> None:
    holding = HostActivations(nn.Module(), CPU)
    value = torch.randn(64, 64, requires_grad=True)
    with holding.saving():
        hidden = value * 2
        outputs = hidden.sin() + hidden.cos()
    assert holding.most_bytes == hidden.nbytes
    expected = 2 * (hidden.cos() - hidden.sin())
    outputs.sum().backward()
    assert torch.equal(value.grad, expected.detach())


def test_two_shapes_of_one_memory_are_held_once() -> None:
    holding = HostActivations(nn.Module(), CPU)
    value = torch.randn(32, 64)
    shapes = [value, value.T, value.view(8, 4, 64).transpose(0, 1)]
    packed = [holding._pack(shape) for shape in shapes]
    assert holding.most_bytes == value.nbytes
    for _ in range(host_activations.WINDOW):  # until they have left the device
        holding._pack(torch.randn(32, 64))
    for one, shape in zip(packed, shapes, strict=True):
        back = holding._unpack(one)
        assert torch.equal(back, shape)
        assert back.stride() == shape.stride()


def test_weights_buffers_and_views_of_them_stay() -> None:
    model = nn.Linear(64, 64)
    model.register_buffer("scale", torch.randn(64, 64))
    holding = HostActivations(model, CPU)
    value = torch.randn(1, 64, requires_grad=True)  # too small to leave
    with holding.saving():
        outputs = model(value) @ model.scale
    assert holding.most_bytes == 0
    outputs.sum().backward()


def test_the_device_holds_no_more_than_the_window() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    holding = HostActivations(model, CPU)
    with holding.saving():
        outputs = model(torch.randn(64, 64, requires_grad=True))
    held = [reference() for reference in holding._order.values()]
    on_device = [one for one in held if one is not None and one.tensor is not None]
    assert len(held) == 8
    assert len(on_device) == host_activations.WINDOW
    outputs.sum().backward()


def test_copies_are_begun_ahead_of_their_use() -> None:
    copies = LateCopies()
    holding = HostActivations(nn.Module(), CPU, copies)
    value = torch.randn(64, 64, requires_grad=True)
    with holding.saving():
        outputs = value
        for _ in range(6):
            outputs = outputs.sin()
    before = len(copies.order)
    outputs.sum().backward()
    # The last two are on the device still; with the first use the two before them are fetched.
    assert copies.order[before:][:4] == ["wait", "copy", "wait", "copy"]


@pytest.mark.parametrize("strided", ["whole", "part", "transposed", "expanded"])
def test_strides_come_back(strided: str) -> None:
    tensor = torch.randn(64, 96)
    shown = {
        "whole": tensor,
        "part": tensor[:, 32:64],
        "transposed": tensor.T,
        "expanded": tensor[:1].expand(64, 96),
    }[strided]
    holding = HostActivations(nn.Module(), CPU)
    back = holding._unpack(holding._pack(shown))
    assert torch.equal(back, shown)
    if strided != "part":  # whose gaps are left out
        assert back.stride() == shown.stride()
    assert (holding.most_bytes == 0) == (strided == "expanded")


def test_where_the_host_has_no_memory_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    torch.manual_seed(0)
    model = gpt()
    expected = one_step(model, (IDS,), None)
    holding = HostActivations(model, CPU)
    warned: list[str] = []
    monkeypatch.setattr(host_activations, "warn", warned.append)
    with monkeypatch.context() as patch:
        patch.setattr(PlainCopies, "new_memory", refuse)
        found = one_step(model, (IDS,), holding)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert len(warned) == 1
    assert "activations-stay" in warned[0]
    assert holding.most_bytes == 0


def test_memory_is_locked_in_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[tuple[int, int]] = []
    forgotten: list[torch.device] = []
    monkeypatch.setattr(host_activations, "_forget_error", forgotten.append)

    class Runtime:
        error = 0

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
            locked.append((address, num_bytes))
            return self.error

    runtime = Runtime()
    monkeypatch.setattr(host_activations, "_runtime", lambda: runtime)
    copies = object.__new__(CudaCopies)  # without its stream, which takes a device
    copies._device = CPU
    copies._pinned = []
    held = [copies.new_memory(size, torch.bfloat16) for size in (2048, 2049, 5000, 70_000)]
    for (address, num_bytes), memory in zip(locked, held, strict=True):
        assert address == memory.data_ptr()
        assert num_bytes == memory.nbytes == 2 * len(memory)
        assert float(memory.fill_(1.5).float().sum()) == 1.5 * len(memory)
    pages = [set(range(start // 4096, -(-(start + size) // 4096))) for start, size in locked]
    assert len(set.union(*pages)) == sum(map(len, pages)), "two share a page"
    runtime.error = 2
    with pytest.raises(RuntimeError, match="error 2"):
        copies.new_memory(2048, torch.float32)
    assert forgotten == [CPU]

    def without_memory(*arguments: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_activations.mmap, "mmap", without_memory)
    with pytest.raises(RuntimeError, match="Cannot allocate memory"):
        copies.new_memory(2048, torch.float32)
    assert len(copies._pinned) == len(held)


def test_what_may_not_be_taken_stays() -> None:
    torch.manual_seed(0)
    model = prepare_model(gpt(), Training(recompute="full"))
    expected = one_step(model, (IDS,), None)
    hidden_bytes = IDS.numel() * 32 * 4
    holding = HostActivations(model, CPU, host_bytes=3 * hidden_bytes)
    found = one_step(model, (IDS,), holding)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert holding.most_bytes == 3 * hidden_bytes
