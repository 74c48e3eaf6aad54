"""Graphs of compiled blocks, counted: none is broken, blocks that are alike share one, and a
dimension that changes takes one more for all its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.training import Compile
from framework.models.compilation import CompiledModules
from framework.models.recomputation import with_recompute
from framework.recipes.image_models.resnet import SmallResNet18
from framework.recipes.language_models.gpt import GPT
from tests.launched import NO_COMPILE, rarely
from tests.models.small_models import bert

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "max_positions": 64,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 64,
}
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
OF_TRANSFORMERS: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def of_transformers(name: str) -> nn.Module:
    import transformers

    if name == "ViT":
        config: Any = transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
        return transformers.ViTForImageClassification(config)
    config = getattr(transformers, f"{name}Config")(**OF_TRANSFORMERS)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def tokens(rows: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (rows, length)),)


def packed(rows: int, length: int) -> tuple[Tensor, ...]:
    return (*tokens(rows, length), (torch.arange(length) % 5).expand(rows, length).contiguous())


def masked(rows: int, length: int) -> tuple[Tensor, ...]:
    ids = tokens(rows, length)[0]
    return ids, torch.zeros_like(ids), torch.ones_like(ids)


def images(channels: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    return lambda rows, _: (torch.randn(rows, channels, 16, 16),)


Make = Callable[[], nn.Module]
# Name -> model, its inputs, graphs of the first batch, of a smaller one, of another length.
CASES: dict[str, tuple[Make, Callable[[int, int], tuple[Tensor, ...]], tuple[int, int, int]]] = {
    "gpt": (lambda: GPT.of(**SHAPE, dropout=0.1), tokens, (1, 2, 3)),
    "gpt as Llama, packed": (lambda: GPT.of(**SHAPE, **LLAMA), packed, (1, 2, 3)),
    # Each layer is compiled: embedding, positions, block, norm, head. The norm reads rows alone.
    "gpt, recomputed": (lambda: with_recompute(GPT.of(**SHAPE), every=1), tokens, (5, 9, 9)),
    # Blocks; the layers of its head; and dropouts.
    "bert": (bert, masked, (3, 6, 7)),
    # Of 8 blocks 7 differ in width, stride or shortcut.
    "resnet": (SmallResNet18, images(1), (7, 14, 14)),
    "Llama": (lambda: of_transformers("Llama"), tokens, (1, 2, 3)),
    "ViT": (lambda: of_transformers("ViT"), images(3), (1, 2, 2)),
}
# Its graphs depend on what Llama's do.
RARE = {"Qwen3": (lambda: of_transformers("Qwen3"), tokens, (1, 2, 3))}


# Models of which torch also makes the backward pass of each graph, which takes most of the time.
WITH_PASSES = ("gpt", "gpt, recomputed")


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(NO_COMPILE)
    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.mark.parametrize("name", [*CASES, *rarely(RARE)])
def test_graphs_of_blocks(name: str) -> None:
    make, make_inputs, expected = (CASES | RARE)[name]
    model = make().train()
    counters = torch._dynamo.utils.counters
    counters.clear()
    backend = "aot_eager" if name in WITH_PASSES else "eager"
    compiled = CompiledModules(model, Compile(backend=backend, per="block"))
    compiled.start()
    found = list[int]()
    for rows, length in ((4, 24), (3, 24), (3, 17)):
        for _ in range(2):
            outputs = model(*make_inputs(rows, length))
            leaves = torch.utils._pytree.tree_leaves(getattr(outputs, "logits", outputs))
            leaves[0].float().square().mean().backward()
        found.append(counters["stats"]["unique_graphs"])
    compiled.stop()
    assert not counters["graph_break"]
    assert tuple(found) == expected


def test_transformers_models_have_their_cache_again() -> None:
    model: Any = of_transformers("Llama")
    compiled = CompiledModules(model, Compile(backend="eager", per="block"))
    has_cache = [model.config.use_cache]
    compiled.start()
    has_cache.append(model.config.use_cache)
    compiled.stop()
    has_cache.append(model.config.use_cache)
    assert has_cache == [True, False, True]
