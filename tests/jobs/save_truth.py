"""Trains cases as `run_cases` does; whenever an engine saves, every rank also writes the weights
that it holds, as it sees them.

They are asked of the living engine and of the module, and never of a checkpoint:
``truth-rank<N>.pt`` in the run folder is what a reader of the checkpoint is held against.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import safe_get_full_fp32_param

from framework.engine.pipeline_engine import PipelineEngine
from framework.engine.plain_engine import PlainEngine
from tests.jobs import run_cases
from tests.jobs.move_cases import copies_of


def truth(engine: Any, *, half: bool) -> dict[str, torch.Tensor]:
    """Whole tensors by name; where training is in half precision, the fp32 weights that the
    optimizer steps.
    """
    found: dict[str, torch.Tensor] = {}
    copies = copies_of(engine.optimizer)  # at stage 0 DeepSpeed has no function that finds them
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            found[name] = tensor.detach().clone()
        master = safe_get_full_fp32_param(tensor) if half and tensor.requires_grad else None
        if tensor in copies:
            master = copies[tensor][0]
        if master is not None:
            found[name] = master.detach().clone().reshape(found[name].shape)
    return found


def telling(save: Any) -> Any:
    def save_both(self: Any, folder: Path, tag: str, state: Mapping[str, Any]) -> Any:
        half = any(
            parameter.dtype != torch.float32 for parameter in self.engine.module.parameters()
        )
        # folder is runs/<name>/checkpoints/.saving
        torch.save(
            truth(self.engine, half=half),
            folder.parents[1] / f"truth-rank{torch.distributed.get_rank()}.pt",
        )
        return save(self, folder, tag, state)

    return save_both


if __name__ == "__main__":
    for kind in (PlainEngine, PipelineEngine):
        kind.save = telling(kind.save)  # type: ignore[method-assign]
    run_cases.main()
    sys.stdout.flush()
    os._exit(0)
