"""Under their Hugging Face names our weights make transformers' own models compute what ours compute."""

from __future__ import annotations

import pytest
import torch

from framework.models.bert import BERT
from framework.models.gpt import GPT

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 50, "max_positions": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "mlp_size": 40}
LLAMA = SIZES | {"num_kv_heads": 2, "positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))
REASON = "transformers is not installed; pip install transformers compares with it"


def renamed(model: BERT | GPT) -> dict[str, torch.Tensor]:
    names = model.hf_names()
    assert names is not None
    found = {names[name]: tensor for name, tensor in model.state_dict().items()}
    assert len(found) == len(model.state_dict())
    return found


def draw(model: BERT | GPT) -> None:
    """Biases start from zero, and would pass for each other."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )


@pytest.mark.parametrize(("bias", "tied"), [(False, False), (True, False), (False, True)])
def test_llama(bias: bool, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason=REASON)
    model = GPT.of(**LLAMA | {"bias": bias, "tie_embeddings": tied}).eval()
    draw(model)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=24,
            rms_norm_eps=1e-5,
            attention_bias=bias,
            mlp_bias=bias,
            tie_word_embeddings=tied,
        )
    ).eval()
    missing, unexpected = theirs.load_state_dict(renamed(model), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    with torch.no_grad():
        assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=1e-5)


def test_bert() -> None:
    transformers = pytest.importorskip("transformers", reason=REASON)
    model = BERT.of(**SIZES, num_types=2, dropout=0.0, norm_eps=1e-12).eval()
    draw(model)
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            type_vocab_size=2,
            max_position_embeddings=24,
            hidden_act="gelu",
            layer_norm_eps=1e-12,
        )
    ).eval()
    missing, unexpected = theirs.load_state_dict(renamed(model), strict=False)
    assert unexpected == []
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}  # tied to others
    types, mask = (TOKENS > 25).long(), torch.ones_like(TOKENS)
    mask[:, 15:] = 0
    with torch.no_grad():
        logits, next_sentence = model((TOKENS, types, mask))
        found = theirs(input_ids=TOKENS, token_type_ids=types, attention_mask=mask)
    assert torch.allclose(found.prediction_logits[:, :15], logits[:, :15], atol=1e-5)
    assert torch.allclose(found.seq_relationship_logits, next_sentence, atol=1e-5)


@pytest.mark.parametrize("shape", [{"positions": "learned"}, {"norm": "layernorm"}, {"mlp": "gelu"}])
def test_a_gpt_that_is_no_llama_has_no_names(shape: dict[str, str]) -> None:
    assert GPT.of(**LLAMA | shape).hf_names() is None


def test_every_weight_has_a_name_of_its_own() -> None:
    biased = GPT.of(**LLAMA | {"bias": True, "tie_embeddings": False})
    for model in (GPT.of(**LLAMA), biased, BERT.of(**SIZES, num_types=2, dropout=0.0, norm_eps=1e-12)):
        assert len(renamed(model)) == len(model.state_dict())
