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
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import prepare

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
    """Measure in the group of all ranks."""
    with process_group(None):
        found = measure()
        if rank() == 0:
            Path(words[0]).write_text(json.dumps(found), encoding="utf-8")
    return 0


def measure() -> dict[str, Any]:
    """Everything, as `Machine.from_measured` reads it, with what it was made of under ``details``.
    Collective.
    """
    of_device = device()
    num_ranks = len(gather(None))
    is_cpu = of_device.type == "cpu"
    steady = _repeated()
    products = {
        name: _products(dtype) for name, dtype in _DTYPES.items() if not (is_cpu and name == "fp16")
    }
    if not is_cpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        products["tf32"] = _products(torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = False
    sizes = [4096, *(_MIB * 4**power for power in range(4 if is_cpu else 6))]
    if num_ranks > 1:
        sums = list(all_reduces(sizes, of_device, seconds=_SECONDS))
    else:
        sums = []
    steps = {stage: _step_overhead(stage) for stage in range(4)}
    memory = _bandwidth()
    steady += _repeated()
    return {
        "is_measured": True,
        "flops_per_second": {name: max(rates.values()) for name, rates in products.items()},
        "memory_bytes_per_second": memory,
        "host_bytes_per_second": memory if is_cpu else _host_bandwidth(),
        "all_reduce_bytes_per_second": max((found["bus"] for found in sums), default=None),
        "all_reduce_latency_seconds": sums[0]["seconds"] if sums else None,
        "per_step_overhead_seconds": steps[0]["seconds"],
        "step_overhead_by_stage": steps,
        # On processors the engine's own work takes the cores that the model computes on, so that
        # nothing hides it.
        "hides_overhead": not is_cpu,
        "spread": max(steady) / min(steady) - 1,
        "details": {
            "products": products,
            "all_reduce": sums,
            "environment": describe_environment(),
        },
    }


def _repeated() -> list[float]:
    """Seconds of the same product, five times over, which differ by what else the machine does.
    Collective.
    """
    left = torch.randn(1024, 1024, device=device())
    return [_slowest(partial(torch.mm, left, left, out=torch.empty_like(left))) for _ in range(5)]


def _products(dtype: torch.dtype) -> dict[int, float]:
    """Size of square matrices -> operations per second."""
    rates: dict[int, float] = {}
    if device().type == "cpu":
        largest = 11
    else:
        largest = 13
    for size in (2**power for power in range(8, largest + 1)):
        left = torch.randn(size, size, device=device(), dtype=dtype)
        seconds = _slowest(partial(torch.mm, left, left, out=torch.empty_like(left)))
        rates[size] = 2 * size**3 / seconds
        if 8 * seconds > _LARGEST:
            break
    return rates


def _bandwidth() -> float:
    """Bytes per second of a sum of two large arrays: two are read, one is written."""
    elements = (64 if device().type == "cpu" else 512) * _MIB // 4
    left, right, out = (torch.zeros(elements, device=device()) for _ in range(3))
    return 3 * 4 * elements / _slowest(partial(torch.add, left, right, out=out))


def _host_bandwidth() -> float:
    """Bytes per second from pinned memory of the host to the device."""
    host = torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device())
    return host.numel() / _slowest(partial(target.copy_, host, non_blocking=True))


def _slowest(operation: Callable[[], object]) -> float:
    """Seconds of one of several operations, on the slowest rank, all at the same time: the best of
    three tries, which other work on the machine has met least. Collective.
    """
    operation()
    once = max(gather(_timed(operation, 1)))
    repeats = int(min(max(_SECONDS / _TRIES / max(once, 1e-7), 1), 1000))
    return float(min(max(gather(_timed(operation, repeats))) for _ in range(_TRIES)))


def _timed(operation: Callable[[], object], repeats: int) -> float:
    barrier()
    return timed(operation, device(), repeats=repeats)


def _step_overhead(stage: int) -> dict[str, float]:
    """Seconds of a step with next to no arithmetic: of any step, of each weight in it, of each
    weight in each further micro-batch, and of each weight that stage 3 gathers and lets go of again
    in a micro-batch. Collective.
    """
    few, more = (_step_seconds(stage, layers=layers) for layers in (_FEW_LAYERS, _MORE_LAYERS))
    further = _step_seconds(stage, layers=_MORE_LAYERS, micro_batches=_MICRO_BATCHES)
    weights = 2 * (_MORE_LAYERS + 1)
    found = {
        "seconds": few,
        "seconds_per_weight": max((more - few) / (2 * (_MORE_LAYERS - _FEW_LAYERS)), 0.0),
        "seconds_per_weight_again": max((further - more) / weights / (_MICRO_BATCHES - 1), 0.0),
    }
    if stage == 3:
        gathering = _step_seconds(stage, layers=_MORE_LAYERS, stage3_param_persistence_threshold=0)
        found["seconds_per_gathered_weight"] = max((gathering - more) / weights, 0.0)
    return found


def _step_seconds(stage: int, *, layers: int, micro_batches: int = 1, **zero: int) -> float:
    """Seconds of an optimizer step of a narrow perceptron, through our engine: the lower
    quartile.
    """
    config = {
        "model": {"kind": "mlp", "image_size": 8, "hidden_sizes": [8] * layers},
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
            return float(max(gather(sorted(times[_STEPS:])[_STEPS // 4])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
