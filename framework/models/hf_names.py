"""Names that Hugging Face's transformers gives the weights of the same architecture, for `export --hf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BERT: Final = {
    "embed.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.positions": "bert.embeddings.position_embeddings.weight",
    "embeddings.types.weight": "bert.embeddings.token_type_embeddings.weight",
    "outputs.bias": "cls.predictions.bias",
}
_BERT_MODULES: Final = {
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "heads.pooler": "bert.pooler.dense",
    "heads.transform": "cls.predictions.transform.dense",
    "heads.norm": "cls.predictions.transform.LayerNorm",
    "outputs.next_sentence": "cls.seq_relationship",
}
_BERT_BLOCK: Final = {
    **{f"attention.{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_LLAMA: Final = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LLAMA_BLOCK: Final = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def bert_names(num_layers: int) -> dict[str, str]:
    """Of `BertForPreTraining`."""
    return _BERT | _of_modules(_BERT_MODULES, _BERT_BLOCK, num_layers, prefix="bert.encoder.layer")


def llama_names(num_layers: int) -> dict[str, str]:
    """Of `LlamaForCausalLM`; its norms have no bias."""
    return _LLAMA | _of_modules({}, _LLAMA_BLOCK, num_layers, prefix="model.layers")


def _of_modules(
    modules: Mapping[str, str], block: Mapping[str, str], num_layers: int, *, prefix: str
) -> dict[str, str]:
    together = dict(modules)
    for number in range(num_layers):
        together |= {f"blocks.{number}.{ours}": f"{prefix}.{number}.{theirs}" for ours, theirs in block.items()}
    return {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in together.items() for part in ("weight", "bias")}
