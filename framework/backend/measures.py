"""Numbers that are read from the device: each function here waits for it."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

from framework.backend.grad_norm import KeptNorm
from framework.tasks.task import Ratio, Task


def mean_over_ranks(value: torch.Tensor) -> float:
    """Mean of a 0-d tensor over all ranks. Collective."""
    total = value.detach().float().clone()
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


def engine_metrics(engine: deepspeed.DeepSpeedEngine, kept_norm: KeptNorm | None) -> dict[str, float]:
    """What DeepSpeed knows of its last step."""
    metrics: dict[str, float] = {}
    norm = kept_norm.norm if kept_norm is not None and kept_norm.norm is not None else engine.get_global_grad_norm()
    if norm is not None:
        metrics["train/grad_norm"] = float(norm)
    if engine.fp16_enabled():
        metrics["train/loss_scale"] = float(engine.optimizer.loss_scale)
    metrics["train/skipped_steps"] = float(engine.skipped_steps)
    return metrics | memory_metrics()


def memory_metrics() -> dict[str, float]:
    """Peak memory of this rank so far, in bytes: on the host (resident set) and, where there is one, on the device."""
    metrics = {"memory/host_peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    accelerator = get_accelerator()
    if accelerator._name != "cpu":
        metrics["memory/device_peak_bytes"] = float(accelerator.max_memory_allocated())
    return metrics


class EvalSums:
    """Totals and counts of every metric, on the device until `over_ranks`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, ratios: Mapping[str, Ratio], *, counts: bool) -> None:
        """Add one batch; a batch that does not count only makes its metrics known."""
        for name, ratio in ratios.items():
            pair = torch.stack([torch.as_tensor(part, device=self._device).double() for part in (ratio.total, ratio.count)])
            self._sums.setdefault(name, torch.zeros_like(pair))
            if counts:
                self._sums[name] += pair

    def metrics(self, task: Task) -> dict[str, float]:
        """Every metric over all ranks, and what the task derives from them, under their public names. Collective."""
        metrics = self.over_ranks()
        return {f"eval/{name}": value for name, value in {**metrics, **task.derive(metrics)}.items()}

    def over_ranks(self) -> dict[str, float]:
        """Every metric as total / count over all ranks. Collective.

        A task may measure something in some batches only: what one rank has not met counts as nothing there, and never
        as another metric.
        """
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, sorted(self._sums))
        names = sorted(set().union(*everyone))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        sums = torch.stack([self._sums.get(name, nothing) for name in names])
        torch.distributed.all_reduce(sums)
        pairs = zip(names, sums.tolist(), strict=True)
        return {name: total / count if count else float("nan") for name, (total, count) in pairs}
