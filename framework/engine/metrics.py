"""Metrics read from the device: each function here waits for it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

from framework.engine.distributed import device, gather
from framework.engine_protocol import Table
from framework.errors import ConfigError
from framework.system.metric_names import BY_NAME, PHASES, REST, WORK_PHASES, time_of
from framework.tasks.task import Ratio, Task

if TYPE_CHECKING:
    from framework.engine.workarounds.grad_norm import KeptNorm

_TIMED: Final = tuple(phase for phase in PHASES if phase != REST)
# Metrics that `over_ranks` gathers, beside the loss.
_OF_RANKS: Final = (
    *[time_of(phase) for phase in _TIMED],
    "memory/host_peak_bytes",
    "memory/device_peak_bytes",
    "train/balance_loss",
    "train/dropped_tokens",
)


def over_ranks(
    rank_metrics: Mapping[str, float],
    look: Callable[[Mapping[str, Sequence[float]]], object] = lambda parts: None,
) -> dict[str, float]:
    """Return the metrics of all ranks together: means, which count 0 on ranks without the metric,
    the largest memory, and how much longer the slowest rank works than the others. Collective: one
    small gather.

    Args:
        rank_metrics: this rank's; stages of a pipeline may have different ones.
        look: called with every rank's milliseconds in each phase of a step; -1 on ranks without
            the phase.
    """
    names = ("train/loss", *_OF_RANKS)
    ranks = torch.distributed.get_world_size()
    values = [rank_metrics.get(name, -1.0) for name in names]
    row = torch.tensor(values, dtype=torch.float64, device=device())
    rows = row.new_empty(ranks * len(names))
    torch.distributed.all_gather_into_tensor(rows, row)
    columns = dict(zip(names, rows.view(ranks, -1).T.tolist(), strict=True))
    metrics = {"train/loss": sum(columns.pop("train/loss")) / ranks}
    for name, column in columns.items():
        if max(column) < 0:  # no rank has it
            continue
        if BY_NAME[name].kind == "peak":
            metrics[name] = max(column)
        else:
            metrics[name] = sum(max(0.0, value) for value in column) / ranks
    times = {phase: columns[time_of(phase)] for phase in _TIMED}
    look(times)
    work = []
    for rank in range(ranks):
        work.append(sum(max(0.0, times[phase][rank]) for phase in WORK_PHASES))
    return metrics | _slowest_rank(work)


def _slowest_rank(work: list[float]) -> dict[str, float]:
    """Return ``ranks/slowest``, the rank with the most `work` (milliseconds by rank), and
    ``ranks/slowest_factor``, its work over the median of the others'; nothing if no other works.
    """
    if len(work) == 1:
        return {}
    slowest = work.index(max(work))
    others = median(work[:slowest] + work[slowest + 1 :])
    if not others:
        return {}
    return {"ranks/slowest": float(slowest), "ranks/slowest_factor": work[slowest] / others}


def engine_metrics(
    engine: deepspeed.DeepSpeedEngine, kept_norm: KeptNorm | None
) -> dict[str, float]:
    """Return gradient norm, loss scale and number of skipped steps, as of DeepSpeed's last step;
    the norm is `kept_norm`'s, before clipping, if it has one.
    """
    norm: float | torch.Tensor | None
    if kept_norm is not None and kept_norm.norm is not None:
        norm = kept_norm.norm
    elif engine.zero_optimization_stage() == 0:
        from framework.engine.workarounds.half_without_zero import norm_of

        norm = norm_of(engine)
    else:
        norm = engine.get_global_grad_norm()
    metrics = {}
    if norm is not None:
        metrics["train/grad_norm"] = float(norm)
    if engine.fp16_enabled():
        metrics["train/loss_scale"] = float(engine.optimizer.loss_scale)
    metrics["train/skipped_steps"] = float(engine.skipped_steps)
    return metrics


def memory_metrics() -> dict[str, float]:
    """Return the peak memory of this rank so far, in bytes: on the host (resident set), and on the
    device if it is not the host.
    """
    metrics = {
        # in KiB on Linux
        "memory/host_peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    }
    accelerator = get_accelerator()
    if accelerator._name != "cpu":
        metrics["memory/device_peak_bytes"] = float(accelerator.max_memory_allocated())
    return metrics


class EvalSums:
    """Totals and counts of every metric of an evaluation, on the device until `over_ranks`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, ratios: Mapping[str, Ratio], *, counts: bool) -> None:
        """Add one batch; a batch that does not count only makes its metrics known."""
        for name, ratio in ratios.items():
            pair = torch.stack([self._summand(ratio.total), self._summand(ratio.count)])
            self._sums.setdefault(name, torch.zeros_like(pair))
            if counts:
                self._sums[name] += pair

    def _summand(self, part: torch.Tensor | int) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part.to(self._device, torch.float64, non_blocking=True)
        # a copy would wait for the device
        return torch.full((), part, dtype=torch.float64, device=self._device)

    def metrics(self, task: Task) -> dict[str, float]:
        """Return every metric over all ranks, and the metrics that the task derives from them,
        under their public names. Collective.
        """
        metrics = self.over_ranks()
        derived = task.derive(metrics)
        numbers = {name: _as_float(name, value, task=task) for name, value in derived.items()}
        return {f"eval/{name}": value for name, value in (metrics | numbers).items()}

    def over_ranks(self) -> dict[str, float]:
        """Return every metric as total / count over all ranks. Collective.

        A task may measure something in some batches only: a metric that a rank has not measured
        counts as nothing there. It is NaN if its count is 0 on all ranks.
        """
        names = sorted(set().union(*gather(sorted(self._sums))))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        sums = torch.stack([self._sums.get(name, nothing) for name in names])
        torch.distributed.all_reduce(sums)
        metrics: dict[str, float] = {}
        for name, (total, count) in zip(names, sums.tolist(), strict=True):
            metrics[name] = total / count if count else float("nan")
        return metrics


class Evaluation:
    """What is measured in one pass over an evaluation set: sums of every batch.

    Attributes:
        looks_at_all: whether whole outputs are read, which no layer may keep to itself.
        tables: after `figures`, on rank 0: metrics that are matrices, as rows, by name.
    """

    looks_at_all = False

    def __init__(self, task: Task) -> None:
        self._task = task
        self._sums = EvalSums(device())
        self.tables: dict[str, Table] = {}

    def add(self, outputs: Any, targets: Any, *, counts: bool) -> None:
        """Add a batch; one that does not count only makes its metrics known."""
        self._sums.add(self._task.measure(outputs, targets), counts=counts)

    def figures(self) -> dict[str, float]:
        """Return all metrics under their public names, alike on every rank. Collective."""
        return self._sums.metrics(self._task)


def _as_float(name: str, value: Any, *, task: Task) -> float:
    """Return a metric that `Task.derive` computed as a float; raise ConfigError if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind = f"tensor of shape {tuple(value.shape)}"
        raise ConfigError.of(
            "task-metric-result",
            f"derive() returned a {kind} for the metric {name!r}, not a number",
            "return a float",
            "task",
            type(task).__name__,
        ) from error
