"""What the Trainer costs over loops that do the same maths: plain DDP, Accelerate, Hugging Face's
Trainer, DeepSpeed.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.trainer_tax --stage 1
    torchrun --standalone --nproc-per-node 1 -m benchmarks.trainer_tax --model small_resnet18  # GPU

All sides are built from the same seed and train one model (LeNet) on the same images, a
`TensorDataset` as a user would bring, in turn, A B C A B C, in blocks of steps: `trainer` through
`Trainer.fit` with all monitors on, a logged point every 10 steps and an ear for requests to stop;
`ddp` and `accelerate` through the loop that a user would write, with torch's `DataLoader` and
clipping, which logs nothing at all; `bare` through such a loop around DeepSpeed's engine at the
same ZeRO stage, with our batches; `hf` through Hugging Face's Trainer, which logs every 10 steps;
`deaf` is the Trainer that cannot be asked to stop. Printed: the ratio of the median block times to
each, with the spread block by block; the same of the processor time that the training thread takes
for a step, which other work on the machine does not lengthen and in which no waiting counts; and
how far the losses of `trainer` and `bare` differ, which read the same batches: one divides a sum by
its count and clips with other kernels, so in the last bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import TensorDataset

from benchmarks.loops.setting import LOG_EVERY, Setting
from benchmarks.loops.sides import SIDES, Ours, Side
from benchmarks.records import load_average
from framework.config.load import config_from_values
from framework.engine.distributed import barrier, describe_environment, process_group, rank
from framework.engine.plain_engine import arithmetic_of
from framework.engine.stop_agreement import agreed_stops
from framework.recipes.image_sets.digits import build
from framework.setup.prepare_run import Prepared, prepare
from framework.system.stopping import StopRequest

# Names in the report, and of the loops.
_SIDES: Final = {
    "bare": "bare",
    "ddp": "plain",
    "accelerate": "accelerate",
    "hf": "hf",
    "deaf": "ours",
}


def main() -> None:
    arguments = _arguments()
    config = {
        "run": {"name": "trainer_tax"},
        "data": {"target": "benchmarks.trainer_tax:images"},
        "model": {"kind": arguments.model},
        "batch": {"micro_size": arguments.micro_size},
        "zero": {"stage": arguments.stage},
        "training": {
            "max_steps": arguments.steps * (arguments.blocks + 1),
            "log_every": LOG_EVERY,
            "deterministic": arguments.deterministic,
        },
        "monitors": {"progress": "off"},
    }
    prepared = prepare(config_from_values(config))
    with ExitStack() as context:
        context.enter_context(process_group(None))
        context.enter_context(arithmetic_of(prepared.plan))
        folder = context.enter_context(tempfile.TemporaryDirectory())
        with agreed_stops(StopRequest(), start_step=0) as stop:
            setting = Setting(prepared, Path(folder))
            sides: dict[str, Side] = {"trainer": Ours(replace(setting, stop=stop))}
            for name in arguments.against:
                sides[name] = SIDES[_SIDES[name]](setting)
            report = _measure(prepared, sides, blocks=arguments.blocks, steps=arguments.steps)
        if rank() == 0:
            text = json.dumps(report, indent=2)
            print(text)
            if arguments.out:
                Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def images() -> TensorDataset:
    """Return the digits as two tensors."""
    train = build(28).train
    samples = [train[index] for index in range(len(train))]
    return TensorDataset(
        torch.stack([image for image, _ in samples]),
        torch.tensor([int(label) for _, label in samples]),
    )


@dataclass
class Times:
    """Seconds of a side's blocks, and of the steps in them by the processor time of their thread."""

    blocks: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def _measure(
    prepared: Prepared, sides: Mapping[str, Side], *, blocks: int, steps: int
) -> dict[str, Any]:
    """Let the sides run in turn, block by block; return the report of `main`."""
    times = {name: Times() for name in sides}
    load_before = load_average()
    for block in range(blocks + 1):
        for name, side in sides.items():
            side.ready(block * steps)
            _settle()
            before = time.perf_counter()
            side.run(block * steps, (block + 1) * steps)
            _settle()
            seconds = time.perf_counter() - max(before, side.began)
            _, of_thread = side.pace.take()
            if block:  # the first one warms up
                times[name].blocks.append(seconds)
                times[name].processor.append(of_thread)
    ours = times["trainer"]
    others = {name: of for name, of in times.items() if name != "trainer"}
    medians = {name: statistics.median(of.blocks) for name, of in times.items()}
    processor = {name: statistics.median(of.processor) for name, of in times.items()}
    environment = describe_environment()
    report: dict[str, Any] = {
        "ratio_of_medians": {name: medians["trainer"] / medians[name] for name in others},
        "block_ratios": {name: _ratios(ours.blocks, of.blocks) for name, of in others.items()},
        "processor_ratio_of_medians": {
            name: processor["trainer"] / processor[name] for name in others
        },
        "processor_block_ratios": {
            name: _ratios(ours.processor, of.processor) for name, of in others.items()
        },
        "model": getattr(prepared.plan.config.model, "kind", ""),
        "ms_per_step": {name: 1000 * median / steps for name, median in medians.items()},
        "processor_ms_per_step": {name: 1000 * median for name, median in processor.items()},
        "blocks": blocks,
        "steps_per_block": steps,
        "plan": prepared.plan.to_dict()["layout"] | {"zero_stage": prepared.plan.config.zero.stage},
        "versions": environment["versions"],
        "machine": {key: environment[key] for key in ("accelerator", "device", "cpu_count")},
        "load": [load_before, load_average()],
    }
    if "bare" in sides:
        report |= _differences(sides, (blocks + 1) * steps)
    return report


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of blocks that ran one after the other, smallest first."""
    return sorted(one / other for one, other in zip(ours, others, strict=True))


def _differences(sides: Mapping[str, Side], num_steps: int) -> dict[str, float]:
    """Return how far the losses of the trainer and the bare loop differ, which read the same
    batches.
    """
    logged_steps = range(LOG_EVERY, num_steps + 1, LOG_EVERY)
    trainer_losses = [sides["trainer"].loss(step) for step in logged_steps]
    bare_losses = [sides["bare"].loss(step) for step in logged_steps]
    pairs = zip(trainer_losses, bare_losses, strict=True)
    return {
        "largest_difference_of_losses": max(abs(ours - other) for ours, other in pairs),
        "num_losses_compared": len(logged_steps),
    }


def _settle() -> None:
    """Wait for the queued work of the device, and for all ranks."""
    get_accelerator().synchronize()
    barrier()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=5, help="timed blocks of each side")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in a block")
    parser.add_argument("--micro_size", type=int, default=64, help="samples per step and rank")
    parser.add_argument("--model", default="lenet", help="kind of model, for images of 28 x 28")
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits in every run, on all sides"
    )
    parser.add_argument(
        "--against", nargs="+", choices=_SIDES, default=list(_SIDES)[:-1], help="the other sides"
    )
    parser.add_argument("--out", help="also write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
