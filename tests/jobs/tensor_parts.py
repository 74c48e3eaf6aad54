"""Models for tensor groups that are not ours: named by import path in test configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).logits
        return logits


def llama(tie: bool = False, key_heads: int = 2) -> Logits:
    """Llama of 2 layers, 4 heads and 2 key/value heads or others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return Logits(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=261, num_key_value_heads=key_heads, tie_word_embeddings=tie, **sizes
            )
        )
    )


def gemma() -> Logits:
    """Gemma, whose embedding scales what it finds, and gives its weight to the output layer."""
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return Logits(
        GemmaForCausalLM(GemmaConfig(vocab_size=261, num_key_value_heads=2, head_dim=8, **sizes))
    )


# Families that bring no plan: class of transformers, and its configuration.
_FORM: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 34,
    "vocab_size": 261,  # an odd number
    "initializer_range": 0.1,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = _FORM | _ENDS | {"intermediate_size": 48}
_IMAGE = {
    "image_size": 28,
    "patch_size": 7,
    "num_channels": 1,
    "num_labels": 10,
    "initializer_range": 0.2,
}
WITHOUT_PLAN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _FORM | _ENDS | {"use_cache": False}),
    "opt": (
        "OPTForCausalLM",
        _FORM | _ENDS | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.1},
    ),
    "bert": ("BertForMaskedLM", _WIDE),
    "roberta": ("RobertaForMaskedLM", _WIDE),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _WIDE),
    "camembert": ("CamembertForMaskedLM", _WIDE),
    "electra": ("ElectraForMaskedLM", _WIDE | {"embedding_size": 16}),
    "distilbert": (
        "DistilBertForMaskedLM",
        _FORM | _ENDS | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "vit": ("ViTForImageClassification", _FORM | _IMAGE | {"intermediate_size": 48}),
    "deit": ("DeiTForImageClassification", _FORM | _IMAGE | {"intermediate_size": 48}),
    "clip": (
        "CLIPForImageClassification",
        {"vision_config": _FORM | _IMAGE | {"intermediate_size": 48}, "num_labels": 10},
    ),
}
_DROPOUTS = (
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "attention_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)


def without_plan(family: str, dropout: float = 0.0, **sizes: Any) -> nn.Module:
    """A model of transformers that brings no plan for tensor groups."""
    import transformers

    name, values = WITHOUT_PLAN[family]
    made = getattr(transformers, name)
    config = made.config_class(**(values | sizes))
    for attribute in _DROPOUTS:
        if hasattr(config, attribute):
            setattr(config, attribute, dropout)
    model: nn.Module = made(config)
    return model


def gpt2_logits() -> Logits:
    """GPT-2 that returns its logits alone."""
    return Logits(without_plan("gpt2"))


class ScaledByHand(nn.Embedding):
    """An embedding whose forward looks up by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * nn.functional.embedding(input, self.weight)


class Headed(nn.Module):
    """A model whose own plan divides the output layer alone."""

    _tp_plan = {"head": "colwise_gather_output"}

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))
        self.head = nn.Linear(64, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(hidden))
        return logits


class Bent(nn.Module):
    """A perceptron of two layers with a slope that it learns between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.bend = nn.Linear(784, 32), nn.Linear(32, 64), nn.PReLU()
        self.down, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images.flatten(1))
        logits: Tensor = self.head(hidden + self.down(self.bend(self.up(hidden))))
        return logits


class Convolved(nn.Module):
    """A convolution with batch norm, and a perceptron of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 7, stride=7), nn.BatchNorm2d(8)
        self.up, self.down = nn.Linear(128, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(images))).flatten(1)
        logits: Tensor = self.head(self.down(torch.relu(self.up(hidden))))
        return logits


class Sloped(nn.Module):
    """A perceptron whose own weight is a slope between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.down(torch.tanh(self.slope * self.up(inputs)))
        return outputs


def vit() -> Logits:
    """Vision transformer of 2 layers for digits of 28 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    rest: dict[str, Any] = {
        "image_size": 28,
        "patch_size": 7,
        "num_channels": 1,
        "num_labels": 10,
        "initializer_range": 0.2,
    }
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Logits(ViTForImageClassification(ViTConfig(**sizes, **rest, **dropout)))


class FusedAttention(nn.Module):
    """As timm's: query, key and value in one matrix, and a number of heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, width // num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm = nn.LayerNorm(self.head_size)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], 3, self.num_heads, self.head_size)
        query, key, value = self.qkv(hidden).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(query), key, value)
        output: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return output


class FusedBlock(nn.Module):
    """Pre-norm block with a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), FusedAttention(width, 4)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm(hidden))
        output: Tensor = hidden + self.mlp(hidden)
        return output


class FusedVision(nn.Module):
    """Rows of a picture as positions, and a mean of them as the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(28, 32), nn.ModuleList(FusedBlock(32) for _ in range(2))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images.squeeze(1))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def torch_vit() -> nn.Module:
    """torchvision's class, whose attention is `nn.MultiheadAttention`; the images are made its
    three channels.
    """
    from torchvision.models import VisionTransformer

    sizes = {
        "image_size": 28,
        "patch_size": 7,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 64,
    }
    return nn.Sequential(Coloured(), VisionTransformer(**sizes, num_classes=10))


class Coloured(nn.Module):
    """One channel as three."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images] * 3, dim=1)


def staged_llama() -> nn.Module:
    """Llama of transformers as a list of layers, each of which knows its positions itself."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    class Block(LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Tensor:
            places = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            turns = self.rotary(hidden, position_ids=places)
            output: Tensor = super().forward(hidden, position_embeddings=turns)
            return output

    class StagedLlama(LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in self.model.layers:
                block.__class__ = Block
                block.rotary = LlamaRotaryEmbedding(config)
            del self.model.rotary_emb

        def layers(self) -> list[tuple[str, nn.Module]]:
            pairs = [("model.embed_tokens", self.model.embed_tokens)]
            pairs += [(f"model.layers.{n}", block) for n, block in enumerate(self.model.layers)]
            return [*pairs, ("model.norm", self.model.norm), ("lm_head", self.lm_head)]

        def forward(self, tokens: Tensor) -> Tensor:
            value = tokens
            for _, module in self.layers():
                value = module(value)
            return value

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return StagedLlama(LlamaConfig(vocab_size=261, num_key_value_heads=2, **sizes))
