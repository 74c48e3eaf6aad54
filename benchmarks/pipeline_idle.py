"""How long a pipeline stage waits: measured on two CPU processes, held against (p - 1) / (m + p -
1).

    python -m benchmarks.pipeline_idle [--repeats 5] [--forward_ms 50 200 400] [--out
    benchmarks/results/pipeline_idle.json]

Takes about seven minutes. The layers of the model sleep: so long in forward, twice as long in
backward, in every stage alike. Two sleeping processes never wait for a core, so what is left over
is the schedule and what DeepSpeed and our engine add to it. The steps are those of our
`PipelineEngine`; only `train_step` is timed. For every number of micro-batches (4, 8, 16) an engine
stands ready, and they take turns.

The idle share of a step is 1 - (seconds that the stage slept on purpose) / (seconds of the step),
the mean of both stages. "On purpose" is what the layers were told to sleep: if a sleep takes
longer, that counts as idle. What a step costs beyond the schedule is told in milliseconds per
micro-batch, for layers of several lengths: it bounds the ratio for layers of any length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.records import RESULTS, launch, load_average, machine, write
from framework.config.load import config_from_values
from framework.engine.distributed import barrier, process_group, rank
from framework.engine.pipeline_engine import PipelineEngine, build_pipeline
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import Prepared, prepare
from framework.setup.user_code import Objects

NUM_STAGES = 2
LAYERS_PER_STAGE = 2
WIDTH = 8
MICRO_BATCHES = (4, 8, 16)
TARGET_RATIO = 1.15


def theory(num_micro_batches: int, num_stages: int = NUM_STAGES) -> float:
    """Return the idle share of a 1F1B step with equally long stages (Narayanan et al. 2021, section
    2.2).
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def idle_share(step_seconds: float, work_seconds: float) -> float:
    """Return the share of the step in which a stage did not work."""
    return 1 - work_seconds / step_seconds


def summary(
    rows: Sequence[Mapping[str, float]], *, num_micro_batches: int, forward_seconds: float
) -> dict[str, Any]:
    """Summarize the steps of all repeats.

    A row has the `step_seconds`, and the `slept_seconds` of both stages by the clock.
    """
    work_seconds = num_micro_batches * 3 * forward_seconds
    step_seconds = [row["step_seconds"] for row in rows]
    median_seconds = statistics.median(step_seconds)
    shares = sorted(idle_share(seconds, work_seconds) for seconds in step_seconds)
    expected = theory(num_micro_batches)
    median = statistics.median(shares)
    measured_shares = [idle_share(row["step_seconds"], row["slept_seconds"]) for row in rows]
    measured_median = statistics.median(measured_shares)
    slots = num_micro_batches + NUM_STAGES - 1
    added_ms = 1000 * (median_seconds - slots * 3 * forward_seconds) / slots
    return {
        "num_micro_batches": num_micro_batches,
        "steps": len(rows),
        "theory": round(expected, 4),
        "idle": round(median, 4),
        "idle_lowest": round(shares[0], 4),
        "idle_highest": round(shares[-1], 4),
        "ratio": round(median / expected, 3),
        "ratio_by_measured_sleep": round(measured_median / expected, 3),
        "step_seconds": round(median_seconds, 4),
        "added_ms_per_micro_batch": round(added_ms, 2),
    }


