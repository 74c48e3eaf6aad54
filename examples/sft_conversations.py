"""Fine-tune a Hugging Face model on conversations, and write a folder for the Hub.

python examples/sft_conversations.py                        # a tiny Llama on questions about Python, no download
deepspeed --num_gpus 8 examples/sft_conversations.py BASE chats.jsonl
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import framework
from framework.commands.export import export


def tiny_base(folder: Path) -> str:
    """Random weights in the place of a downloaded model, with the byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from framework.recipes.text.chat import TEMPLATE_OF_BYTES, open_tokenizer

    if not (folder / "config.json").exists():
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        LlamaForCausalLM(LlamaConfig(vocab_size=264, **sizes)).save_pretrained(folder)
        open_tokenizer(None, TEMPLATE_OF_BYTES).save_pretrained(folder)
    return str(folder)


def main(base: str | None = None, chats: str | None = None, output_dir: str = "runs") -> Path:
    """Train, export, and return the exported folder."""
    base = base or tiny_base(Path(output_dir, "tiny_base"))
    place = {"pretrained_model_name_or_path": base}
    framework.fit(
        {
            "run": {"name": "sft", "output_dir": output_dir},
            "model": {"target": "transformers:AutoModelForCausalLM.from_pretrained", "args": place},
            "data": {"kind": "conversations", "path": chats, "tokenizer": base, "packing": True},
            "task": {"kind": "causal_lm"},
            "batch": {"global_size": 16},
            "optimizer": {"kind": "adamw", "lr": 2e-3},
            "scheduler": {"kind": "cosine", "warmup_steps": 5},
            "training": {"max_epochs": 1, "log_every": 5},
        }
    )
    run, out = Path(output_dir, "sft"), Path(output_dir, "sft_for_the_hub")
    if os.environ.get("RANK", "0") == "0":
        export(str(run), out, file_format="hf", trust=str(run), force=True)
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
