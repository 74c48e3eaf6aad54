"""Counts the products of a forward pass of engines of small models: joined_weights.py OUT.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from framework.config.load import config_from_values
from framework.engine.distributed import process_group, rank
from framework.engine.plain_engine import build_engine
from framework.setup.prepare_run import prepare
from tests.models.operator_calls import Calls

_SMALL = {"kind": "gpt", "hidden_size": 32, "num_layers": 1, "num_heads": 4, "mlp_size": 64}
_LLAMA = {"num_kv_heads": 2, "positions": "rotary", "mlp": "swiglu", "bias": False}
_GROUPS = {"kind": "adamw", "weight_decay_on": "matrices"}
CASES: dict[str, dict[str, Any]] = {
    "llama-z1": {"model": _SMALL | _LLAMA, "zero": {"stage": 1}},
    "llama-z2": {"model": _SMALL | _LLAMA, "zero": {"stage": 2}, "precision": {"dtype": "fp32"}},
    "biases-apart-z1": {"model": _SMALL, "zero": {"stage": 1}, "optimizer": _GROUPS},
    "biases-between-z1": {"model": _SMALL, "zero": {"stage": 1}},
}


def main() -> None:
    base = {
        "data": {"kind": "text", "sequence_length": 8},
        "task": {"kind": "causal_lm"},
        "precision": {"dtype": "bf16"},
    }
    found: dict[str, dict[str, int]] = {}
    with process_group(None):
        for name, case in CASES.items():
            prepared = prepare(config_from_values(base | case))
            model = prepared.parts.build_model()
            engine = build_engine(
                prepared.plan, ds_config=prepared.ds_config, model=model, task=prepared.parts.task
            )
            ids = torch.zeros(1, 8, dtype=torch.long)
            engine.module(ids)  # DeepSpeed and gradient order look on in the first pass
            with Calls() as calls:
                engine.module(ids)
            found[name] = calls.kernels
            engine.close()
        if rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
