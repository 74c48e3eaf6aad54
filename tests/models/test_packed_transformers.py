"""Packed rows in models of transformers: attention within texts computes what each text by itself
computes, and what transformers' own masks compute; other passes go as they always went.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from framework.models import packed_transformers
from framework.models.packed_transformers import (
    attend_in_packed_rows,
    attends_in_packed_rows,
    dense_masks,
    keep_masks,
    kept_masks,
)
from tests.models.packed import ROWS, kernel_on_cpu, kernel_on_meta, places_of, places_on_meta

transformers = pytest.importorskip("transformers", reason="transformers comes with the dev extra")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
# Name -> class of transformers, and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 4}),  # shorter than some texts
    "mistral-whole": ("Mistral", GROUPED | {"sliding_window": None}),
    "gpt-neox": ("GPTNeoX", SIZES | {"intermediate_size": 48}),
}


def model_of(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    if name == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
        config = transformers.GPT2Config(
            **sizes, **NO_DROPOUT, bos_token_id=0, eos_token_id=0, **options
        )
        return transformers.GPT2LMHeadModel(config)
    kind, values = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**values, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The windows of the attentions within texts that run in a test."""
    found: list[int | None] = []
    attend = packed_transformers.attend_within_texts

    def watched(*args: Any, **options: Any) -> Tensor:
        found.append(options["window"])
        return attend(*args, **options)

    monkeypatch.setattr(packed_transformers, "attend_within_texts", watched)
    return found


def run(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logits = forward()
    logits.float().square().mean().backward()
    return logits.detach(), [weight.grad.clone() for weight in model.parameters()]


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def alone(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of the texts of ROWS, each of which the model gets by itself."""
    rows = []
    for row, lengths in enumerate(ROWS):
        texts = tokens[row].split(list(lengths))
        rows.append(torch.cat([model(input_ids=text[None]).logits[0] for text in texts]))
    return torch.stack(rows)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_texts_are_computed_as_if_each_were_alone(
    name: str, recomputes: bool, windows: list[int | None]
) -> None:
    model = model_of(name).train()
    tokens, places = torch.randint(0, 64, (len(ROWS), 16)), places_of(ROWS)
    if recomputes:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    theirs = run(model, lambda: alone(model, tokens))
    masked = run(model, lambda: model(input_ids=tokens, position_ids=places).logits)
    attend_in_packed_rows(model)
    assert kept_masks(model) == []
    assert_same(run(model, lambda: model(input_ids=tokens, position_ids=places).logits), theirs)
    assert windows == [4 if name == "mistral" else None] * (4 if recomputes else 2)
    windows.clear()
    with dense_masks():
        dense = run(model, lambda: model(input_ids=tokens, position_ids=places).logits)
    assert_same(dense, masked)
    assert_same(run(model, lambda: alone(model, tokens)), theirs)  # without places: as ever
    assert windows == []
    keep_masks(model)
    assert not attends_in_packed_rows(model)
    assert_same(run(model, lambda: model(input_ids=tokens, position_ids=places).logits), masked)
    assert windows == []


def test_a_model_whose_own_mask_does_not_follow_places(windows: list[int | None]) -> None:
    torch.manual_seed(5)
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, **sizes))
    tokens, places = torch.randint(0, 64, (len(ROWS), 16)), places_of(ROWS)
    theirs = run(model, lambda: alone(model, tokens))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run(model, lambda: model(input_ids=tokens, position_ids=places).logits), theirs)
    attend_in_packed_rows(model)
    assert_same(run(model, lambda: model(input_ids=tokens, position_ids=places).logits), theirs)
    assert windows == [None, None]


def test_other_passes_go_as_they_always_went(windows: list[int | None]) -> None:
    model = model_of("llama").eval()
    tokens, places = torch.randint(0, 64, (2, 16)), torch.arange(16)[None]
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :5] = 0
    passes: dict[str, dict[str, Any]] = {
        "padding": {"attention_mask": mask},
        "cache": {"position_ids": places.expand(2, -1), "use_cache": True},
        "places of one row": {"position_ids": places},
    }
    expected = {name: model(input_ids=tokens, **given).logits for name, given in passes.items()}
    generated = model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False)
    attend_in_packed_rows(model)
    for name, given in passes.items():
        torch.testing.assert_close(model(input_ids=tokens, **given).logits, expected[name])
    again = model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False, use_cache=True)
    assert again.tolist() == generated.tolist()
    assert windows == []
    with pytest.raises(IndexError):  # a pass that fails leaves nothing behind
        model(input_ids=tokens + 64, position_ids=places.expand(2, -1))
    assert packed_transformers._rows is None


def test_a_part_of_a_model_of_ones_own(windows: list[int | None]) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of("llama")

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            logits: Tensor = self.inner(input_ids=input_ids, position_ids=position_ids).logits
            return logits

    model = Wrapped()
    tokens, places = torch.randint(0, 64, (len(ROWS), 16)), places_of(ROWS)
    expected = run(model, lambda: model(tokens, places))
    attend_in_packed_rows(model)
    assert kept_masks(model) == []
    assert_same(run(model, lambda: model(tokens, places)), expected)
    assert windows == [None, None]
    assert "packed_rows" not in str(model.inner.config.to_dict())  # what is saved with a model


def test_models_that_keep_their_masks() -> None:
    def reasons(kind: str, **options: Any) -> str:
        config = getattr(transformers, f"{kind}Config")(**options)
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        attend_in_packed_rows(model)
        (reason,) = kept_masks(model)
        assert not attends_in_packed_rows(model)
        return reason

    gemma = GROUPED | {"head_dim": 8}
    assert reasons("Gemma2", **gemma) == "Gemma2ForCausalLM: its attn_implementation is eager"
    assert "attn_implementation is eager" in reasons(
        "Llama", **GROUPED, attn_implementation="eager"
    )
    assert "none of transformers' AttentionInterface" in reasons("Falcon", **SIZES)
    chunked = GROUPED | {
        "head_dim": 8,
        "attention_chunk_size": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    }
    assert "chunked_attention" in reasons("Llama4Text", **chunked)
    assert kept_masks(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_no_layer_reads_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_on_meta(monkeypatch)
    with torch.device("meta"):
        model = model_of(name).bfloat16()
        tokens = torch.zeros(len(ROWS), 16, dtype=torch.int64)
    places = places_on_meta(ROWS)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):  # as it was
        model(input_ids=tokens, position_ids=places)
    attend_in_packed_rows(model)
    model(input_ids=tokens, position_ids=places).logits.float().square().mean().backward()


def test_compiled_layers_have_no_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_on_cpu(monkeypatch)
    torch.compiler.reset()
    model = model_of("llama").bfloat16()
    attend_in_packed_rows(model)
    assert kept_masks(model) == []
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend=counter, fullgraph=True)
    tokens = torch.randint(0, 64, (2, 16))
    for rows in (((3, 5, 8), (16,)), ((4, 4, 8), (8, 8)), ((2,) * 8, (5, 11))):
        forward = partial(model, input_ids=tokens, position_ids=places_of(rows))
        _, gradients = run(model, lambda: forward().logits)  # noqa: B023 - called at once
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert kernel.calls
    assert counter.frame_count <= 2
