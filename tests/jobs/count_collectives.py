"""Counts the collectives of one step between two logged points, and looks for GPUs:
count_collectives.py OUT.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from deepspeed.utils import nvtx

from framework.config.load import config_from_values
from framework.engine.distributed import process_group, rank
from framework.engine.plain_engine import build_engine
from framework.setup.prepare_run import prepare
from framework.tasks.from_callable import as_task
from framework.tasks.task import Task

_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)
_COUNTED: list[tuple[Any, str]] = [(torch.distributed, name) for name in _COLLECTIVES]
if not torch.cuda.is_available():
    _COUNTED += [(torch.cuda, "_raw_device_count_nvml"), (nvtx, "_range_push")]


class Squares(Task):
    """A mean: nothing has to be counted."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return outputs.float().square().mean()


def main() -> None:
    found: dict[str, dict[str, int]] = {}
    with process_group(None):
        for stage in (0, 1, 2):
            for name, task in (("counts", None), ("mean", Squares())):
                values = {
                    "model": {"kind": "mlp"},
                    "zero": {"stage": stage},
                    "batch": {"micro_size": 4},
                }
                prepared = prepare(config_from_values(values))
                engine = build_engine(
                    prepared.plan,
                    ds_config=prepared.ds_config,
                    model=prepared.parts.build_model(),
                    task=as_task(task) if task else prepared.parts.task,
                )
                samples = prepared.parts.splits.train
                batch = (
                    torch.stack([samples[i][0] for i in range(4)]),
                    torch.tensor([samples[i][1] for i in range(4)]),
                )
                engine.train_step(iter([batch]))
                found[f"z{stage}-{name}"] = _counted(
                    lambda e=engine, b=batch: e.train_step(iter([b]))
                )
                engine.close()
        is_first = rank() == 0
    if is_first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def _counted(step: Any) -> dict[str, int]:
    calls: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for module, name in _COUNTED:
            patches.enter_context(
                mock.patch.object(module, name, counting(name, getattr(module, name)))
            )
        step()
    return dict(calls)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
