"""Attention within the texts of packed rows, held against attention through a mask of all pairs of
positions, and against each text by itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from framework.engine.step_batches import DeviceBatches
from framework.models import kept_products
from framework.models.packed_attention import (
    PackedRows,
    attend_within_texts,
    packed_rows,
    texts_mask,
    why_no_kernel,
)
from framework.recipes.language_models.gpt import GPT
from framework.tasks.causal_lm import CausalLM
from tests.models.packed import ROWS, Rows, kernel_on_cpu, kernel_on_meta, places_of, places_on_meta


def heads(
    rows: Rows = ROWS, *, size: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two."""
    torch.manual_seed(3)
    shape = (len(rows), 4, sum(rows[0]), size)
    query = torch.randn(shape).to(dtype).requires_grad_()
    key, value = (torch.randn(shape[0], 2, *shape[2:]).to(dtype).requires_grad_() for _ in range(2))
    return query, key, value


def through_mask(
    inputs: tuple[Tensor, ...], places: Tensor, window: int | None = None, **options: Any
) -> Tensor:
    query, key, value = inputs
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    mask = texts_mask(places, window=window)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def assert_same(
    inputs: tuple[Tensor, ...], mixed: Tensor, expected: Tensor, *, atol: float = 1e-5
) -> None:
    upper = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1)).to(mixed.dtype)
    torch.testing.assert_close(mixed, expected, atol=atol, rtol=atol)
    ours = torch.autograd.grad(mixed, inputs, upper)
    for one, other in zip(ours, torch.autograd.grad(expected, inputs, upper), strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=atol)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 4, 99])
def test_text_by_text_is_what_the_mask_computes(window: int | None, scale: float | None) -> None:
    inputs, places = heads(), places_of(ROWS)
    mixed = attend_within_texts(*inputs, packed_rows(places), window=window, scale=scale)
    assert mixed.transpose(1, 2).is_contiguous()
    assert_same(inputs, mixed, through_mask(inputs, places, window, scale=scale))


def test_no_text_sees_another() -> None:
    inputs, places = heads(), places_of(ROWS)
    mixed = attend_within_texts(*inputs, packed_rows(places))
    for row, lengths in enumerate(ROWS):
        bounds = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        for start, end in pairwise(bounds):
            query, key, value = (tensor[row : row + 1, :, start:end] for tensor in inputs)
            alone = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            torch.testing.assert_close(mixed[row : row + 1, :, start:end], alone)


def test_where_texts_begin() -> None:
    rows = packed_rows(places_of(ROWS))
    assert rows.host_starts.tolist() == [0, 3, 8, 16, 32, 33, 34, 48, 58, 64]
    assert (rows.longest, rows.starts.dtype) == (16, torch.int32)
    # A row that begins with the rest of a text, one whose places are all 0, and one without gaps.
    places = torch.tensor([[5, 6, 0, 1], [0, 0, 0, 0], [0, 1, 2, 3]])
    assert packed_rows(places).host_starts.tolist() == [0, 2, 4, 5, 6, 7, 8, 12]
    mask = texts_mask(places)
    assert mask[0, 0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]
    for shape in ((0, 4), (2, 0)):
        none = packed_rows(torch.zeros(shape, dtype=torch.int64))
        empty = torch.zeros(shape[0], 2, shape[1], 8, requires_grad=True)
        assert attend_within_texts(empty, empty, empty, none).shape == empty.shape


def test_texts_that_are_noted_on_the_host_are_not_read_from_the_device() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        packed_rows(places_of(ROWS).to("meta"))
    rows = packed_rows(places_on_meta(ROWS))
    assert rows.starts.device.type == "meta"
    assert rows.host_starts.tolist() == packed_rows(places_of(ROWS)).host_starts.tolist()
    task = CausalLM()
    places, targets = places_of(ROWS), torch.zeros(len(ROWS), 16, dtype=torch.int64)
    batch = ({"input_ids": targets, "position_ids": places}, targets)
    inputs, _ = DeviceBatches(torch.device("meta")).split(task, batch)
    assert packed_rows(inputs["position_ids"]).longest == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_read_from_the_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    kernel_on_meta(monkeypatch)
    inputs = [tensor.detach().to("meta").requires_grad_() for tensor in heads(dtype=dtype)]
    for options in ({}, {"window": 4}):
        mixed = attend_within_texts(*inputs, packed_rows(places_on_meta(ROWS)), **options)
        gradients = torch.autograd.grad(mixed.sum(), inputs)
        assert [one.shape for one in gradients] == [one.shape for one in inputs]


