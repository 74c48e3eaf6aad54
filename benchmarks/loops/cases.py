"""Models and batches that the benchmarks of one GPU share, as sections of a run config."""

from __future__ import annotations

from typing import Any, Final

# Values: sections of a run config. Without dropout, so that all loops have the same losses. The
# shapes of 8 billion weights are 8 of its 32 blocks with the whole vocabulary: what fits on one
# device with its optimizer.
_SLICE: Final = {
    "model": {"kind": "gpt", "size": "llama-3-8b", "num_layers": 8},
    "data": {"kind": "text", "sequence_length": 4096},
    "task": {"kind": "causal_lm"},
    "batch": {"global_size": 2, "micro_size": 2},
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "gpt2": {
        "model": {"kind": "gpt", "size": "gpt2", "dropout": 0.0},
        "data": {"kind": "text", "sequence_length": 1024},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": 32, "micro_size": 32},
    },
    "gpt2-xl": {
        "model": {"kind": "gpt", "size": "gpt2-xl", "dropout": 0.0},
        "data": {"kind": "text", "sequence_length": 1024},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": 8, "micro_size": 8},
    },
    "8b-slice": _SLICE,
    "8b-slice-lora": {
        **_SLICE,
        "training": {"lora": {"target_modules": "all-linear", "r": 16, "lora_alpha": 32}},
    },
}
PRECISION: Final = {"dtype": "bf16"}
OPTIMIZER: Final = {"kind": "adamw", "lr": 6e-4}
