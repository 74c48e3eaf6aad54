"""Time per layer of a model on this device: forward and backward of one micro-batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import torch
from deepspeed.accelerator import get_accelerator

from framework.config.precision import BF16, FP16, FP32, Autocast
from framework.engine.device_batches import HALF, DeviceBatches
from framework.engine.distributed import device
from framework.errors import ConfigError, Problem, in_one_line
from framework.models.layers import Layer

Precision = FP32 | FP16 | BF16 | Autocast

_WARM_UPS: Final = 2
_REPEATS: Final = 5


def time_layers(layers: Sequence[Layer], inputs: Any, *, seed: int, precision: Precision) -> list[float]:
    """Median seconds of every layer, one after the other on this rank's device, each built and thrown away in turn.

    Args:
        layers: the model.
        inputs: one micro-batch for the first layer, on the CPU.
        seed: the model's seed.
        precision: the config's section.

    Raises:
        ConfigError: kind ``layer-failed``: what runs where the layers were looked at need not run on the device.
    """
    half = HALF.get(precision.dtype)
    compute = HALF[precision.compute_dtype] if isinstance(precision, Autocast) else None
    batches = DeviceBatches(device(), half)
    value = batches.as_read(batches.move(inputs))
    seconds, tied = [], dict[str, torch.nn.Module]()
    with torch.random.fork_rng(devices=[] if device().type == "cpu" else [device()]):
        for number, layer in enumerate(layers):
            try:
                module = tied.get(layer.tied) or _module(layer, number, seed=seed, half=half)
                if layer.tied:
                    tied[layer.tied] = module
                with torch.autocast(device().type, enabled=compute is not None, dtype=compute):
                    times = [_once(layer, module, value) for _ in range(_WARM_UPS + _REPEATS)]
                    with torch.no_grad():
                        value = layer.apply(module, _fresh(value))
            except Exception as error:
                raise ConfigError(_failed(layer, error)) from error
            seconds.append(median(times[_WARM_UPS:]))
    return seconds


def _failed(layer: Layer, error: Exception) -> Problem:
    return Problem(
        kind="layer-failed",
        key="model",
        value=layer.name,
        reason=f"the layer fails when it is timed on {device()}: {in_one_line(error)}",
        fix="mend the layer, or set another parallel.partition than measured",
    )


def _module(layer: Layer, number: int, *, seed: int, half: torch.dtype | None) -> torch.nn.Module:
    module = layer.make(number, seed=seed)
    if layer.is_built:
        module = copy.deepcopy(module)  # batch norm would count these passes
    return module.to(device(), half)


def _once(layer: Layer, module: torch.nn.Module, value: Any) -> float:
    fresh = _fresh(value)
    get_accelerator().synchronize()
    begin = time.perf_counter()
    output = layer.apply(module, fresh)
    tensors = output if isinstance(output, tuple) else (output,)
    parts = [tensor.float().sum() for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]
    if parts:
        torch.autograd.backward(parts)
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def _fresh(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_fresh, value))
    # A copy, for a layer that works in place: a leaf that requires a gradient forbids that, and `value` is used again.
    return value.detach().requires_grad_(value.is_floating_point()).clone()
