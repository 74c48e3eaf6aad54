"""Counts the bytes of all live tensors of a rank, after `initialize` and after two steps: live_bytes.py OUT.json."""

from __future__ import annotations

import gc
import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from framework.config.load import config_from_values
from framework.engine.distributed import process_group, rank
from framework.engine.plain_engine import build_engine
from framework.setup.prepared import prepare
from framework.tasks.task import Task

GPT = {"kind": "gpt", "vocab_size": 331, "hidden_size": 128, "num_layers": 3, "num_heads": 4, "max_positions": 32}


class Squares(Task):
    """A mean over all that the model returns."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return outputs.float().square().mean()


def live_bytes() -> int:
    """Bytes of all storages that a tensor of this process shows."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    found: dict[str, Any] = {}
    with process_group(None):
        for stage, dtype, accumulation in product((0, 1, 2), ("fp32", "bf16"), (1, 4)):
            values = {
                "model": GPT,
                "data": {"target": "tests.jobs.parts:masked_prompts"},
                "task": {"target": "tests.jobs.live_bytes:Squares"},
                "zero": {"stage": stage, "reduce_bucket_size": 200_000},
                "precision": {"dtype": dtype},
                "batch": {"micro_size": 1, "accumulation_steps": accumulation},
                "training": {"max_steps": 10},
            }
            prepared, tokens = prepare(config_from_values(values)), torch.zeros(1, 32, dtype=torch.int64)
            model = prepared.parts.build_model()
            num_params = sum(parameter.numel() for parameter in model.parameters())
            before = live_bytes() - 4 * num_params
            engine = build_engine(prepared.plan, ds_config=prepared.ds_config, model=model, task=Squares())
            at_start = live_bytes() - before
            for _ in range(2):
                engine.train_step(iter([(tokens, tokens)] * accumulation))
            after_steps = live_bytes() - before
            found[f"z{stage}-{dtype}-{accumulation}"] = [at_start / num_params, after_steps / num_params]
            engine.close()
            del engine, prepared, model
        is_first = rank() == 0
    if is_first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
