"""The longest sequence that the planner gives a device, beside published ones; and bytes in host
memory beside those that a small model leaves there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.config.load import config_from_values
from framework.config.training import Training
from framework.models.host_activations import HostActivations
from framework.models.prepare_model import prepare_model
from framework.plan.cluster import Cluster
from framework.plan.memory import Memory, estimate
from framework.plan.plan import make_plan
from framework.recipes.language_models.gpt import GPT
from tests.places import ROOT

PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
LLAMA_8B = {
    "kind": "gpt",
    "vocab_size": 128_256,
    "max_positions": 2**22,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "mlp_size": 14_336,
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
# Snowflake ArcticTraining, projects/sequence-parallelism: one H200, ZeRO-3 with weights and
# optimizer on the host; the longest sequence and the GB that it took.
PUBLISHED: dict[str, tuple[dict[str, Any], int, float]] = {
    "recomputed": ({"loss_tile": 0}, 65_000, 137.4),
    "loss in tiles": ({}, 300_000, 135.0),
    "activations on the host": ({"offload_activations": True}, 650_000, 126.8),
    "perceptrons in tiles": ({"offload_activations": True, "mlp_tile": 4096}, 1_200_000, 136.2),
}


def estimated(
    model: dict[str, Any], length: int, *, dtype: str = "bf16", **training: Any
) -> Memory:
    values = {
        "model": model,
        "data": {"kind": "text", "sequence_length": length},
        "task": {"kind": "causal_lm"},
        "zero": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "precision": {"dtype": dtype},
        "batch": {"micro_size": 1, "accumulation_steps": 1},
        "training": {"max_steps": 9, **training},
    }
    plan = make_plan(config_from_values(values), Cluster(devices_per_host=1, device="cuda"))
    return estimate(plan)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_longest_sequence_is_about_the_published_one(name: str) -> None:
    training, published, gigabytes = PUBLISHED[name]
    low, high = 2**10, 2**22
    while high - low > 2**12:
        length = (low + high) // 2
        memory = estimated(LLAMA_8B, length, recompute="full", **training)
        if memory.total(memory.peak) <= gigabytes * 1e9:
            low = length
        else:
            high = length
    assert low == pytest.approx(published, rel=0.25)
    memory = estimated(LLAMA_8B, published, recompute="full", **training)
    planned = memory.total(memory.peak) / 1e9
    assert planned == pytest.approx(gigabytes, rel=0.33)
    row = next(line for line in PAGE.splitlines() if f"| {published:,} ({gigabytes} GB) |" in line)
    assert f"| {planned:.1f} GB |" in row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_bytes_in_host_memory_are_those_of_a_small_model(
    recompute: str | None, dtype: torch.dtype
) -> None:
    """As on a processor: attention and norms keep other things on a GPU."""
    shape = {
        "vocab_size": 500,
        "max_positions": 256,
        "hidden_size": 128,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_size": 400,
        "mlp": "swiglu",
        "positions": "learned",
        "dropout": 0.0,
    }
    values = {
        "model": {"kind": "gpt", **shape},
        "data": {"kind": "text", "sequence_length": 256},
        "task": {"kind": "causal_lm"},
        "precision": {"dtype": "fp32" if dtype == torch.float32 else "bf16"},
        "batch": {"micro_size": 2, "accumulation_steps": 1},
        "training": {"max_steps": 9, "recompute": recompute, "offload_activations": True},
    }
    plan = make_plan(config_from_values(values), Cluster(devices_per_host=1, device="cpu"))
    torch.manual_seed(0)
    model = prepare_model(GPT.of(**shape).to(dtype), Training(recompute=recompute))
    holding = HostActivations(model, torch.device("cpu"))
    with holding.saving():
        outputs = model(torch.randint(0, 500, (2, 256)))
    outputs.float().square().mean().backward()
    assert estimate(plan).host["activations"] == pytest.approx(holding.most_bytes, rel=0.05)
