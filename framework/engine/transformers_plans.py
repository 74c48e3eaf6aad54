"""Plans for models of transformers that bring none: how a tensor group divides a block of them, by
the class of the block.

Each entry is held against plain PyTorch by a test (tests/engine/test_tensor.py). A class that
derives from one of these has its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from torch import nn

from framework.config.training import TensorSplit
from framework.errors import ConfigError

Plan = Mapping[str, TensorSplit]

_MODELS: Final = "transformers.models."
_COLUMN: Final = TensorSplit(split="column")
_ROW: Final = TensorSplit(split="row")
_VOCABULARY: Final = TensorSplit(split="vocabulary")


def _block(
    attention: str,
    projections: Sequence[str],
    output: str,
    perceptron: tuple[str, str],
    *,
    counts: Sequence[str] = (),
) -> Plan:
    """Return the plan of a block with attention and a perceptron.

    Args:
        attention: module with these projections, which alone read its first input.
        projections: layers of query, key and value in the attention.
        output: layer after the attention.
        perceptron: its two layers.
        counts: attributes of the attention that count what a rank has a part of.
    """
    up, down = perceptron
    plan = {attention: TensorSplit(split="shared_input", divide=list(counts))}
    for name in projections:
        plan[f"{attention}.{name}"] = _COLUMN
    return plan | {output: _ROW, up: _COLUMN, down: _ROW}


_GPT2: Final = {
    "attn": TensorSplit(divide=["num_heads", "split_size"]),
    "attn.c_attn": TensorSplit(split="column", sections=3),
    "attn.c_proj": _ROW,
    "mlp.c_fc": _COLUMN,
    "mlp.c_proj": _ROW,
}
_OPT: Final = _block(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "self_attn.out_proj",
    ("fc1", "fc2"),
    counts=("num_heads",),
)
_BERT: Final = _block(
    "attention.self",
    ("query", "key", "value"),
    "attention.output.dense",
    ("intermediate.dense", "output.dense"),
)
_DISTILBERT: Final = _block(
    "attention",
    ("q_lin", "k_lin", "v_lin"),
    "attention.out_lin",
    ("ffn.lin1", "ffn.lin2"),
)
_VIT: Final = _block(
    "attention",
    ("q_proj", "k_proj", "v_proj"),
    "attention.o_proj",
    ("mlp.fc1", "mlp.fc2"),
)
_CLIP: Final = _block(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "self_attn.out_proj",
    ("mlp.fc1", "mlp.fc2"),
)
# Family of transformers and class of its block. Attention over another model's outputs
# (`crossattention`) stays whole.
_PLANS: Final[Mapping[str, Plan]] = {
    "gpt2.GPT2Block": _GPT2,
    "opt.OPTDecoderLayer": _OPT,
    "bert.BertLayer": _BERT,
    "roberta.RobertaLayer": _BERT,
    "xlm_roberta.XLMRobertaLayer": _BERT,
    "camembert.CamembertLayer": _BERT,
    "electra.ElectraLayer": _BERT,
    "distilbert.TransformerBlock": _DISTILBERT,
    "vit.ViTLayer": _VIT,
    "deit.DeiTLayer": _VIT,
    "clip.CLIPEncoderLayer": _CLIP,
}


def plan_of_blocks(model: nn.Module, *, size: int) -> Plan:
    """Return a plan that divides the known blocks of a model for tensor groups of `size` ranks, its
    embedding of tokens and its output layer; empty if it has none of these blocks.

    Raises:
        ConfigError: kind ``tensor-not-divisible``: the heads of a block.
    """
    plan: dict[str, TensorSplit] = {}
    for name, block in model.named_modules():
        entries = _plan_of_block(block)
        if entries is None:
            continue
        for module in block.modules():
            refuse_heads(getattr(module, "config", None), size)
        for part, entry in entries.items():
            plan[f"{name}.{part}"] = entry
    if plan:
        plan.update(dict.fromkeys(_ends(model), _VOCABULARY))
    return plan


def refuse_heads(config: Any, size: int) -> None:
    """Refuse heads that ranks cannot share evenly, as a config of transformers counts them.

    Raises:
        ConfigError: kind ``tensor-not-divisible``.
    """
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, key, None)
        if isinstance(count, int) and count % size:
            reason = f"ranks cannot share the model's {count} {key} evenly"
            raise ConfigError.of(
                "tensor-not-divisible", reason, "set another size", "parallel.tensor", size
            )


def _plan_of_block(block: nn.Module) -> Plan | None:
    for kind in type(block).__mro__:
        module = kind.__module__
        if module.startswith(_MODELS):
            family = module.removeprefix(_MODELS).partition(".")[0]
            return _PLANS.get(f"{family}.{kind.__name__}")
    return None


def _ends(model: nn.Module) -> Iterator[str]:
    """Yield the names of the embedding of tokens and of the output layer, and of a weight outside
    of that layer that is its bias.
    """
    embedding, head = _embedding_and_head(model)
    for name, module in model.named_modules():
        is_embedding = module is embedding and isinstance(module, nn.Embedding)
        is_head = module is head and isinstance(module, nn.Linear)
        if is_embedding or is_head:
            yield name
    bias = getattr(head, "bias", None)
    if bias is None:
        return
    for name, weight in model.named_parameters():
        if weight is bias:
            yield name


def _embedding_and_head(model: nn.Module) -> tuple[Any, Any]:
    """Return what transformers takes for the embedding of tokens and the output layer of the
    outermost model of its own; None for what that has not.
    """
    for module in model.modules():
        get_embedding = getattr(module, "get_input_embeddings", None)
        get_head = getattr(module, "get_output_embeddings", None)
        if callable(get_embedding) and callable(get_head):
            embedding = None
            with suppress(NotImplementedError):  # models of images
                embedding = get_embedding()
            return embedding, get_head()
    return None, None