class _Nap(torch.autograd.Function):
    """The product of two tensors, with a sleep in forward and one of twice the length in
    backward.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.seconds = seconds
        _sleep(seconds)
        return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        value, weight = ctx.saved_tensors
        _sleep(2 * ctx.seconds)
        return gradients[0] * weight, (gradients[0] * value).sum(0), None


class Sleeper(nn.Module):
    """A layer that sleeps."""

    slept_seconds = 0.0  # by the clock, of all layers of this process

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = _Nap.apply(value, self.weight, self.seconds)
        return output


def _sleep(seconds: float) -> None:
    before = time.perf_counter()
    time.sleep(seconds)
    Sleeper.slept_seconds += time.perf_counter() - before


class Side:
    """An engine for one number of micro-batches, and its data."""

    def __init__(self, prepared: Prepared) -> None:
        plan = prepared.plan
        cut = prepared.cut
        assert cut is not None
        self.engine: PipelineEngine = build_pipeline(
            plan,
            ds_config=prepared.ds_config,
            layers=cut.layers,
            bounds=cut.table.bounds,
            task=prepared.parts.task,
        )
        self.batches = make_train_loader(plan, prepared.parts.splits, rank=rank()).stream(0)

    def step(self) -> dict[str, float]:
        """Take one training step, started by all ranks together."""
        barrier()
        Sleeper.slept_seconds = 0.0
        before = time.perf_counter()
        self.engine.train_step(self.batches)
        return {
            "step_seconds": time.perf_counter() - before,
            "slept_seconds": Sleeper.slept_seconds,
        }


def prepared_for(num_micro_batches: int, *, forward_seconds: float, max_steps: int) -> Prepared:
    """Prepare a run of sleeping layers, as `framework.fit` would."""
    samples = torch.zeros(num_micro_batches, WIDTH)
    config = config_from_values(
        {
            "run": {"name": "pipeline_idle"},
            "batch": {"micro_size": 1, "accumulation_steps": num_micro_batches},
            "parallel": {"pipe": NUM_STAGES, "partition": "uniform"},
            "optimizer": {"kind": "sgd", "lr": 0.0},
            "training": {"max_steps": max_steps},
            "monitors": {"tensorboard": False},
        }
    )
    seconds = forward_seconds / LAYERS_PER_STAGE
    model = nn.Sequential(*[Sleeper(seconds) for _ in range(NUM_STAGES * LAYERS_PER_STAGE)])
    data = TensorDataset(samples, samples)
    return prepare(config, objects=Objects(model, data, None, nn.functional.mse_loss))


def measure(forward_ms: float, repeats: int, folder: Path) -> None:
    """Measure on this rank, and write its rows by number of micro-batches."""
    sides = {
        count: Side(prepared_for(count, forward_seconds=forward_ms / 1000, max_steps=repeats + 1))
        for count in MICRO_BATCHES
    }
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in MICRO_BATCHES}
    for repeat in range(repeats + 1):
        for count, side in sides.items():
            row = side.step()
            if repeat:  # the first one agrees on shapes and opens connections
                rows[count].append(row)
    (folder / f"{rank()}.json").write_text(json.dumps(rows), encoding="utf-8")


def run_job(forward_ms: float, repeats: int) -> list[dict[str, Any]]:
    """Run two processes; return a summary of their rows for each number of micro-batches."""
    with tempfile.TemporaryDirectory() as name:
        launch(
            "-m",
            "benchmarks.pipeline_idle",
            "--rank_writes_to",
            name,
            "--forward_ms",
            str(forward_ms),
            "--repeats",
            str(repeats),
            num_ranks=NUM_STAGES,
            timeout_seconds=600,
        )
        rows_by_rank = [
            json.loads((Path(name) / f"{number}.json").read_text(encoding="utf-8"))
            for number in range(NUM_STAGES)
        ]
    summaries = []
    for count in MICRO_BATCHES:
        rows = []
        for rows_of_step in zip(*(by_count[str(count)] for by_count in rows_by_rank), strict=True):
            rows.append(_mean_row(rows_of_step))
        seconds = forward_ms / 1000
        summaries.append(summary(rows, num_micro_batches=count, forward_seconds=seconds))
    return summaries


def _mean_row(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0]}


def table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as text for the terminal."""
    lines = ["forward ms  m   theory  idle    lowest  highest  ratio  added ms per micro-batch"]
    for job in jobs:
        for row in job["rows"]:
            lines.append(
                f"{job['forward_ms']:>10g} {row['num_micro_batches']:>2}   {row['theory']:.2%} "
                f"{row['idle']:>7.2%} {row['idle_lowest']:>7.2%} {row['idle_highest']:>7.2%}  "
                f"{row['ratio']:>5.3f}  {row['added_ms_per_micro_batch']:.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the results; or be one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--forward_ms",
        type=float,
        nargs="+",
        default=[50.0, 200.0, 400.0],
        help="of one stage and micro-batch",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline_idle.json", metavar="FILE")
    parser.add_argument("--rank_writes_to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_writes_to is not None:
        with process_group(None):
            measure(arguments.forward_ms[0], arguments.repeats, arguments.rank_writes_to)
        return
    load_before = load_average()
    jobs: list[dict[str, Any]] = []
    for forward_ms in arguments.forward_ms:
        load_at_start = load_average()
        rows = run_job(forward_ms, arguments.repeats)
        loads = [load_at_start, load_average()]
        jobs.append({"forward_ms": forward_ms, "load_average": loads, "rows": rows})
    print(table(jobs))
    write(
        {
            "machine": machine(),
            "load_average_before": load_before,
            "load_average_after": load_average(),
            "stages": NUM_STAGES,
            "repeats": arguments.repeats,
            "niceness": os.nice(0),
            "target_ratio": TARGET_RATIO,
            "jobs": jobs,
            "reached": all(row["ratio"] <= TARGET_RATIO for row in jobs[-1]["rows"]),
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
