"""Measures how many samples a second the loader alone delivers, of every shipped run config, and
compares that with what the model takes: a step on this machine's processor, where the model is small,
and by the planner's estimate a step on a device.

    OMP_NUM_THREADS=1 python -m benchmarks.loader_rate [--device h200-141gb] [--out FILE] [CONFIG ...]

The loader runs in one process, without workers, as `data.num_workers: 0` has it: each worker would
add as much again. For a device, images of our sets stay uint8 (`loader_for_device`). Times are processor
seconds, which other work on the machine hardly changes. Data that is not here is written: images of
noise in torchvision's files; text is Python's own sources.

A device waits for Python at small models, which the estimate does not know: `least_step_ms` of the results is
the shortest step that was measured on the device, and stands where the estimate is less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.records import RESULTS, ROOT, load_average, machine, write
from framework.commands.traced_work import find_own_work
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.data.batches import in_pixels
from framework.data.splits import Splits
from framework.load_run import load_run
from framework.plan.cluster import Cluster
from framework.plan.devices import Machine
from framework.plan.plan import Plan, make_plan
from framework.plan.time import estimate_time
from framework.plan.work import ModelWork, work_of
from framework.setup.components import gather_parts, make_train_loader
from framework.setup.user_code import Objects

TARGET: Final = 5.0
_SECONDS: Final = 0.5  # of each measurement, of which there are three
_LARGEST_ON_CPU: Final = 3_000_000  # weights
# LeNet on one H200 (Accelerate, benchmarks/results/trainer_tax_h200.json): none that was measured is
# shorter.
_LEAST_STEP_SECONDS: Final = 3.4e-3


def write_fashion_mnist(root: Path) -> None:
    """Write Fashion-MNIST's files with images of noise: their loader reads no less of them."""
    folder = root / "FashionMNIST/raw"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        header = np.array([0x803, count, 28, 28], dtype=">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([0x801, count], dtype=">i4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def config_here(path: Path, root: Path) -> RunConfig:
    """Return a shipped config for one device, with data that is here."""
    settings = ["checkpoint.resume=never"]
    values = load_run(str(path), settings).config.model_dump(exclude_unset=True)
    data = values["data"]
    if data.get("root"):
        data["root"] = str(root)
    if data.get("path"):
        del data["path"]
    values.pop("parallel", None)
    precision = values.get("precision", {})
    precision.pop("fp8", None)  # neither it nor fp16 is on processors
    if precision.get("dtype") == "fp16":
        values["precision"] = {"dtype": "bf16"}
    return config_from_values(values)


def samples_per_second(take: Callable[[], int]) -> float:
    """Return the samples of a processor second: the median of three measurements. `take` returns
    how many it has taken.
    """
    take()
    rates = []
    for _ in range(3):
        samples = 0
        begin = time.process_time()
        while time.process_time() - begin < _SECONDS:
            samples += take()
        rates.append(samples / (time.process_time() - begin))
    return sorted(rates)[1]


def loader_rate(plan: Plan, splits: Splits) -> float:
    """Return the samples a second of the run's own loader, in this process."""
    batches = make_train_loader(plan, splits, rank=0, num_workers=0).stream(0)

    def take() -> int:
        next(batches)
        return plan.layout.micro_size

    try:
        return samples_per_second(take)
    finally:
        batches.close()


def loss_of(task: Any, outputs: Any, targets: Any) -> torch.Tensor:
    """Return a loss of as much work as the task's: the sum of its parts."""
    loss = task.loss(outputs, targets)
    parts = loss if isinstance(loss, tuple) else (loss,)
    totals: list[Any] = [getattr(part, "total", part) for part in parts]
    return torch.stack(totals).sum()


def step_rate(plan: Plan, parts: Any) -> float:
    """Return the samples a second of forward and backward passes on this processor, which a step with
    its optimizer takes longer for.
    """
    model = parts.build_model()
    batches = make_train_loader(plan, parts.splits, rank=0, num_workers=0).stream(0)
    task = parts.task
    inputs, targets = task.split(task.on_host(next(batches)))
    batches.close()

    def take() -> int:
        model.zero_grad(set_to_none=True)
        loss = loss_of(task, task.forward(model, inputs), targets)
        torch.autograd.backward(loss)
        return plan.layout.micro_size

    return samples_per_second(take)


def device_rate(plan: Plan, work: ModelWork, device: str) -> float:
    """Return the samples a second of a step on one device, by the planner's estimate."""
    estimate = estimate_time(plan, work, Machine.listed(device, devices_per_host=1))
    seconds = max(estimate.total, _LEAST_STEP_SECONDS)
    return plan.layout.global_size / seconds


def row_of(path: Path, root: Path, device: str) -> dict[str, Any]:
    """Measure one config."""
    config = config_here(path, root)
    plan = make_plan(config, Cluster(devices_per_host=1, device="cpu"))
    parts = gather_parts(config, Objects())
    row: dict[str, Any] = {"micro_size": plan.layout.micro_size}
    row["loader"] = round(loader_rate(plan, parts.splits))
    for_device = in_pixels(parts.splits.train)
    row["loader_for_device"] = row["loader"]
    if for_device is not parts.splits.train:
        row["loader_for_device"] = round(loader_rate(plan, replace(parts.splits, train=for_device)))
    on_cuda = make_plan(config, Cluster(devices_per_host=1, device="cuda"))
    work = work_of(on_cuda) or find_own_work(on_cuda)
    assert work is not None, "models of shipped configs have their work"
    if work.num_params <= _LARGEST_ON_CPU:
        here = step_rate(plan, parts)
        row["step_here"] = round(here, 1)
        row["times_step_here"] = round(row["loader"] / here, 1)
    on_device = device_rate(on_cuda, work, device)
    row["step_on_device"] = round(on_device)
    row["times_step_on_device"] = round(row["loader_for_device"] / on_device, 1)
    return row


def distinct(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the configs of which no earlier one has the same model, data and batch."""
    seen = set()
    for path in paths:
        config = load_run(str(path), []).config
        sections = (config.model, config.data, config.batch, config.precision)
        key = repr([section.model_dump() for section in sections])
        if key not in seen:
            seen.add(key)
            yield path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "configs", nargs="*", type=Path, help="run configs, other rows stay; left out: all shipped"
    )
    parser.add_argument("--device", default="h200-141gb", help="as `plan --gpu` takes it")
    parser.add_argument("--out", type=Path, default=RESULTS / "loader_rate.json")
    arguments = parser.parse_args(argv)
    paths = arguments.configs or sorted((ROOT / "ds_configs").glob("*.yaml"))
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    if arguments.configs and arguments.out.exists():
        rows = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_fashion_mnist(root)
        for path in distinct(paths):
            rows[path.name] = row_of(path, root, arguments.device)
            print(path.name, json.dumps(rows[path.name]), flush=True)
    values = {
        "machine": machine(),
        "load_average": load_average(),
        "device": arguments.device,
        "least_step_ms": 1000 * _LEAST_STEP_SECONDS,
        "rows": dict(sorted(rows.items())),
    }
    write(values, arguments.out)
    slow = [name for name, row in rows.items() if row["times_step_on_device"] < TARGET]
    print(f"less than {TARGET:g} times what the device takes: {', '.join(slow) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
