"""Numbers that are read from the device, metrics and times of layers: each function here waits for
it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

from framework.config.precision import BF16, FP16, FP32, Autocast
from framework.engine.distributed import device, gather
from framework.engine.step_batches import HALF, DeviceBatches
from framework.engine.workarounds.grad_norm import KeptNorm
from framework.engine.workarounds.half_without_zero import norm_of
from framework.errors import ConfigError, in_one_line
from framework.models.layers import Layer
from framework.tasks.task import Ratio, Task

_WARM_UPS: Final = 2
_REPEATS: Final = 5


# Of a step's parts, those in which a rank does work of its own: the others wait for the slowest.
_WORK: Final = tuple(
    f"time/{part}_ms" for part in ("data", "copy", "forward", "backward", "optimizer")
)
_TIMES: Final = (*_WORK, "time/communication_ms", "time/bubble_ms")
_EXPERTS: Final = ("train/balance_loss", "train/dropped_tokens")
_MEMORY: Final = ("memory/host_peak_bytes", "memory/device_peak_bytes")


def over_ranks(
    own: Mapping[str, float],
    look: Callable[[Mapping[str, Sequence[float]]], object] = lambda parts: None,
) -> dict[str, float]:
    """Return loss and times as means over all ranks, memory as the most of any; which rank works
    longest, and how many times the median of the others. Collective: one small gather.

    `own` are this rank's; stages of a pipeline may have others. `look` sees the times of all ranks,
    by the part.
    """
    names = ("train/loss", *_TIMES, *_MEMORY, *_EXPERTS)
    ranks = torch.distributed.get_world_size()
    row = torch.tensor(
        [own.get(name, -1.0) for name in names], dtype=torch.float64, device=device()
    )
    rows = row.new_empty(ranks * len(names))
    torch.distributed.all_gather_into_tensor(rows, row)
    columns = dict(zip(names, rows.view(ranks, -1).T.tolist(), strict=True))
    found = {"train/loss": sum(columns.pop("train/loss")) / ranks}
    for name, values in columns.items():
        if max(values) >= 0:  # some rank has it
            found[name] = (
                max(values) if name in _MEMORY else sum(max(0.0, value) for value in values) / ranks
            )
    look({name.removeprefix("time/").removesuffix("_ms"): columns[name] for name in _TIMES})
    work = [sum(max(0.0, columns[name][rank]) for name in _WORK) for rank in range(ranks)]
    slowest = work.index(max(work))
    if ranks > 1 and (others := median(work[:slowest] + work[slowest + 1 :])):
        found |= {"ranks/slowest": float(slowest), "ranks/slowest_factor": work[slowest] / others}
    return found


def engine_metrics(
    engine: deepspeed.DeepSpeedEngine, kept_norm: KeptNorm | None
) -> dict[str, float]:
    """Read the metrics of DeepSpeed's last step."""
    norm = (
        kept_norm.norm if kept_norm is not None and kept_norm.norm is not None else norm_of(engine)
    )
    metrics = {} if norm is None else {"train/grad_norm": float(norm)}
    if engine.fp16_enabled():
        metrics["train/loss_scale"] = float(engine.optimizer.loss_scale)
    return metrics | {"train/skipped_steps": float(engine.skipped_steps)}


def memory_metrics() -> dict[str, float]:
    """Peak memory of this rank so far, in bytes: on the host (resident set) and, where there is
    one, on the device.
    """
    metrics = {
        "memory/host_peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    }
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
        """Every metric over all ranks, and what the task derives from them, under their public
        names. Collective.
        """
        metrics = self.over_ranks()
        metrics = metrics | {
            name: _number(name, value, task=task) for name, value in task.derive(metrics).items()
        }
        return {f"eval/{name}": value for name, value in metrics.items()}

    def over_ranks(self) -> dict[str, float]:
        """Every metric as total / count over all ranks. Collective.

        A task may measure something in some batches only: what one rank has not met counts as
        nothing there, and never as another metric.
        """
        names = sorted(set().union(*gather(sorted(self._sums))))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        sums = torch.stack([self._sums.get(name, nothing) for name in names])
        torch.distributed.all_reduce(sums)
        pairs = zip(names, sums.tolist(), strict=True)
        return {name: total / count if count else float("nan") for name, (total, count) in pairs}


def _number(name: str, value: Any, *, task: Task) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(value, torch.Tensor):
            shape = f"tensor of shape {tuple(value.shape)}"
        else:
            shape = type(value).__name__
        raise ConfigError.of(
            "task-metric-result",
            f"derive() returned a {shape} for the metric {name!r}, not a number",
            "return a float",
            "task",
            type(task).__name__,
        ) from error


def time_layers(
    layers: Sequence[Layer], inputs: Any, *, seed: int, precision: FP32 | FP16 | BF16 | Autocast
) -> list[float]:
    """Median seconds of every layer, one after the other on this rank's device, each built and
    thrown away in turn.

    `inputs` is one micro-batch for the first layer, on the CPU.

    Raises:
        ConfigError: kind ``layer-failed``: what runs where the layers were looked at need not run
            on the device.
    """
    half = HALF.get(precision.dtype)
    if isinstance(precision, Autocast):
        compute = HALF[precision.compute_dtype]
    else:
        compute = None
    batches = DeviceBatches(device(), half)
    value = batches.as_read(batches.move(inputs))
    seconds = []
    tied = dict[str, torch.nn.Module]()
    with torch.random.fork_rng(devices=[] if device().type == "cpu" else [device()]):
        for number, layer in enumerate(layers):
            try:
                module = tied.get(layer.tied) or layer.make_copy(number, seed=seed).to(
                    device(), half
                )
                if layer.tied:
                    tied[layer.tied] = module
                with torch.autocast(device().type, enabled=compute is not None, dtype=compute):
                    times = [_once(layer, module, value) for _ in range(_WARM_UPS + _REPEATS)]
                    with torch.no_grad():
                        value = layer.apply(module, _fresh(value))
            except Exception as error:
                raise ConfigError.of(
                    "layer-failed",
                    f"the layer fails when it is timed on {device()}: {in_one_line(error)}",
                    "mend the layer, or set another parallel.partition than measured",
                    "model",
                    layer.name,
                ) from error
            seconds.append(median(times[_WARM_UPS:]))
    return seconds


def _once(layer: Layer, module: torch.nn.Module, value: Any) -> float:
    fresh = _fresh(value)
    get_accelerator().synchronize()
    begin = time.perf_counter()
    output = layer.apply(module, fresh)
    if isinstance(output, tuple):
        tensors = output
    else:
        tensors = (output,)
    parts = [
        tensor.float().sum()
        for tensor in tensors
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    if parts:
        torch.autograd.backward(parts)
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def _fresh(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_fresh, value))
    # A copy, for a layer that works in place: a leaf that requires a gradient forbids that, and
    # `value` is used again.
    return value.detach().requires_grad_(value.is_floating_point()).clone()
