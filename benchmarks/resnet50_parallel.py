"""ResNet-50 on one device, cut in two, pipelined with several split sizes, and data parallel: seconds per step.

    python -m benchmarks.resnet50_parallel [--repeats 3] [--steps 3] [--out benchmarks/results/resnet50_parallel.json]

Takes about six minutes and draws a bar chart beside the results (needs matplotlib: pip install -e '.[bench]'). A device
is one CPU process of one thread. Every case is the same run config with other settings, trained by train.py under
torchrun: torchvision's ResNet-50, random images, the same global batch, SGD. The cases are launched one after the
other, all of them again for each repeat, so that a machine that is slower for a while is slower for all.

A repeat's figure is the median of its steps without the first, as the run's own metrics.jsonl tells them
(`time/step_ms`); the bar is the median of the repeats, its error bar reaches from the fastest to the slowest repeat.
"Cut in two" with one micro-batch is naive model parallelism: one device always waits. The cut is by measured seconds
per layer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, launch, load_average, machine, read_metrics, spread, write

GLOBAL_SIZE, IMAGE_SIZE, TIMEOUT_SECONDS = 16, 64, 600
SETTINGS = (
    f"batch.global_size={GLOBAL_SIZE}",
    f"data.image_size={IMAGE_SIZE}",
    "data.num_samples=1600",
    "precision={dtype: fp32}",
    "optimizer.lr=0.01",
    "training.log_every=1",
    "monitors.tensorboard=false",
    "monitors.csv=false",
    "monitors.progress=off",
)


@dataclass(frozen=True)
class Case:
    """One bar."""

    name: str
    label: str
    num_ranks: int
    micro_size: int
    pipe: int = 1

    @property
    def micro_batches(self) -> int:
        """Of a step, on one device."""
        return GLOBAL_SIZE * self.pipe // (self.micro_size * self.num_ranks)

    def settings(self) -> list[str]:
        cut = [f"parallel.pipe={self.pipe}", "parallel.partition=measured"] if self.pipe > 1 else []
        return [f"batch.micro_size={self.micro_size}", *cut]


def _pipelined(micro_size: int) -> Case:
    return Case(f"pipeline_split_{micro_size}", f"pipelined,\nsplits of {micro_size}", 2, micro_size, pipe=2)


CASES = (
    Case("single_device", "one device", 1, GLOBAL_SIZE),
    Case("cut_in_two", "cut in two,\nno splits", 2, GLOBAL_SIZE, pipe=2),
    *(_pipelined(size) for size in (8, 4, 2)),
    Case("data_parallel", "two devices,\ndata parallel", 2, GLOBAL_SIZE // 2),
)


def step_seconds(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Of all steps but the first, which opens connections and allocates."""
    return [row["time/step_ms"] / 1000 for row in rows if row["step"] > 1 and "time/step_ms" in row]


def run_case(case: Case, *, steps: int) -> dict[str, float]:
    """One launch: its median step, and the machine's load when it began."""
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        launch(
            "train.py",
            "--config",
            "ds_configs/resnet50_synthetic.yaml",
            *SETTINGS,
            *case.settings(),
            f"training.max_steps={steps + 1}",
            f"run.name={case.name}",
            f"run.output_dir={folder}",
            num_ranks=case.num_ranks,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        seconds = step_seconds(read_metrics(Path(folder) / case.name))
    return {"step_seconds": statistics.median(seconds), "load_average": load}


def summary(case: Case, runs: Sequence[Mapping[str, float]], *, single_device_seconds: float) -> dict[str, Any]:
    """Of all repeats of a case."""
    seconds = [run["step_seconds"] for run in runs]
    return {
        "name": case.name,
        "devices": case.num_ranks,
        "stages": case.pipe,
        "micro_size": case.micro_size,
        "micro_batches": case.micro_batches,
        "step_seconds": spread(seconds),
        "speed_up": round(single_device_seconds / statistics.median(seconds), 3),
        "repeats": [{name: round(value, 4) for name, value in run.items()} for run in runs],
    }


def draw(found: Mapping[str, Any], path: Path) -> None:
    """The bar chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.8), layout="constrained")
    labels = {case.name: case.label for case in CASES}
    colours = {
        "one device": "tab:gray",
        "cut in two,\nno splits": "tab:red",
        "two devices,\ndata parallel": "tab:green",
    }
    for place, case in enumerate(found["cases"]):
        seconds, label = case["step_seconds"], labels[case["name"]]
        below, above = seconds["median"] - seconds["fastest"], seconds["slowest"] - seconds["median"]
        axes.bar(place, seconds["median"], yerr=[[below], [above]], capsize=5, color=colours.get(label, "tab:blue"))
        axes.annotate(
            f"{seconds['median']:.2f} s",
            (place, seconds["slowest"]),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    axes.set_xticks(range(len(found["cases"])), [labels[case["name"]] for case in found["cases"]])
    axes.set_ylabel("seconds per step (lower is better)")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    setting, where = found["setting"], found["machine"]
    axes.set_title(
        f"ResNet-50, {setting['global_size']} images of {setting['image_size']} x {setting['image_size']} per step; a "
        f"device is one CPU core\nmedian of {setting['repeats']} launches, error bars from fastest to slowest; "
        f"{where['processor']}, "
        f"{where['cores']} cores, load {found['load_average_before']} to {found['load_average_after']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """For the terminal."""
    lines = ["case               micro-batches  s per step (fastest - slowest)  times one device"]
    for case in cases:
        seconds = case["step_seconds"]
        lines.append(
            f"{case['name']:<18} {case['micro_batches']:>13}  {seconds['median']:>10.3f} ({seconds['fastest']:.3f} - "
            f"{seconds['slowest']:.3f})       {case['speed_up']:>10.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, draw, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each launch")
    parser.add_argument("--out", type=Path, default=RESULTS / "resnet50_parallel.json", metavar="FILE")
    arguments = parser.parse_args()
    before = load_average()
    runs: dict[str, list[dict[str, float]]] = {case.name: [] for case in CASES}
    for _ in range(arguments.repeats):
        for case in CASES:
            runs[case.name].append(run_case(case, steps=arguments.steps))
    single = statistics.median(run["step_seconds"] for run in runs["single_device"])
    found: dict[str, Any] = {
        "machine": machine(),
        "load_average_before": before,
        "load_average_after": load_average(),
        "setting": {
            "global_size": GLOBAL_SIZE,
            "image_size": IMAGE_SIZE,
            "repeats": arguments.repeats,
            "steps": arguments.steps,
            "config": "ds_configs/resnet50_synthetic.yaml",
            "overrides": list(SETTINGS),
        },
        "cases": [summary(case, runs[case.name], single_device_seconds=single) for case in CASES],
    }
    print(table(found["cases"]))
    write(found, arguments.out)
    draw(found, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
