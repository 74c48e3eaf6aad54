"""Models and batches that the benchmarks of one GPU share, as sections of a run config."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Case:
    """One model that loops are held against each other with.

    Attributes:
        sections: of the run config.
        steps: of a block.
        together: all loops are in memory at once and take turns; else one after the other, each
            built, run and freed.
        optimizer: section of the run config.
    """

    sections: dict[str, Any]
    steps: int
    together: bool = True
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(OPTIMIZER))


def _filled(name: str) -> dict[str, Any]:
    """Return a model with its vocabulary filled up to a multiple of 128, as the fastest do."""
    sections = MODELS[name]
    return {**sections, "model": {**sections["model"], "vocab_size": 50304}}


# In bf16 on a GPU.
CASES: Final[dict[str, Case]] = {
    "gpt2": Case(_filled("gpt2"), steps=10),
    "gpt2-xl": Case(_filled("gpt2-xl"), steps=4, together=False),
    "8b-slice": Case(MODELS["8b-slice"], steps=4, together=False),
    "8b-slice-lora": Case(MODELS["8b-slice-lora"], steps=4, together=False),
    "bert-large": Case(
        {
            "model": {"kind": "bert", "size": "large", "dropout": 0.0, "num_classes": 2},
            "data": {
                "target": "benchmarks.loops.samples:pairs",
                "args": {"count": 640, "length": 512, "vocab_size": 30522},
            },
            "batch": {"global_size": 32, "micro_size": 32},
        },
        steps=10,
    ),
    "resnet50": Case(
        {
            "model": {"kind": "resnet50"},
            "data": {"kind": "synthetic_images", "image_size": 224, "num_samples": 2560},
            "batch": {"global_size": 256, "micro_size": 256},
        },
        steps=10,
    ),
    "lenet": Case(
        {
            "model": {"kind": "lenet", "image_size": 28},
            "data": {"target": "benchmarks.trainer_tax:images"},
            "batch": {"global_size": 64, "micro_size": 64},
        },
        steps=100,
    ),
}
_TINY_GPT: Final = {
    "model": {
        "kind": "gpt",
        "size": "tiny",
        "hidden_size": 16,
        "mlp_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_positions": 16,
        "vocab_size": 32,
        "dropout": 0.0,
    },
    "data": {
        "target": "benchmarks.loops.samples:tokens",
        "args": {"count": 64, "length": 16, "vocab_size": 32},
    },
    "task": {"kind": "causal_lm"},
    "batch": {"micro_size": 2},
}
# The same loops on processors, in fp32, for the tests.
TINY: Final[dict[str, Case]] = {
    "gpt2": Case(_TINY_GPT, steps=2),
    "8b-slice-lora": Case(
        {**_TINY_GPT, "training": {"lora": {"target_modules": "all-linear", "r": 2}}},
        steps=2,
        together=False,
    ),
    "bert-large": Case(
        {
            "model": {
                "kind": "bert",
                "size": "tiny",
                "hidden_size": 16,
                "mlp_size": 32,
                "vocab_size": 32,
                "dropout": 0.0,
                "num_classes": 2,
            },
            "data": {
                "target": "benchmarks.loops.samples:pairs",
                "args": {"count": 64, "length": 16, "vocab_size": 32},
            },
            "batch": {"micro_size": 2},
        },
        steps=2,
    ),
    "lenet": Case(
        {
            "model": {"kind": "lenet", "image_size": 28},
            "data": {"target": "benchmarks.trainer_tax:images"},
            "batch": {"micro_size": 4},
        },
        steps=2,
    ),
}
# The most important rows first: models, and the loops of each.
ORDER: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("gpt2", ("ours", "plain", "bare", "accelerate", "hf")),
    ("gpt2-xl", ("ours", "plain")),
    ("8b-slice-lora", ("ours", "plain")),
    ("8b-slice", ("ours", "plain")),
    ("resnet50", ("ours", "plain", "bare", "accelerate", "hf")),
    ("lenet", ("ours", "plain", "bare", "accelerate", "hf")),
    ("bert-large", ("ours", "plain", "bare", "accelerate", "hf")),
    ("gpt2-xl", ("bare", "accelerate", "hf")),
    ("8b-slice-lora", ("bare", "accelerate", "hf")),
    ("8b-slice", ("bare", "accelerate", "hf")),
)
