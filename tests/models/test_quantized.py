"""Linear layers in few bits: the numbers of bitsandbytes, the gradients of plain layers, and nothing
kept but bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from framework.config.groups import quantized_bytes
from framework.models.quantized import QuantizedLinear, dequantize, put_plain, quantize

FORMS: Any = ("nf4", "int8")
SHAPES = [(8, 16), (5, 13), (64, 128)]


def matrix(*shape: int) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    made[0] = 0.0  # a scale of zero
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_come_back_within_half_a_step(form: Any, shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    held = quantize(weight, form)
    assert held.dtype == torch.uint8
    assert held.numel() == quantized_bytes(shape, form)
    back = dequantize(held, shape, form, torch.float32)
    largest = weight.abs().max()
    # Half of the widest gap between levels: 0.30 of a scale in nf4, 1 / 127 of it in int8.
    bound = {"nf4": 0.1520, "int8": 0.5 / 127}[form] * largest
    assert float((back - weight).abs().max()) <= bound + 1e-6
    assert torch.equal(quantize(back, form), held)
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), held])[1:]  # at an odd place
    assert torch.equal(dequantize(moved, shape, form, torch.float32), back)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_products_and_gradients_are_those_of_the_plain_layer(form: Any, autocast: bool) -> None:
    plain = nn.Linear(16, 8)
    held = QuantizedLinear(plain, form, dtype=torch.float32)
    plain.weight.data = held.matrix(torch.float32)
    outputs = []
    for module in (plain, held, torch.compile(held, backend="aot_eager")):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x)
        y.float().square().sum().backward()
        outputs.append((y.detach(), x.grad))
    for found in outputs[1:]:
        for one, other in zip(outputs[0], found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_autograd_keeps_the_bytes_alone(form: Any) -> None:
    held = QuantizedLinear(nn.Linear(64, 64), form, dtype=torch.float32)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held(torch.randn(2, 64, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [held.weight.data_ptr()]


def test_plain_layers_come_back_with_what_was_computed() -> None:
    model = nn.Sequential(QuantizedLinear(nn.Linear(16, 8), "nf4", dtype=torch.float32))
    x = torch.randn(3, 16)
    before = model(x)
    put_plain(model, torch.float32)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model(x), before)
    assert torch.equal(before, linear(x, model[0].weight, model[0].bias))


# Not rows shorter than a block: on processors bitsandbytes 0.50 reads its own codes wrongly there.
@pytest.mark.parametrize("shape", [(8, 64), (64, 128)])
def test_numbers_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is the oracle of both forms")
    weight = matrix(*shape)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    expected = bnb.functional.dequantize_4bit(codes, state)
    assert torch.equal(quantize(weight, "nf4")[: codes.numel()], codes.flatten())
    assert torch.equal(dequantize(quantize(weight, "nf4"), shape, "nf4", torch.float32), expected)
    rows = bnb.functional.int8_vectorwise_quant(weight.half())[0]
    mine = quantize(weight.half(), "int8")[: rows.numel()].view(torch.int8).view(shape)
    assert int((mine.int() - rows.int()).abs().max()) <= 1  # its scales are rounded otherwise
