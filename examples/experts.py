"""A small Mixtral of transformers whose experts are divided over two ranks: tokens travel to their
experts and back, and the rest of the model is on both.

    deepspeed --num_gpus 2 examples/experts.py 20
    python examples/experts.py 20                          # on one device, which has all experts

The same in a file: ds_configs/mixtral_experts.yaml.
"""

import os
import sys

import torch

import framework

BYTES = 261  # vocabulary of `data: {kind: text}` without a tokenizer


def small_mixtral() -> torch.nn.Module:
    """Four layers of eight experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,  # for the metric train/balance_loss
    )
    return MixtralForCausalLM(config)


def main(steps: int) -> None:
    """Train on the shipped text."""
    framework.fit(
        {
            "run": {"name": "experts"},
            "data": {"kind": "text", "sequence_length": 64},
            "task": {"kind": "causal_lm"},
            "batch": {"global_size": 16},
            "parallel": {"expert": int(os.environ.get("WORLD_SIZE", "1"))},
            "zero": {"stage": 1},
            "optimizer": {"kind": "adamw", "lr": 2e-3},
            "training": {"max_steps": steps, "log_every": 1},
            "evaluation": {"max_samples": 64},
        },
        model=small_mixtral,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
