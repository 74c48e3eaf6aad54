"""Counts reads of device values (``aten::_local_scalar_dense``: .item(), float(), bool()) per step,
ours and a bare loop's.

    count_syncs.py OUT.json [--all]

On CPU such a read costs nothing, on a GPU it waits for everything queued before it; the operator is
the same on both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import framework
from framework.config.load import config_from_values
from framework.engine.distributed import process_group
from framework.engine.plain_engine import PlainEngine
from framework.setup.prepare_run import prepare

STEPS = 6
# Type and limit of gradients; without --all the first two.
CASES = (("fp32", 0.0), ("bf16", 1.0), ("fp32", 1.0), ("bf16", 0.0))


class Reads(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def case(stage: int, dtype: str, clip: float, folder: str) -> dict[str, Any]:
    """With every second case an average, and a look for bad steps, so that they cost no further
    ones.
    """
    return {
        "run": {"name": f"{dtype}-z{stage}-clip{clip:g}", "output_dir": folder},
        "batch": {"global_size": 60, "accumulation_steps": 2},
        "zero": {"stage": stage},
        "precision": {"dtype": dtype},
        "training": {
            "max_steps": STEPS,
            "log_every": STEPS,
            "clip_grad_norm": clip,
            "ema": {"decay": 0.9} if clip else None,
            "bad_steps": "stop" if clip else None,
        },
        "evaluation": {"at_end": False},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "progress": "off"},
    }


def ours(config: dict[str, Any]) -> int:
    """Reads of everything between the first step and the logged last one: steps, loader,
    Trainer.
    """
    reads = Reads()
    before_last: list[int] = []
    original = PlainEngine.train_step

    def train_step(self: PlainEngine, micro_batches: Any) -> Any:
        before_last.append(reads.count)
        return original(self, micro_batches)

    PlainEngine.train_step = train_step  # type: ignore[method-assign]
    try:
        with reads:
            framework.fit(config)
    finally:
        PlainEngine.train_step = original  # type: ignore[method-assign]
    return before_last[-1] - before_last[1]  # the first step sets optimizers up


def bare(config: dict[str, Any]) -> int:
    """Reads of the same steps in a loop without us."""
    prepared = prepare(config_from_values(config))
    model = prepared.parts.build_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=prepared.ds_config,
        dist_init_required=False,
    )
    half = torch.bfloat16 if config["precision"]["dtype"] == "bf16" else None
    images, labels = torch.randn(30, 1, 28, 28).to(half), torch.zeros(30, dtype=torch.long)
    reads = Reads()
    counts = []
    with reads:
        for _ in range(STEPS):
            counts.append(reads.count)
            for _ in range(2):
                engine.backward(torch.nn.functional.cross_entropy(engine(images).float(), labels))
                engine.step()
    engine.destroy()
    return counts[-1] - counts[1]


def main() -> None:
    found = {}
    with process_group(None), tempfile.TemporaryDirectory() as folder:
        for stage in (0, 1, 2, 3):
            for dtype, clip in CASES[: None if "--all" in sys.argv else 2]:
                config = case(stage, dtype, clip, folder)
                found[config["run"]["name"]] = {"ours": ours(config), "bare": bare(config)}
            config = case(stage, "fp32", 1.0, folder)
            config["training"]["bad_steps"] = "skip"
            found[f"skip-z{stage}"] = {"ours": ours(config), "bare": bare(config)}
            config["optimizer"] = {"kind": "adamw", "implementation": "fused"}
            found[f"skip-fused-z{stage}"] = {"ours": ours(config), "bare": bare(config)}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