class Sizes(TorchDispatchMode):
    """Elements of all tensors that operations make, and of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and not func.is_view:
                self.total += value.numel()
                self.largest = max(self.largest, value.numel())
        return made


def test_work_and_memory_fall_with_the_number_of_texts() -> None:
    length, size = 512, 8
    flops, totals = {}, {}
    for number in (1, 4, 16):
        rows = [[length // number] * number]
        inputs, texts = heads(rows, size=size), packed_rows(places_of(rows))
        with FlopCounterMode(display=False) as counter, Sizes() as sizes:
            attend_within_texts(*inputs, texts).sum().backward()
        flops[number], totals[number] = counter.get_total_flops(), sizes.total
        assert sizes.largest <= 4 * length * size  # one tensor of queries; a mask has 512 x 512
    assert flops[1] == 4 * flops[4] == 16 * flops[16]
    assert totals[16] < 1.05 * totals[4] < 1.7 * totals[1]
    with FlopCounterMode(display=False) as counter, Sizes() as sizes:
        through_mask(inputs, texts.places).sum().backward()
    assert counter.get_total_flops() == flops[1]
    assert sizes.largest >= length * length


def test_dropout_leaves_out_weights_within_texts() -> None:
    query = torch.zeros(1, 1, 512, 512)
    value = torch.eye(512)[None, None]
    places = places_of([[256] * 2])
    mixed = attend_within_texts(query, query, value, packed_rows(places), dropout=0.25)
    seen = texts_mask(places)[0, 0]
    weights = mixed[0, 0]  # of each position, as all scores are equal
    assert (weights[~seen] == 0).all()
    assert 0.23 < (weights[seen] == 0).float().mean() < 0.27
    assert weights.sum(-1).mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_gets_all_texts_at_once(
    monkeypatch: pytest.MonkeyPatch, window: int | None, dropout: float
) -> None:
    kernel = kernel_on_cpu(monkeypatch)
    inputs, places = heads(dtype=torch.bfloat16), places_of(ROWS)
    rows = packed_rows(places)
    mixed = attend_within_texts(*inputs, rows, window=window, scale=0.3, dropout=dropout)
    assert kernel.calls == [(rows.host_starts.tolist(), 16, -1 if window is None else window - 1)]
    assert mixed.dtype == torch.bfloat16
    assert_same(inputs, mixed, through_mask(inputs, places, window, scale=0.3), atol=0.05)
    assert kernel.dropouts == ([0.25, 0.25] if dropout else [])


def test_what_the_kernel_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    half, single = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 8)
    assert "none for cpu" in why_no_kernel(half, half)
    kernel = kernel_on_cpu(monkeypatch)
    assert why_no_kernel(half, half) == ""
    assert "bf16 and fp16 only" in why_no_kernel(single, single)
    assert "heads of 7" in why_no_kernel(half[..., :7], half[..., :7])
    assert "heads of 8" in why_no_kernel(half, half[..., :4])
    rows = packed_rows(torch.tensor([[0, 0]]))
    with torch.autocast("cpu", torch.bfloat16):  # casts for the kernel as for torch's attention
        assert attend_within_texts(single, single, single, rows).dtype == torch.bfloat16
    assert len(kernel.calls) == 1


class Block(nn.Module):
    """Attention of two heads with a residual, on (hidden, texts)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(16, 16)

    def forward(self, value: tuple[Tensor, PackedRows]) -> tuple[Tensor, PackedRows]:
        hidden, rows = value
        split = self.heads(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = attend_within_texts(split, split, split, rows)
        return hidden + mixed.transpose(1, 2).flatten(2), rows


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_compiled_block_is_compiled_twice_at_most(
    monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    if has_kernel:
        kernel_on_cpu(monkeypatch)
    torch.compiler.reset()
    torch.manual_seed(0)
    block = Block().bfloat16()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)  # an error at a graph break
    for rows in (((3, 5, 8), (16,)), ((4, 4, 8), (8, 8)), ((2,) * 8, (5, 11)), ((16,), (16,))):
        texts = packed_rows(places_of(rows))
        hidden = torch.randn(2, 16, 16).bfloat16()
        gradients = []
        for run in (block, compiled):
            value = hidden.clone().requires_grad_()
            made = run((value, texts))[0]
            made.float().square().sum().backward()
            gradients.append((made.detach(), value.grad))
        torch.testing.assert_close(gradients[0], gradients[1], atol=0.05, rtol=0.05)
    assert counter.frame_count <= 2


SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "max_positions": 16,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 32,
}


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_a_gpt_computes_each_text_as_if_it_were_alone(
    positions: str, recompute: str | None
) -> None:
    torch.manual_seed(2)
    model = GPT.of(**SHAPE, positions=positions)
    model.recompute_every = 0 if recompute is None else 1
    model.keeps_products = recompute == "selective"
    tokens, places = torch.randint(0, 32, (len(ROWS), 16)), places_of(ROWS)
    logits = model(tokens, places)
    logits.square().mean().backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    total = torch.zeros(())
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            text = slice(start, start + length)
            alone = model(tokens[row : row + 1, text])
            torch.testing.assert_close(logits[row : row + 1, text], alone, atol=1e-5, rtol=1e-5)
            total = total + alone.square().sum()
            start += length
    (total / logits.numel()).backward()
    for gradient, weight in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, atol=1e-6, rtol=1e-4)
    # Places of one row for all of them; and layer by layer, as a pipeline would run them.
    torch.testing.assert_close(model(tokens, places[:1]), model(tokens, places[:1].expand(4, -1)))
    value: Any = (tokens, places)
    for layer in model.recipes:
        value = layer.apply(model.get_submodule(model.place_of(layer)), value)
    torch.testing.assert_close(value, logits, atol=1e-5, rtol=1e-5)


def test_selective_recomputation_does_not_run_the_kernel_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = kernel_on_cpu(monkeypatch)
    model = GPT.of(**SHAPE | {"hidden_size": 32}).bfloat16()
    tokens, places = torch.randint(0, 32, (len(ROWS), 16)), places_of(ROWS)
    runs = []
    for keeps_products in (False, True):
        kept_products._operations.cache_clear()  # as a process begins that has packed rows
        model.recompute_every, model.keeps_products = 1, keeps_products
        kernel.calls.clear()
        model(tokens, places).float().square().mean().backward()
        runs.append(len(kernel.calls))
    assert runs == [4, 2]


def test_a_text_that_is_longer_than_the_model() -> None:
    model = GPT.of(**SHAPE)
    tokens = torch.zeros(1, 20, dtype=torch.int64)
    assert model(tokens, places_of([[10, 10]])).shape == (1, 20, 32)
    with pytest.raises(ValueError, match="a text of 18 tokens; the model has 16 positions"):
        model(tokens, places_of([[2, 18]]))
