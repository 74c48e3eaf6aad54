"""Perceptrons in tiles: the same outputs and gradients, each weight's once, and a tile's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.config.training import LoRA, Training
from framework.errors import ConfigError
from framework.models.adapters import add_adapters
from framework.models.prepare_model import prepare_model
from framework.recipes.language_models.gpt import GPT
from tests.models import small_models
from tests.models.small_models import IDS, bert

TILE = 48  # of 256 positions: the last tile is smaller


def llama(**changes: Any) -> GPT:
    torch.manual_seed(0)
    shape = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "mlp_size": 128}
    return small_models.gpt(**{"num_layers": 2, "dropout": 0.0} | shape | changes)


def gradients_of(model: nn.Module, *, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(IDS)
    outputs.float().square().mean().backward()
    return outputs.detach(), {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_outputs_and_gradients_are_those_of_all_positions_at_once(
    mlp: str, recompute: str | None
) -> None:
    plain = gradients_of(llama(mlp=mlp))
    tiled = gradients_of(
        prepare_model(llama(mlp=mlp), Training(mlp_tile=TILE, recompute=recompute))
    )
    torch.testing.assert_close(tiled[0], plain[0], rtol=1e-5, atol=1e-6)
    assert tiled[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        torch.testing.assert_close(tiled[1][name], gradient, rtol=1e-4, atol=1e-7)


def test_half_precision_is_as_near_to_fp32_as_without_tiles() -> None:
    """Sums over tiles are in fp32: in bf16 they would lose bits with each tile."""
    exact = gradients_of(llama())[1]

    def distance(model: nn.Module) -> float:
        found = gradients_of(model.bfloat16())[1]
        return max(
            float((found[name].float() - exact[name]).norm() / exact[name].norm())
            for name in exact
            if ".mlp." in name
        )

    tiled = distance(prepare_model(llama(), Training(mlp_tile=4)))
    assert tiled < 1.2 * distance(llama())


def test_under_autocast() -> None:
    plain = gradients_of(llama(), autocast=True)
    tiled = gradients_of(prepare_model(llama(), Training(mlp_tile=TILE)), autocast=True)
    assert tiled[0].dtype == plain[0].dtype
    for name, gradient in plain[1].items():
        torch.testing.assert_close(tiled[1][name], gradient, rtol=0.05, atol=2e-4)


def test_hooks_see_one_gradient_of_each_weight() -> None:
    model = prepare_model(llama(), Training(mlp_tile=TILE))
    seen: list[str] = []
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    gradients_of(model)
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


def test_adapters_and_frozen_weights() -> None:
    section = LoRA(target_modules=["gate", "up", "down"], r=4, lora_dropout=0.5)
    found = []
    for tile in (0, TILE):
        model = prepare_model(llama(), Training(mlp_tile=tile))
        model = add_adapters(model, section, seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
        if tile:
            # Dropout draws for each tile: the backward pass draws the same again.
            outputs, _ = gradients_of(model)
            again = gradients_of(model)
            assert torch.equal(outputs, again[0])
        model.eval()
        model.zero_grad()
        found.append(gradients_of(model)[1])
    assert all("lora" in name for name in found[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_perceptrons_without_a_trained_weight_pass_gradients_on() -> None:
    section = LoRA(target_modules=["query"], r=4)
    found = []
    for tile in (0, TILE):
        model = prepare_model(llama(), Training(mlp_tile=tile))
        found.append(gradients_of(add_adapters(model, section, seed=0))[1])
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_drawn_numbers_are_those_of_the_forward_pass() -> None:
    """By finite differences, with the random numbers of the same seed."""

    class Noisy(nn.Module):
        takes_positions_apart = True

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.second(nn.functional.dropout(self.first(hidden).tanh(), 0.5))

    torch.manual_seed(0)
    model = nn.Sequential(Noisy()).double()
    prepare_model(model, Training(mlp_tile=2))
    value = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)

    def seeded(value: Tensor) -> Tensor:
        torch.manual_seed(3)
        return model(value)

    assert torch.autograd.gradcheck(seeded, (value,))


class Widest(TorchDispatchMode):
    """The largest number of elements that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.shape[-1:] in {(128,), (256,)}:
                self.largest = max(self.largest, leaf.numel() // leaf.shape[-1])
        return made


@pytest.mark.parametrize(("tile", "rows"), [(0, 256), (TILE, TILE)])
def test_inner_values_of_a_tile_are_there_at_once(tile: int, rows: int) -> None:
    model = prepare_model(llama(), Training(mlp_tile=tile))
    with Widest() as widest:
        # Of the weights' own 32 or 128 rows nothing is counted: they are fewer than a tile's.
        gradients_of(model)
    assert max(widest.largest, 32) in (rows, 128)


def test_transformers_models_like_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    found = []
    for tile in (0, TILE):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        prepare_model(model, Training(mlp_tile=tile))
        assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
        model(IDS).logits.square().mean().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("build", [bert, lambda: llama(moe={"num_experts": 2, "every": 1})])
def test_models_without_such_perceptrons_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_model(build(), Training(mlp_tile=TILE))
    (problem,) = caught.value.problems
    assert (problem.kind, problem.key) == ("mlp-not-tiled", "training.mlp_tile")
