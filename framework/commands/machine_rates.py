"""Rates of this machine: a job of as many ranks as a run has, started by ``plan --measure``; about
half a minute.

    torchrun --nproc-per-node 2 -m framework.commands.machine_rates OUT

All ranks measure at the same time, as they compute in a step, and the slowest counts. Rank 0 writes
one JSON file, in units of seconds, bytes and floating-point operations; a multiplication with an
addition is two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from framework.config.load import config_from_values
from framework.engine.distributed import (
    barrier,
    describe_environment,
    device,
    gather,
    process_group,
    rank,
)
from framework.engine.link_bench import all_reduces, timed
from framework.engine.plain_engine import arithmetic_of, build_engine
from framework.engine.random_state import seed_everything
from framework.engine.workarounds.left_by_stage_3 import leaving_nothing
from framework.errors import FrameworkError
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import prepare
from framework.system.parent_watch import record_failure

_MIB: Final = 2**20
_SECONDS: Final = 0.25  # about so long for each figure
_LARGEST: Final = 1.0  # seconds of one operation beyond which no larger one is tried
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TRIES: Final = 3
_STEPS: Final = 20
_FEW_LAYERS = 1
_MORE_LAYERS = 9
_MICRO_BATCHES = 5


def main(words: list[str]) -> int:
    """Measure in the group of all ranks; rank 0 writes the rates to the path `words[0]`.
    Collective.
    """
    try:
        with process_group(None):
            rates = measure()
            if rank() == 0:
                Path(words[0]).write_text(json.dumps(rates), encoding="utf-8")
    except FrameworkError as error:
        record_failure(str(error))
        raise
    return 0


def _all_reduce_rates(of_device: torch.device, num_ranks: int) -> list[dict[str, Any]]:
    """Measure all-reduces of several sizes, the smallest first; none on one rank. Collective."""
    if num_ranks == 1:
        return []
    if of_device.type == "cpu":
        num_sizes = 4
    else:
        num_sizes = 6
    sizes = [4096] + [_MIB * 4**power for power in range(num_sizes)]
    return list(all_reduces(sizes, of_device, seconds=_SECONDS))


def measure() -> dict[str, Any]:
    """Return all rates, as `Machine.from_measured` reads them, with the measurements under
    ``details``. Collective.
    """
    of_device = device()
    num_ranks = len(gather(None))
    is_cpu = of_device.type == "cpu"
    repetitions = _repeat_product()
    products = _products_by_dtype(is_cpu=is_cpu)
    sums = _all_reduce_rates(of_device, num_ranks)
    bus_rate = None
    latency = None
    if sums:
        bus_rate = max(measured["bus"] for measured in sums)
        latency = sums[0]["seconds"]
    steps = {stage: _step_overhead(stage) for stage in range(4)}
    memory_rate = _bandwidth()
    repetitions += _repeat_product()
    host_rate = memory_rate
    if not is_cpu:
        host_rate = _host_bandwidth()
    return {
        "is_measured": True,
        "flops_per_second": {name: max(rates.values()) for name, rates in products.items()},
        "memory_bytes_per_second": memory_rate,
        "host_bytes_per_second": host_rate,
        "all_reduce_bytes_per_second": bus_rate,
        "all_reduce_latency_seconds": latency,
        "per_step_overhead_seconds": steps[0]["seconds"],
        "step_overhead_by_stage": steps,
        # On processors the engine's own work takes the cores that the model computes on, so that
        # nothing hides it.
        "hides_overhead": not is_cpu,
        "spread": max(repetitions) / min(repetitions) - 1,
        "details": {
            "products": products,
            "all_reduce": sums,
            "environment": describe_environment(),
        },
    }


def _products_by_dtype(*, is_cpu: bool) -> dict[str, dict[int, float]]:
    """Return name of a type -> size of square matrices -> operations per second. Collective."""
    rates = {}
    for name, dtype in _DTYPES.items():
        if not (is_cpu and name == "fp16"):
            rates[name] = _product_rates(dtype)
    if not is_cpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        rates["tf32"] = _product_rates(torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = False
    return rates


def _repeat_product() -> list[float]:
    """Return seconds of the same product, five times: they differ by other work on the machine.
    Collective.
    """
    left = torch.randn(1024, 1024, device=device())
    return [_slowest(partial(torch.mm, left, left, out=torch.empty_like(left))) for _ in range(5)]


def _product_rates(dtype: torch.dtype) -> dict[int, float]:
    """Return size of square matrices -> operations per second. Collective."""
    rates: dict[int, float] = {}
    if device().type == "cpu":
        largest_power = 11
    else:
        largest_power = 13
    for power in range(8, largest_power + 1):
        size = 2**power
        left = torch.randn(size, size, device=device(), dtype=dtype)
        seconds = _slowest(partial(torch.mm, left, left, out=torch.empty_like(left)))
        rates[size] = 2 * size**3 / seconds
        if 8 * seconds > _LARGEST:  # the next size takes 2^3 times as long
            break
    return rates


def _bandwidth() -> float:
    """Return bytes per second of a sum of two large arrays: two are read, one is written.
    Collective.
    """
    if device().type == "cpu":
        num_mib = 64
    else:
        num_mib = 512
    num_elements = num_mib * _MIB // 4
    left = torch.zeros(num_elements, device=device())
    right = torch.zeros_like(left)
    out = torch.zeros_like(left)
    return 3 * 4 * num_elements / _slowest(partial(torch.add, left, right, out=out))


def _host_bandwidth() -> float:
    """Return bytes per second from pinned memory of the host to the device. Collective."""
    host = torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device())
    return host.numel() / _slowest(partial(target.copy_, host, non_blocking=True))


def _slowest(operation: Callable[[], object]) -> float:
    """Return seconds of an operation on the slowest rank, all ranks at the same time. The best of
    three tries: other work on the machine has met it least. Collective.
    """
    operation()
    seconds_of_one = max(gather(_timed(operation, 1)))
    repeats = int(min(max(_SECONDS / _TRIES / max(seconds_of_one, 1e-7), 1), 1000))
    return float(min(max(gather(_timed(operation, repeats))) for _ in range(_TRIES)))


def _timed(operation: Callable[[], object], repeats: int) -> float:
    """Return seconds of one of `repeats` operations, once all ranks are ready. Collective."""
    barrier()
    return timed(operation, device(), repeats=repeats)


def _step_overhead(stage: int) -> dict[str, float]:
    """Return seconds of a step with next to no arithmetic: of any step, of each weight in it, of
    each weight in each further micro-batch, and of each weight that stage 3 gathers and releases in
    a micro-batch. Collective.
    """
    few = _step_seconds(stage, layers=_FEW_LAYERS)
    more = _step_seconds(stage, layers=_MORE_LAYERS)
    further = _step_seconds(stage, layers=_MORE_LAYERS, micro_batches=_MICRO_BATCHES)
    # each hidden layer and the last one have a matrix and a bias
    num_weights = 2 * (_MORE_LAYERS + 1)
    num_more_weights = 2 * (_MORE_LAYERS - _FEW_LAYERS)
    overhead = {
        "seconds": few,
        "seconds_per_weight": max((more - few) / num_more_weights, 0.0),
        "seconds_per_weight_again": max((further - more) / num_weights / (_MICRO_BATCHES - 1), 0.0),
    }
    if stage == 3:
        gathering = _step_seconds(stage, layers=_MORE_LAYERS, stage3_param_persistence_threshold=0)
        overhead["seconds_per_gathered_weight"] = max((gathering - more) / num_weights, 0.0)
    return overhead


def _step_seconds(stage: int, *, layers: int, micro_batches: int = 1, **zero: int) -> float:
    """Return seconds of an optimizer step of a narrow perceptron, through our engine: the lower
    quartile. `zero`: further keys of the section. Collective.
    """
    hidden_sizes = [8 for _ in range(layers)]
    config = {
        "model": {"kind": "mlp", "image_size": 8, "hidden_sizes": hidden_sizes},
        "data": {"kind": "digits", "image_size": 8, "num_workers": 0},
        "batch": {"micro_size": 1, "accumulation_steps": micro_batches},
        "zero": {"stage": stage, "reduce_bucket_size": 100_000, **zero},
        "training": {"max_steps": 2 * _STEPS},
    }
    prepared = prepare(config_from_values(config))
    seed_everything(0)
    with arithmetic_of(prepared.plan), leaving_nothing(stage):
        model = prepared.parts.build_model()
        built = build_engine(
            prepared.plan, ds_config=prepared.ds_config, model=model, task=prepared.parts.task
        )
        with closing(built) as engine:
            batches = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank()).stream(0)
            times = [_timed(partial(engine.train_step, batches), 1) for _ in range(2 * _STEPS)]
            steady_times = sorted(times[_STEPS:])
            return float(max(gather(steady_times[_STEPS // 4])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
