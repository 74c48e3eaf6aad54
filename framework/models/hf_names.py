"""Names that Hugging Face's transformers gives the weights of the same architecture, for `export --hf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def hf_names(architecture: str, num_layers: int) -> dict[str, str]:
    """Our names -> those of `BertForPreTraining` (``bert``), or of `LlamaForCausalLM` (``llama``), whose norms have no
    bias.
    """
    table: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[architecture]
    together = dict(table["modules"])
    for number in range(num_layers):
        block = table["block"].items()
        together |= {f"blocks.{number}.{ours}": f"{table['blocks']}.{number}.{theirs}" for ours, theirs in block}
    parts = {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in together.items() for part in ("weight", "bias")}
    return {**table["whole"], **parts}
