"""Linear layers of one input, joined, against the same layers one by one; and how many kernels
they take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

from framework.models import products
from framework.models.products import apart, apply_linears, swiglu
from framework.models.split import ColumnLinear
from framework.recipes.language_models.gpt import GPT
from tests.models.operator_calls import Calls

SIZES = (8, 4, 4)  # query, key and value of grouped heads
FEW = 6
MANY = 4096  # rows against which a copy of the weights is nothing


def layers_of(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(8, size, bias=bias, dtype=dtype) for size in SIZES])


def flat(layers: nn.ModuleList) -> nn.ModuleList:
    """Lay the weights one behind the other, as a flat buffer of ZeRO has them."""
    buffer = torch.cat([layer.weight.detach().flatten() for layer in layers])
    start = 0
    for layer in layers:
        end = start + layer.weight.numel()
        layer.weight.data = buffer[start:end].view_as(layer.weight)
        start = end
    return layers


def one_by_one(input: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    return tuple(layer(input) for layer in layers)


def outcome(
    apply: Callable[..., tuple[Tensor, ...]],
    layers: nn.ModuleList,
    num_rows: int,
    *,
    needs_input: bool = True,
    autocast: bool = False,
) -> dict[str, Tensor | None]:
    """Outputs of the layers and all gradients of one pass."""
    generator = torch.Generator().manual_seed(1)
    dtype = layers[0].weight.dtype
    input = torch.randn(2, num_rows // 2, 8, dtype=dtype, generator=generator)
    input.requires_grad_(needs_input)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = apply(input, *layers)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        total += (output.double() * torch.randn(output.shape, generator=generator)).sum()
    total.backward()
    results: dict[str, Tensor | None] = {"input": input.grad}
    for number, output in enumerate(outputs):
        results[f"output {number}"] = output.detach()
    for name, parameter in layers.named_parameters():
        results[name] = parameter.grad
        parameter.grad = None
    return results


def assert_same(
    results: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float
) -> None:
    for name, value in expected.items():
        result = results[name]
        assert (result is None) == (value is None), name
        if result is not None and value is not None:
            assert result.dtype == value.dtype, name
            assert result.shape == value.shape, name
            size = float(value.abs().max())
            torch.testing.assert_close(result, value, rtol=0, atol=tolerance * size, msg=name)


@pytest.mark.parametrize("num_rows", [FEW, MANY])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("arrange", [nn.Module.train, flat], ids=["apart", "flat"])
def test_joined_layers_compute_what_they_do_one_by_one(
    num_rows: int, bias: bool, arrange: Callable[[nn.ModuleList], nn.ModuleList]
) -> None:
    layers = arrange(layers_of(bias=bias))
    expected = outcome(one_by_one, layers, num_rows)
    assert_same(outcome(apply_linears, layers, num_rows), expected, 1e-14)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_half_precision_rounds_as_often_or_less(
    dtype: torch.dtype, autocast: bool, num_rows: int
) -> None:
    layers = layers_of(dtype)
    exact = outcome(one_by_one, _doubled(layers), num_rows)
    joined = outcome(apply_linears, layers, num_rows, autocast=autocast)
    apart = outcome(one_by_one, layers, num_rows, autocast=autocast)
    for name, value in exact.items():
        assert value is not None
        first, second = joined[name], apart[name]
        assert first is not None
        assert second is not None
        assert first.dtype == second.dtype, name
        error = (first.double() - value).norm() / value.norm()
        assert error <= 1.1 * (second.double() - value).norm() / value.norm(), name


def _doubled(layers: nn.ModuleList) -> nn.ModuleList:
    doubled = layers_of()
    doubled.load_state_dict(layers.state_dict())
    return doubled


@pytest.mark.parametrize("num_rows", [FEW, MANY])
@pytest.mark.parametrize(
    ("frozen", "needs_input"),
    [
        ([], False),
        (["0.weight"], True),
        (["1.bias", "2.weight"], True),
        (["1.bias", "2.weight"], False),
        (["0", "1", "2"], True),
    ],
)
def test_what_needs_no_gradient_gets_none(
    num_rows: int, frozen: list[str], needs_input: bool
) -> None:
    layers = layers_of()
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    expected = outcome(one_by_one, layers, num_rows, needs_input=needs_input)
    results = outcome(apply_linears, layers, num_rows, needs_input=needs_input)
    assert_same(results, expected, 1e-14)


def calls_of(layers: nn.ModuleList, num_rows: int) -> tuple[Calls, Calls]:
    input = torch.randn(num_rows, 8, dtype=layers[0].weight.dtype, requires_grad=True)
    with Calls() as forward:
        outputs = apply_linears(input, *layers)
    gradients = [torch.ones_like(output).contiguous() for output in outputs]
    with Calls() as backward:
        torch.autograd.backward(outputs, gradients)
    return forward, backward


def test_weights_of_a_flat_buffer_are_one_product_without_a_copy() -> None:
    forward, backward = calls_of(flat(layers_of(bias=False)), FEW)
    assert forward.kernels == {"mm": 1}
    # two gradients of one product each, of outputs that are joined by one copy
    assert backward.kernels == {"cat": 1, "mm": 2}


def test_other_weights_are_joined_where_a_copy_is_little() -> None:
    forward, backward = calls_of(layers_of(bias=False), MANY)
    assert forward.kernels == {"cat": 1, "mm": 1}
    assert backward.kernels == {"cat": 2, "mm": 2}


def test_elsewhere_products_add_the_gradient_up_themselves() -> None:
    forward, backward = calls_of(layers_of(bias=False), FEW)
    assert forward.kernels == {"mm": 3}
    assert backward.kernels == {"mm": 4, "addmm_": 2}  # and no add


def test_autocast_casts_the_input_once() -> None:
    layers = layers_of(torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        forward, backward = calls_of(layers, FEW)
    # the input; three weights into one; the product
    assert forward.kernels == {"_to_copy": 1, "copy_": 3, "mm": 1}
    # of the input and of three weights
    assert backward.kernels == {"cat": 1, "mm": 2, "_to_copy": 4}


def test_what_looks_on_sees_the_layers() -> None:
    """Hooks run (ZeRO-3 gathers weights by them), and adapters add what they add."""
    layers = layers_of()
    seen = []
    layers[1].register_forward_hook(lambda *_: seen.append(1))
    input = torch.randn(MANY, 8, dtype=torch.float64)
    apply_linears(input, *layers)
    assert seen == [1]

    layers = layers_of()
    layers[1].register_forward_pre_hook(lambda *_: seen.append(2))
    forward, _ = calls_of(layers, MANY)
    assert seen == [1, 2]
    assert forward.kernels["addmm"] == 3

    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    layers = layers_of()
    expected = one_by_one(input, *layers)
    layers[2].__class__ = Adapted
    torch.testing.assert_close(apply_linears(input, *layers)[2], expected[2] + 1)


def test_hooks_that_only_note_a_call_are_called_and_leave_one_product() -> None:
    seen: list[nn.Module] = []

    def note(layer: nn.Module, inputs: Any) -> None:
        seen.append(layer)

    vars(note)["observes"] = True
    layers = layers_of()
    for layer in layers:
        layer.register_forward_pre_hook(note)
    forward, _ = calls_of(layers, MANY)
    assert forward.kernels["addmm"] == 1
    assert seen == list(layers)


class OneRank:
    """A `TensorPart` of a group of one, which counts."""

    def __init__(self) -> None:
        self.copies = 0
        self.begun: list[bool] = []

    def copy_once(self, tensor: Tensor) -> Tensor:
        self.copies += 1
        return tensor

    def begin(self, *, draws: bool) -> None:
        self.begun.append(draws)


def test_layers_that_ranks_share_are_joined_and_copy_their_input_once() -> None:
    layers = flat(layers_of(bias=False))
    part = OneRank()
    for layer in layers:
        layer.__class__ = ColumnLinear
        layer.part = part
    forward, _ = calls_of(layers, FEW)
    assert forward.kernels["mm"] == 1
    assert (part.copies, part.begun) == (1, [True])
    layers[0].part = OneRank()
    forward, _ = calls_of(layers, FEW)
    assert forward.kernels["mm"] == 3


def test_parts_of_one_tensor_are_found_and_nothing_else() -> None:
    whole = torch.arange(24.0).view(2, 12)
    columns = whole.split([4, 8], dim=1)
    joined = products._seen_as_one(columns, dim=-1)
    assert joined is not None
    assert torch.equal(joined, whole)
    assert products._seen_as_one(columns[::-1], dim=-1) is None
    assert products._seen_as_one(whole.clone().split(6, dim=1)[:1] + columns[:1], dim=-1) is None
    assert products._seen_as_one(whole.split(1), dim=-1) is None  # rows, not columns
    rows = products._seen_as_one(whole.split(1), dim=0)
    assert rows is not None
    assert torch.equal(rows, whole)
    assert products._seen_as_one((whole[0], whole[1]), dim=-1) is not None
    assert products._seen_as_one((whole[0], whole.clone()[1]), dim=-1) is None


@pytest.mark.parametrize("is_joined", [True, False])
def test_swiglu_is_its_formula_and_its_gradients_are_one_tensor(is_joined: bool) -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    gate, up = whole.split(8, dim=-1)
    if not is_joined:
        gate = gate.clone()
    direction = torch.randn(3, 5, 8, dtype=torch.float64)
    result = swiglu(gate, up)
    torch.testing.assert_close(result, silu(gate) * up)
    found = torch.autograd.grad(result, (gate, up), direction)
    expected = torch.autograd.grad(silu(gate) * up, (gate, up), direction)
    torch.testing.assert_close(found, expected)
    assert (products._seen_as_one(found, dim=-1) is not None) == is_joined


def test_a_trace_of_the_planner_asks_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a stand-in lies nowhere")

    monkeypatch.setattr(products, "_seen_as_one", refuse)
    with FakeTensorMode():
        gate, up = torch.empty(3, 16, requires_grad=True).split(8, dim=-1)
        assert swiglu(gate, up).shape == (3, 8)
        assert apart(up) is up


def block_of(*, is_llama: bool, dtype: torch.dtype) -> nn.Module:
    """A block of GPT-2's form, or of Llama's but for layernorm, which is one kernel on processors as
    well; its weights lie in a flat buffer.
    """
    llama = {"positions": "rotary", "mlp": "swiglu", "num_kv_heads": 2}
    shape: dict[str, Any] = {
        "vocab_size": 11,
        "max_positions": 9,
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "mlp_size": 20,
        "bias": False,
    }
    block = GPT.of(**shape | (llama if is_llama else {})).get_submodule("blocks.0").to(dtype)
    flat(nn.ModuleList(module for module in block.modules() if isinstance(module, nn.Linear)))
    return block


@pytest.mark.parametrize(("is_llama", "before", "after"), [(True, 67, 57), (False, 43, 36)])
def test_a_block_takes_fewer_kernels(
    is_llama: bool, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: the figures of docs/performance.md."""
    block = block_of(is_llama=is_llama, dtype=torch.bfloat16)
    input = torch.randn(2, 9, 16).bfloat16().requires_grad_()

    def num_kernels() -> int:
        block(input).sum().backward()
        with Calls() as calls:
            block(input).sum().backward()
        return sum(calls.kernels.values())

    joined = num_kernels()
    monkeypatch.setattr(products, "_may_join", lambda *_: False)
    assert (num_kernels(), joined) == (before, after)


@pytest.mark.parametrize("is_llama", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_joined_products_keep_no_more_in_memory(
    is_llama: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd saves of a value that is a view of the joined product is all of that."""
    block = block_of(is_llama=is_llama, dtype=torch.float32)
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    input = torch.randn(2, 9, 16, requires_grad=True)

    def saved_bytes() -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            output = block(input)
        assert output.requires_grad  # until here the graph holds the storages
        return sum(storages.values())

    joined = saved_bytes()
    monkeypatch.setattr(products, "_may_join", lambda *_: False)
    if autocast:  # there each layer by itself casts the input again
        assert joined < saved_bytes()
    else:
        assert joined == saved_bytes()
