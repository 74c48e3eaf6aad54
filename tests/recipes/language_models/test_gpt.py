"""GPT against a second implementation that shares no code with it, and the properties that make it
a language model.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.models.layer_lists import as_layers
from framework.models.layers import LayeredModel, recipes_only
from framework.recipes.language_models.gpt import GPT, GPTShape

GPT2_LIKE: dict[str, Any] = {
    "vocab_size": 11,
    "max_positions": 9,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 3,
    "num_kv_heads": 3,
    "mlp_size": 20,
}
LLAMA_LIKE: dict[str, Any] = GPT2_LIKE | {
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
    "rope_theta": 100.0,
}
MIXED = LLAMA_LIKE | {
    "positions": "learned",
    "norm": "layernorm",
    "tie_embeddings": True,
    "num_kv_heads": 1,
}
SHAPES = {"gpt2": GPT2_LIKE, "llama": LLAMA_LIKE, "mixed": MIXED}


def shaken(**shape: Any) -> GPT:
    """A model whose biases and norms differ from their start values, so that a forgotten one is
    seen.
    """
    torch.manual_seed(1)
    model = GPT.of(**shape).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(*size: int) -> Tensor:
    return torch.randint(0, 11, size, generator=torch.Generator().manual_seed(2))


# The oracle: loops over heads and positions, explicit softmax, complex rotation; weights by name
# from the state dict.


def oracle(weights: dict[str, Tensor], shape: GPTShape, ids: Tensor) -> Tensor:
    x = weights["embed.weight"][ids]
    if shape.positions == "learned":
        x = x + weights["positions.weight"][torch.arange(ids.shape[1])]
    for number in range(shape.num_layers):
        block = f"blocks.{number}."
        x = x + oracle_attention(
            weights,
            f"{block}attention.",
            shape,
            oracle_norm(weights, f"{block}attention_norm.", shape, x),
        )
        x = x + oracle_mlp(
            weights, f"{block}mlp.", shape, oracle_norm(weights, f"{block}mlp_norm.", shape, x)
        )
    x = oracle_norm(weights, "norm.", shape, x)
    return x @ weights["embed.weight" if shape.tie_embeddings else "head.weight"].T


def oracle_linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def oracle_norm(weights: dict[str, Tensor], name: str, shape: GPTShape, x: Tensor) -> Tensor:
    if shape.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt()
    return x * weights[f"{name}weight"] + weights.get(f"{name}bias", torch.zeros(()))


def oracle_mlp(weights: dict[str, Tensor], name: str, shape: GPTShape, x: Tensor) -> Tensor:
    up = oracle_linear(weights, f"{name}up", x)
    if shape.mlp == "swiglu":
        gate = oracle_linear(weights, f"{name}gate", x)
        inner = gate / (1 + (-gate).exp()) * up
    else:
        inner = 0.5 * up * (1 + (sqrt(2 / pi) * (up + 0.044715 * up**3)).tanh())
    return oracle_linear(weights, f"{name}down", inner)


def oracle_attention(weights: dict[str, Tensor], name: str, shape: GPTShape, x: Tensor) -> Tensor:
    size, group = shape.head_size, shape.num_heads // shape.num_kv_heads
    query, key, value = (
        oracle_linear(weights, f"{name}{part}", x) for part in ("query", "key", "value")
    )
    heads = []
    for head in range(shape.num_heads):
        own, shared = (
            slice(head * size, (head + 1) * size),
            slice(head // group * size, (head // group + 1) * size),
        )
        q, k, v = query[..., own], key[..., shared], value[..., shared]
        if shape.positions == "rotary":
            q, k = oracle_rotation(q, shape.rope_theta), oracle_rotation(k, shape.rope_theta)
        rows = []
        for position in range(x.shape[1]):
            scores = (q[:, position, None] * k[:, : position + 1]).sum(-1) / sqrt(size)
            share = scores.exp() / scores.exp().sum(-1, keepdim=True)
            rows.append((share[..., None] * v[:, : position + 1]).sum(1))
        heads.append(torch.stack(rows, 1))
    return oracle_linear(weights, f"{name}output", torch.cat(heads, -1))


def oracle_rotation(x: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + d/2) as complex numbers, times e^(i p theta^(-2i/d))."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half], x[..., half:])
    for position in range(x.shape[1]):
        for pair in range(half):
            angle = torch.tensor(position * theta ** (-2 * pair / x.shape[-1]), dtype=x.dtype)
            numbers[:, position, pair] *= torch.polar(torch.ones((), dtype=x.dtype), angle)
    return torch.cat((numbers.real, numbers.imag), -1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_what_the_papers_state(shape: dict[str, Any]) -> None:
    model, ids = shaken(**shape), tokens(2, 7)
    expected = oracle(model.state_dict(), model.shape, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        model.float()(ids), expected.float(), rtol=0, atol=2e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_are_those_of_the_oracle(shape: dict[str, Any]) -> None:
    model, ids = shaken(**shape), tokens(2, 5)
    direction = torch.randn(
        2, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    (model(ids) * direction).sum().backward()
    weights = {name: value.detach().requires_grad_() for name, value in model.state_dict().items()}
    (oracle(weights, model.shape, ids) * direction).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=name
        )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_position_sees_a_later_one(shape: dict[str, Any]) -> None:
    model, ids = shaken(**shape), tokens(1, 8)
    before = model(ids)
    ids[0, 5] = (ids[0, 5] + 1) % 11
    after = model(ids)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 1e-6


def test_shared_keys_are_repeated_keys() -> None:
    few = shaken(**LLAMA_LIKE)
    many = GPT.of(**(LLAMA_LIKE | {"num_kv_heads": 4})).double().eval()
    weights = few.state_dict()
    for name in weights:
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            weights[name] = (
                weights[name].unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
            )
    many.load_state_dict(weights)
    ids = tokens(2, 6)
    torch.testing.assert_close(few(ids), many(ids), rtol=0, atol=1e-12)


def test_dropout_acts_in_training_only_and_in_every_place() -> None:
    torch.manual_seed(0)
    model, plain = GPT.of(**GPT2_LIKE, dropout=0.5), GPT.of(**GPT2_LIKE)
    plain.load_state_dict(model.state_dict())
    ids = tokens(4, 9)
    assert torch.equal(model.eval()(ids), plain.eval()(ids))
    assert torch.equal(plain.train()(ids), plain.eval()(ids))
    model.train()
    hidden = torch.randn(64, 9, 12)
    for name in ("positions", "blocks.0.attention"):
        part = model.get_submodule(name)
        assert not torch.equal(part(hidden), part(hidden)), name
    block = model.get_submodule("blocks.0")
    block.attention.eval()
    added = block(hidden) - hidden
    # both of the two dropouts of 0.5
    assert (added == 0).double().mean() == pytest.approx(0.25, abs=0.05)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 10 tokens; the model has 9 positions"):
        GPT.of(**GPT2_LIKE)(tokens(1, 10))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_heads": 5, "num_kv_heads": 5},
        {"num_kv_heads": 2},
        {"positions": "rotary", "num_heads": 4, "num_kv_heads": 4},
    ],
)
def test_heads_that_do_not_divide_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be multiples|even number"):
        GPT.of(**(GPT2_LIKE | wrong))


def test_weights_start_as_the_papers_state() -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 500,
        "max_positions": 300,
        "hidden_size": 128,
        "num_layers": 8,
        "num_heads": 4,
        "num_kv_heads": 4,
        "mlp_size": 512,
    }
    for name, value in GPT.of(**shape).state_dict().items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            std = 0.02 / 4 if name.endswith(("output.weight", "down.weight")) else 0.02
            assert value.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(value.mean().item()) < 0.03 * std, name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_between_its_layers_goes_one_floating_tensor(shape: dict[str, Any]) -> None:
    model = shaken(**shape)
    value: Any = tokens(2, 7)
    layers = as_layers(model)
    for layer in layers[:-1]:
        value = layer.apply(layer.build(), value)
        assert value.shape == (2, 7, shape["hidden_size"])
    assert torch.equal(layers[-1].apply(layers[-1].build(), value), model(tokens(2, 7)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_recipes_build_the_same_weights_alone(shape: dict[str, Any]) -> None:
    torch.manual_seed(6)
    model = GPT.of(**shape)
    with recipes_only():
        bare = GPT.of(**shape)
    assert not list(bare.parameters())
    assert_recipes_build(bare, model, seed=6)


def assert_recipes_build(bare: LayeredModel, model: LayeredModel, *, seed: int) -> None:
    """Every layer, made alone and last first, holds the weights that it has in the model."""
    for number, layer in reversed(list(enumerate(bare.layers()))):
        if model.place_of(layer) == layer.name:
            alone, there = (
                layer.make(number, seed=seed).state_dict(),
                model.get_submodule(layer.name).state_dict(),
            )
            assert alone.keys() == there.keys()
            assert all(torch.equal(alone[name], there[name]) for name in alone), layer.name


@pytest.mark.slow
def test_it_learns_to_repeat() -> None:
    """A task that needs attention to earlier positions: the second half of the sequence repeats the
    first.
    """
    torch.manual_seed(0)
    model = GPT.of(
        **(
            LLAMA_LIKE
            | {
                "hidden_size": 32,
                "vocab_size": 6,
                "mlp_size": 64,
                "num_layers": 2,
                "rope_theta": 1e4,
            }
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(250):
        ids = torch.randint(0, 6, (64, 6)).repeat(1, 2)
        loss = nn.functional.cross_entropy(
            model(ids[:, :-1])[:, 5:].flatten(0, 1), ids[:, 6:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.randint(0, 6, (64, 6)).repeat(1, 2)
    accuracy = (model(ids[:, :-1])[:, 5:].argmax(-1) == ids[:, 6:]).double().mean()
    assert accuracy > 0.95


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_norms_get_inputs_of_their_weights_type(shape: dict[str, Any], precision: str) -> None:
    """torch's fused norms take nothing else, and others are several kernels, in silence."""
    model = GPT.of(**shape)
    if precision == "bf16":
        model = model.bfloat16()
    types: list[bool] = []

    def compare(norm: nn.Module, inputs: Any) -> None:
        types.append(norm.weight.dtype == inputs[0].dtype)

    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.register_forward_pre_hook(compare)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        model(tokens(2, 7))
    assert types == [True] * (2 * shape["num_layers"] + 1)
