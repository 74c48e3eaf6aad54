"""Attention over shared sequences on one process: what a rank would hand over, and what is refused.
Several ranks are held against plain PyTorch by tests/engine/test_sequence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from framework.errors import ConfigError
from framework.models.sequence import SequenceGroup, attend, first_position, share_attention
from framework.recipes.language_models.bert import BERT
from framework.recipes.language_models.gpt import GPT

SIZES = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 4,
    "mlp_size": 16,
    "vocab_size": 8,
    "max_positions": 8,
}


STRETCHED = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def their_model(kind: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the bench extra"
    )
    layers = {
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 16,
    } | sizes
    heads = {"num_attention_heads": 4}
    if kind == "T5":
        return transformers.T5Model(
            transformers.T5Config(d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=4)
        )
    if kind == "Mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**layers))
    config = getattr(transformers, f"{kind}Config")(**layers, **heads)
    return getattr(transformers, {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}[kind])(
        config
    )


def test_whole_sequences_are_those_of_torch() -> None:
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    mask = torch.rand(2, 1, 1, 6) < 0.7
    mask[..., 0] = True
    for given in (None, mask):
        expected = nn.functional.scaled_dot_product_attention(
            query, *(2 * [key.repeat_interleave(2, dim=1)]), attn_mask=given
        )
        torch.testing.assert_close(attend(query, key, key, attn_mask=given), expected)


def test_positions_begin_where_the_part_does() -> None:
    with SequenceGroup(2, 4).shared():
        assert first_position(16) == 32
    assert first_position(16) == 0


def test_heads_are_shared_first_and_a_ring_has_the_rest() -> None:
    """Six heads on four ranks: teams of two, and rings of ranks 0 and 2, 1 and 3."""
    group = SequenceGroup(2, 4)
    assert [group.team_size(heads) for heads in (8, 6, 4, 3, 1)] == [4, 2, 4, 1, 1]
    assert group.ring_of(2)[:4] == (1, 2, 0, 0)
    assert SequenceGroup(3, 4).ring_of(1)[:4] == (3, 4, 2, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attn_mask": torch.zeros(1, 1, 8, 8)}, "a mask of torch.float32"),
        ({"enable_gqa": True}, "enable_gqa"),
    ],
)
def test_what_a_ring_has_not_is_refused(options: dict[str, Any], named: str) -> None:
    inputs = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    with SequenceGroup(1, 2).shared(), pytest.raises(ConfigError, match=named) as caught:
        attend(*inputs, **options)
    assert caught.value.problems[0].kind == "sequence-not-shared"


def test_a_position_that_the_model_has_not_is_refused() -> None:
    model = GPT.of(**SIZES, num_kv_heads=4)
    with (
        SequenceGroup(1, 2).shared(),
        pytest.raises(ValueError, match="a sequence of 10 tokens; the model has 8"),
    ):
        model(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "its attention is not known"),
        (lambda: their_model("T5"), "takes no position_ids"),
        (lambda: their_model("Mamba"), "takes no position_ids|Conv1d"),
        (
            lambda: their_model("Llama", rope_parameters=STRETCHED),
            r"\(dynamic, longrope\) change with the longest one",
        ),
    ],
)
def test_models_that_mix_positions_otherwise_are_refused(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        share_attention(make())
    assert caught.value.problems[0].kind == "sequence-needs-attention"


@pytest.mark.parametrize(
    "make", [lambda: GPT.of(**SIZES, num_kv_heads=4), lambda: BERT.of(**SIZES)]
)
def test_our_own_models_are_taken_as_they_are(make: Callable[[], nn.Module]) -> None:
    share_attention(make())


def test_labels_that_a_model_would_shift_itself_are_refused() -> None:
    model, tokens = their_model("Llama"), torch.zeros(1, 4, dtype=torch.long)
    share_attention(model)
    assert model(tokens, labels=tokens).loss > 0
    with (
        SequenceGroup(0, 2).shared(),
        pytest.raises(ConfigError, match=r"its labels .* \[sequence-needs-attention\]"),
    ):
        model(tokens, labels=tokens)


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_their_models_compute_whole_sequences_as_before(kind: str) -> None:
    """Such as in a callback, outside of a step."""
    model = their_model(kind).eval()
    ids, mask = torch.randint(8, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    before = [model(ids).logits, model(ids, attention_mask=mask).logits[1, :4]]
    share_attention(model)
    torch.testing.assert_close(
        [model(ids).logits, model(ids, attention_mask=mask).logits[1, :4]], before
    )


def test_a_mask_that_was_cut_is_refused() -> None:
    model = their_model("Llama")
    share_attention(model)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with (
        SequenceGroup(0, 2).shared(),
        pytest.raises(ConfigError, match=r"attention_mask has 4 positions, and .* 8"),
    ):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 0]]))
