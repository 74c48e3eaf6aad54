"""What the Trainer costs over a bare DeepSpeed loop that does the same maths on the same config and data.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/trainer_tax.py --out
    benchmarks/results/trainer_tax.json

Two engines are built from one DeepSpeed JSON and the same seed, and trained in turn, A B A B, in blocks of steps: A
through `Trainer.fit` with all monitors on, a logged point every 10 steps and an ear for requests to stop, B through the
loop that a user would write, which logs nothing at all; with `--against deaf` B is the Trainer, too, but cannot be
asked to stop. Printed: the ratio of the median block times with the spread of the ratios block by block, and whether
the losses at the logged steps are bit-equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch

from framework.config.load import config_from_values
from framework.engine import random_state
from framework.engine.distributed import barrier, process_group, rank
from framework.engine.environment import describe_environment
from framework.engine.metrics import mean_over_ranks
from framework.engine.plain_engine import build_engine
from framework.engine.stop_agreement import agreed_stops
from framework.setup.assemble import make_monitors, make_schedule
from framework.setup.parts import make_train_loader
from framework.setup.prepared import Prepared, prepare
from framework.system.stopping import StopRequest
from framework.train.monitors.base import Monitor, Point
from framework.train.trainer import Every, Schedule, Trainer

LOG_EVERY = 10


def main() -> None:
    arguments = _arguments()
    prepared = prepare(
        config_from_values(
            {
                "run": {"name": "trainer_tax"},
                "batch": {"micro_size": arguments.micro_size},
                "zero": {"stage": arguments.stage},
                "training": {"max_steps": arguments.steps * (arguments.blocks + 1), "log_every": LOG_EVERY},
                "monitors": {"progress": "off"},
            }
        )
    )
    with process_group(None), tempfile.TemporaryDirectory() as folder:
        with agreed_stops(StopRequest(), start_step=0) as stop:
            against = Bare(prepared) if arguments.against == "bare" else Ours(prepared, Path(folder, "deaf"))
            report = _measure(
                prepared,
                Ours(prepared, Path(folder, "ours"), stop=stop),
                against,
                blocks=arguments.blocks,
                steps=arguments.steps,
                against=arguments.against,
            )
        if rank() == 0:
            print(json.dumps(report, indent=2))
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _measure(
    prepared: Prepared, ours: Ours, other: Ours | Bare, *, blocks: int, steps: int, against: str
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"trainer": [], against: []}
    for block in range(blocks + 1):
        for name, side in (("trainer", ours), (against, other)):
            side.ready(block * steps)
            barrier()
            before = time.perf_counter()
            side.run(block * steps, (block + 1) * steps)
            barrier()
            if block:  # the first one warms up
                times[name].append(time.perf_counter() - before)
    logged = range(LOG_EVERY, (blocks + 1) * steps + 1, LOG_EVERY)
    other_losses = [other.loss(step) for step in logged]
    ratios = [ours / other for ours, other in zip(times["trainer"], times[against], strict=True)]
    environment = describe_environment()
    return {
        "ratio_of_medians": statistics.median(times["trainer"]) / statistics.median(times[against]),
        "block_ratios": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
        "losses_bit_equal": [ours.loss(step) for step in logged] == other_losses,
        "num_losses_compared": len(other_losses),
        "ms_per_step": {name: 1000 * statistics.median(values) / steps for name, values in times.items()},
        "blocks": blocks,
        "steps_per_block": steps,
        "plan": prepared.plan.to_dict()["layout"] | {"zero_stage": prepared.plan.config.zero.stage},
        "versions": environment["versions"],
        "machine": {key: environment[key] for key in ("accelerator", "device", "cpu_count")},
    }


class Ours:
    """The Trainer as `framework.fit` uses it."""

    def __init__(self, prepared: Prepared, folder: Path, *, stop: Callable[[int], str] = lambda step: "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stop = stop
        plan = prepared.plan
        random_state.seed_everything(plan.config.run.seed)
        self._engine = build_engine(
            plan, ds_config=prepared.ds_config, model=prepared.parts.build_model(), task=prepared.parts.task
        )
        self._agenda = make_schedule(plan)
        self._loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank())
        self._config, self._folder = plan.config, folder
        self._monitors: list[Monitor] = []
        self._losses: dict[int, float] = {}

    def loss(self, step: int) -> float:
        """Mean over ranks at a logged step."""
        return self._losses[step]

    def ready(self, start: int) -> None:
        """Open the monitors' files anew: a Trainer closes them at its end."""
        if rank() == 0:
            self._monitors = make_monitors(
                self._config, self._folder, total_steps=self._agenda.total_steps, from_step=start
            )

    def run(self, start: int, end: int) -> None:
        agenda = Schedule(
            end,
            self._agenda.steps_per_epoch,
            self._agenda.samples_per_step,
            log=Every(LOG_EVERY),
            evaluate=Every(),
            save=Every(),
        )
        Trainer(
            self._engine,
            agenda=agenda,
            train_data=self._loader,
            monitors=[*self._monitors, self],
            start_step=start,
            stop=self._stop,
        ).fit()

    name = "benchmark"

    def write(self, point: Point) -> None:
        self._losses[point.step] = point.metrics["train/loss"]

    def close(self) -> None:
        pass


class Bare:
    """The loop of DeepSpeed's own getting-started page."""

    def __init__(self, prepared: Prepared) -> None:
        plan = prepared.plan
        random_state.seed_everything(plan.config.run.seed)
        model = prepared.parts.build_model()
        self._engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=dict(prepared.ds_config), dist_init_required=False
        )
        self._device = self._engine.device
        self._accumulation = plan.layout.accumulation_steps
        self._loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank())
        self._losses: list[torch.Tensor] = []

    def loss(self, step: int) -> float:
        """Mean over ranks. Collective."""
        return mean_over_ranks(self._losses[step - 1])

    def ready(self, start: int) -> None:
        """Nothing to do."""

    def run(self, start: int, end: int) -> None:
        engine, device = self._engine, self._device
        batches: Iterator[Any] = self._loader.stream(start)
        for _ in range(start, end):
            for _ in range(self._accumulation):
                images, labels = next(batches)
                loss = torch.nn.functional.cross_entropy(engine(images.to(device)), labels.to(device))
                engine.backward(loss)
                engine.step()
            self._losses.append(loss.detach())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="timed blocks of each side")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in a block")
    parser.add_argument("--micro_size", type=int, default=64, help="samples per step and rank")
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--against", choices=("bare", "deaf"), default="bare", help="the other side")
    parser.add_argument("--out", help="also write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
