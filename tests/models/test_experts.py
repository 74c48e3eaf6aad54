"""A mixture of experts against the definition, one token after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.model import MoE
from framework.models.added_losses import collected_routings
from framework.models.experts import MixtureOfExperts
from framework.recipes.language_models.gpt import GPT

SIZE, TOKENS = 6, 24
TINY: dict[str, Any] = {
    "vocab_size": 20,
    "max_positions": 8,
    "hidden_size": 8,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 2,
    "mlp_size": 16,
}


def mixture(**shape: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(
        MoE(num_experts=4, **shape), SIZE, make_expert=lambda: nn.Linear(SIZE, SIZE)
    )
    nn.init.normal_(made.router.weight)  # tokens that differ in what they choose
    return made


def by_definition(made: MixtureOfExperts, tokens: Tensor) -> tuple[Tensor, Tensor, float]:
    """Outputs, losses and the dropped share, in loops."""
    shape, count = made.shape, made.shape.num_experts
    probabilities = (tokens @ made.router.weight.T).softmax(-1)
    logits = tokens @ made.router.weight.T
    room = shape.capacity(len(tokens), training=made.training)
    outputs = [torch.zeros(SIZE) for _ in tokens]
    taken, dropped = [0] * count, 0
    best = probabilities.argsort(-1, descending=True)
    for choice in range(shape.top_k):
        for number in range(len(tokens)):
            expert = int(best[number, choice])
            weight = probabilities[number, expert]
            if shape.top_k == 2:
                weight = weight / (
                    probabilities[number, best[number, 0]] + probabilities[number, best[number, 1]]
                )
            if taken[expert] < room:
                outputs[number] = outputs[number] + weight * made.experts[str(expert)](
                    tokens[number]
                )
                taken[expert] += 1
            else:
                dropped += 1
    shares = [
        sum(int(best[n, 0]) == e for n in range(len(tokens))) / len(tokens) for e in range(count)
    ]
    balance = count * sum(share * probabilities[:, e].mean() for e, share in enumerate(shares))
    z = torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean()
    loss = shape.balance_loss * balance + shape.z_loss * z
    return torch.stack(outputs), loss, dropped / (shape.top_k * len(tokens))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 1.0, None])
def test_outputs_losses_and_gradients_are_those_of_the_definition(
    top_k: int, factor: float | None
) -> None:
    made = mixture(top_k=top_k, capacity_factor=factor, min_capacity=1, z_loss=0.3)
    tokens = torch.randn(TOKENS, SIZE)
    expected, loss, dropped = by_definition(made, tokens)
    names, weights = zip(*made.named_parameters(), strict=True)
    gradients = torch.autograd.grad(expected.square().sum() + loss, weights, allow_unused=True)
    with collected_routings() as routings:
        outputs = made(tokens.view(2, TOKENS // 2, SIZE))
    (outputs.square().sum() + routings[0].loss).backward()
    torch.testing.assert_close(outputs.view(TOKENS, SIZE), expected)
    torch.testing.assert_close(routings[0].loss, loss)
    assert routings[0].dropped.item() == pytest.approx(dropped, abs=1e-6)
    assert (dropped > 0) == (factor is not None)
    for name, gradient, weight in zip(names, gradients, weights, strict=True):
        torch.testing.assert_close(
            weight.grad, torch.zeros_like(weight) if gradient is None else gradient, msg=name
        )


def test_evaluation_has_room_of_its_own_no_noise_and_reports_nothing() -> None:
    made = mixture(capacity_factor=0.25, min_capacity=1, eval_capacity_factor=None, jitter=0.5)
    tokens = torch.randn(TOKENS, SIZE)
    assert not torch.equal(made(tokens), made(tokens))
    made.eval()
    with collected_routings() as routings:
        torch.testing.assert_close(made(tokens), by_definition(made, tokens)[0])
    assert routings == []


def test_room_of_an_expert() -> None:
    shape = MoE(num_experts=8, top_k=2, capacity_factor=1.25, min_capacity=4)
    assert [shape.capacity(count) for count in (1, 3, 8, 64, 100)] == [1, 3, 4, 20, 32]
    assert shape.capacity(64, training=False) == 32
    assert MoE(num_experts=8, capacity_factor=None).capacity(64) == 64


@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_has_the_same_gradients_and_reports_once(every: int) -> None:
    found = []
    for recompute_every in (0, every):
        torch.manual_seed(0)
        model = GPT.of(
            **TINY, dropout=0.2, moe={"num_experts": 4, "every": 1, "jitter": 0.1, "z_loss": 0.1}
        )
        model.recompute_every = recompute_every
        torch.manual_seed(1)
        with collected_routings() as routings:
            loss = model(torch.arange(16).view(2, 8)).square().mean()
        sum((one.loss for one in routings), loss).backward()
        assert len(routings) == 3
        found.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("every", "blocks"), [(1, [0, 1, 2]), (2, [1]), (3, [2]), (4, [])])
def test_every_nth_block_has_experts(every: int, blocks: list[int]) -> None:
    model = GPT.of(**TINY, moe={"num_experts": 2, "every": every})
    assert [
        number
        for number in range(3)
        if isinstance(model.get_submodule(f"blocks.{number}.mlp"), MixtureOfExperts)
    ] == blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_router_computes_in_float32(dtype: torch.dtype) -> None:
    made = mixture(top_k=2).to(dtype)
    tokens = torch.randn(TOKENS, SIZE).to(dtype)
    assert made.router(tokens).dtype == torch.float32
    assert made(tokens).dtype == dtype
    with torch.autocast("cpu", dtype):
        assert mixture().router(tokens.float()).dtype == torch.float32
        assert mixture()(tokens.float()).dtype == dtype


def test_balance_is_one_where_tokens_spread_evenly() -> None:
    made = mixture(balance_loss=1.0)
    nn.init.zeros_(made.router.weight)  # all probabilities are alike
    with collected_routings() as routings:
        made(torch.randn(TOKENS, SIZE))
    assert routings[0].balance.item() == pytest.approx(1.0)
    assert math.isclose(routings[0].loss.item(), 1.0, rel_tol=1e-6)
