"""BERT against a second implementation that shares no code with it, and what its layer list
promises to a pipeline.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.models.layer_lists import as_layers
from framework.models.layers import recipes_only
from framework.recipes.language_models.bert import BERT

SHAPE: dict[str, Any] = {
    "vocab_size": 13,
    "max_positions": 9,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 3,
    "mlp_size": 20,
    "num_types": 3,
    "norm_eps": 1e-5,
}


def shaken() -> BERT:
    """A model whose biases and norms differ from their start values, so that a forgotten one is
    seen.
    """
    torch.manual_seed(1)
    model = BERT.of(**SHAPE).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Three sequences of which the second has padding in the middle and the third at the end."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 13, (3, 7), generator=generator)
    types = torch.randint(0, 3, (3, 7), generator=generator)
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 3], mask[2, 4:] = 0, 0
    return tokens, types, mask


def oracle(
    weights: dict[str, Tensor], tokens: Tensor, types: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence after another, padding cut out of the keys, attention row by row."""

    def dense(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred
            / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            * weights[f"{name}.weight"]
            + weights[f"{name}.bias"]
        )

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / sqrt(2)))

    def attention(name: str, x: Tensor, seen: Tensor) -> Tensor:
        heads = []
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            q, k, v = (
                dense(f"{name}.query", x)[:, part],
                dense(f"{name}.key", x)[seen, part],
                dense(f"{name}.value", x)[seen, part],
            )
            scores = (q @ k.T / 2).exp()
            heads.append(scores / scores.sum(-1, keepdim=True) @ v)
        return dense(f"{name}.output", torch.cat(heads, -1))

    logits, next_sentence = [], []
    for ids, segments, seen in zip(tokens, types, mask.bool(), strict=True):
        x = (
            weights["embed.weight"][ids]
            + weights["embeddings.positions"][:7]
            + weights["embeddings.types.weight"][segments]
        )
        x = norm("embeddings.norm", x)
        for number in range(3):
            name = f"blocks.{number}"
            x = norm(f"{name}.attention_norm", x + attention(f"{name}.attention", x, seen))
            x = norm(f"{name}.mlp_norm", x + dense(f"{name}.down", gelu(dense(f"{name}.up", x))))
        transformed = norm("heads.norm", gelu(dense("heads.transform", x)))
        logits.append(transformed @ weights["embed.weight"].T + weights["outputs.bias"])
        next_sentence.append(dense("outputs.next_sentence", dense("heads.pooler", x[0]).tanh()))
    return torch.stack(logits), torch.stack(next_sentence)


def test_it_computes_what_the_paper_states() -> None:
    model = shaken()
    for value, expected in zip(model(*batch()), oracle(model.state_dict(), *batch()), strict=True):
        assert expected.std() > 0.1
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    expected_pair = oracle(model.state_dict(), *batch())
    for value, expected in zip(model.float()(*batch()), expected_pair, strict=True):
        torch.testing.assert_close(
            value, expected.float(), rtol=0, atol=2e-6 * float(expected.abs().max())
        )


def test_gradients_are_those_of_the_oracle() -> None:
    model = shaken()
    weights = {name: value.detach().requires_grad_() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    directions = [
        torch.randn(size, dtype=torch.float64, generator=generator) for size in ((3, 7, 13), (3, 2))
    ]
    for outputs in (model(*batch()), oracle(weights, *batch())):
        sum(
            (output * direction).sum()
            for output, direction in zip(outputs, directions, strict=True)
        ).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=name
        )


def test_padding_is_not_seen() -> None:
    model = shaken()
    tokens, types, mask = batch()
    before, pooled_before = model(tokens, types, mask)
    other = torch.where(mask == 0, (tokens + 5) % 13, tokens)
    after, pooled_after = model(other, types, mask)
    assert torch.equal(before[mask == 1], after[mask == 1])
    assert torch.equal(pooled_before, pooled_after)
    unmasked, _ = model(other, types, torch.ones_like(mask))
    assert not torch.allclose(unmasked[mask == 1], after[mask == 1])


def test_a_sequence_of_padding_only_gives_numbers() -> None:
    tokens, types, mask = batch()
    logits, _ = shaken()(tokens, types, torch.zeros_like(mask))
    assert logits.isfinite().all()


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model, plain = BERT.of(**SHAPE, dropout=0.5), BERT.of(**SHAPE, dropout=0.0)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(*batch())[0], plain.eval()(*batch())[0])
    assert torch.equal(plain.train()(*batch())[0], plain.eval()(*batch())[0])
    model.train()
    hidden, mask = torch.randn(3, 7, 12), torch.ones(3, 7, dtype=torch.int64)
    attention = model.get_submodule("blocks.0.attention")
    assert not torch.equal(attention(hidden, mask), attention(hidden, mask))
    attention.eval()
    for name, value in (("embeddings", (hidden, mask, mask)), ("blocks.0", (hidden, mask))):
        part = model.get_submodule(name)
        assert not torch.equal(part(value)[0], part(value)[0]), name


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 5 heads"):
        BERT.of(**(SHAPE | {"num_heads": 5}))
    with pytest.raises(ValueError, match="a sequence of 10 tokens; the model has 9 positions"):
        BERT.of(**SHAPE)(*(torch.ones(1, 10, dtype=torch.int64),) * 3)


def test_weights_start_as_in_the_paper() -> None:
    torch.manual_seed(0)
    model = BERT.of(
        vocab_size=500,
        max_positions=300,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        mlp_size=512,
        num_types=40,
    )
    # Standard deviation of N(0, 1) cut off at +-2.
    truncated = 0.02 * 0.8796
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            assert value.abs().max() <= 0.04, name
            assert value.std().item() == pytest.approx(
                truncated, rel=0.1 if value.numel() < 1000 else 0.03
            ), name


def test_between_its_layers_goes_one_floating_tensor_and_it_comes_first() -> None:
    model = shaken()
    layers = as_layers(model)
    value: Any = batch()
    for layer in layers:
        if isinstance(value, tuple) and layer.may_start_stage:
            floating = [tensor.is_floating_point() for tensor in value]
            assert floating == (
                [False] * 3 if layer is layers[0] else [True] + [False] * (len(value) - 1)
            ), layer.name
        value = layer.apply(layer.build(), value)
    assert [layer.name for layer in layers if not layer.may_start_stage] == ["outputs"]
    assert all(torch.equal(a, b) for a, b in zip(value, model(*batch()), strict=True))


def test_what_the_tied_layers_share_is_all_they_hold() -> None:
    tied = [layer for layer in as_layers(shaken()) if layer.tied]
    assert [layer.name for layer in tied] == ["embed", "decoder"]
    assert {tuple(name for name, _ in layer.build().named_parameters()) for layer in tied} == {
        ("weight",)
    }


def test_recipes_build_the_same_weights_alone() -> None:
    torch.manual_seed(6)
    model = BERT.of(**SHAPE)
    with recipes_only():
        bare = BERT.of(**SHAPE)
    for number, layer in reversed(list(enumerate(bare.layers()))):
        if layer.call is None:
            alone, there = (
                layer.make(number, seed=6).state_dict(),
                model.get_submodule(layer.name).state_dict(),
            )
            assert alone.keys() == there.keys()
            assert all(torch.equal(alone[name], there[name]) for name in alone), layer.name


def test_a_head_for_classes_has_no_logits_of_tokens() -> None:
    assert BERT.of(**SHAPE, num_classes=3).get_output_embeddings() is None
