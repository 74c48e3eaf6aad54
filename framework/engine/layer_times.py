"""Times of a model's layers, measured on this rank's device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

from framework.config.precision import BF16, FP16, FP32, Autocast
from framework.engine.distributed import device
from framework.engine.step_batches import HALF, DeviceBatches
from framework.errors import ConfigError, in_one_line
from framework.models.layers import Layer

_WARM_UPS: Final = 2
_REPEATS: Final = 5


def time_layers(
    layers: Sequence[Layer], inputs: Any, *, seed: int, precision: FP32 | FP16 | BF16 | Autocast
) -> list[float]:
    """Return the median seconds of a forward and a backward pass of every layer, measured one after
    the other on this rank's device. Each layer is built and thrown away in turn; tied layers are
    one module, which is kept.

    `inputs` is one micro-batch for the first layer, on the CPU.

    Raises:
        ConfigError: kind ``layer-failed``: a layer fails on this device.
    """
    half = HALF.get(precision.dtype)
    compute = None
    if isinstance(precision, Autocast):
        compute = HALF[precision.compute_dtype]
    batches = DeviceBatches(device(), half)
    value = batches.as_read(batches.move(inputs))
    seconds = []
    tied = dict[str, torch.nn.Module]()
    forked = [] if device().type == "cpu" else [device()]
    with torch.random.fork_rng(devices=forked):
        for number, layer in enumerate(layers):
            try:
                module = tied.get(layer.tied)
                if module is None:
                    module = layer.make_copy(number, seed=seed).to(device(), half)
                if layer.tied:
                    tied[layer.tied] = module
                with torch.autocast(device().type, enabled=compute is not None, dtype=compute):
                    times = [
                        _seconds_of_pass(layer, module, value) for _ in range(_WARM_UPS + _REPEATS)
                    ]
                    with torch.no_grad():
                        value = layer.apply(module, _copy_with_grad(value))
            except Exception as error:
                raise ConfigError.of(
                    "layer-failed",
                    f"the layer fails when it is timed on {device()}: {in_one_line(error)}",
                    "correct the layer, or set another parallel.partition than measured",
                    "model",
                    layer.name,
                ) from error
            seconds.append(median(times[_WARM_UPS:]))
    return seconds


def _seconds_of_pass(layer: Layer, module: torch.nn.Module, value: Any) -> float:
    """Measure a forward and a backward pass."""
    fresh = _copy_with_grad(value)
    get_accelerator().synchronize()
    begin = time.perf_counter()
    output = layer.apply(module, fresh)
    tensors = output if isinstance(output, tuple) else (output,)
    sums = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.requires_grad:
            sums.append(tensor.float().sum())
    if sums:
        torch.autograd.backward(sums)
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def _copy_with_grad(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copy_with_grad, value))
    # A copy, for a layer that works in place: a leaf that requires a gradient forbids that, and
    # `value` is used again.
    return value.detach().requires_grad_(value.is_floating_point()).clone()
