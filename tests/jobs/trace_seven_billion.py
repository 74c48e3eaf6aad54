"""Traces a model of seven billion weights, as `plan` does: prints the number of its weights, the peak
memory in bytes of the process that traced it, and the seconds of the processor that this took.

A program of its own, without torch: a child's peak begins with the memory of the process that starts
it.
"""

from __future__ import annotations

import resource

from framework.commands.torch_child import ask_child
from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan

SHAPE = {
    "vocab_size": 32_000,
    "max_positions": 4096,
    "hidden_size": 8192,
    "num_layers": 8,
    "num_heads": 64,
    "num_kv_heads": 64,
    "mlp_size": 22_016,
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}


def main() -> None:
    """Trace the model, in a child."""
    model = {"target": "framework.recipes.language_models.gpt:GPT.of", "args": SHAPE}
    config = config_from_values(
        {
            "model": model,
            "data": {"kind": "text", "sequence_length": 4096},
            "task": {"kind": "causal_lm"},
            "batch": {"micro_size": 1},
            "precision": {"dtype": "bf16"},
        }
    )
    plan = make_plan(config, Cluster(devices_per_host=1))
    work = ask_child("trace", plan, longest_seconds=120, needs=("torch",), device="cuda")["work"]
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = child.ru_utime + child.ru_stime
    print(sum(part["num_params"] for part in work["parts"]), child.ru_maxrss * 1024, seconds)


if __name__ == "__main__":
    main()
