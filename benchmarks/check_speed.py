"""Measures how long `check` takes: one file from process start to exit, and a thousand files in one
call.

    python benchmarks/check_speed.py [--files 1000] [--starts 15] [--out
    benchmarks/results/check_speed.json]

The thousand are half run configs and half DeepSpeed JSON, all different, a quarter of each with a
few mistakes: like a repository of experiments, and without answers that a cache could hold. Starts
of the process are repeated, and the results have the median and the spread. The bare start of
Python and the import of pydantic are measured beside it, because no work here can make them
shorter. A process that has torch in memory at the end is a failure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET_ONE_SECONDS = 0.35
TARGET_MANY_SECONDS = 5.0
# As `dsf`; at the end it prints its memory and the heavy modules that it holds.
PROGRAM = """
import sys
from framework.cli import main
code = main(sys.argv[1:])
import resource
heavy = [name for name in ("torch", "deepspeed", "numpy") if name in sys.modules]
print("measured", code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, ",".join(heavy) or "none")
"""
TYPOS = ("gradient_cliping", "zero_optimisation", "train_batchsize", "wall_clock_breakdwn", "fp17")


def timed(command: list[str]) -> tuple[float, float, str]:
    """Run a command; return its seconds by the wall clock, its processor seconds and its output."""
    processor_before = _processor_seconds()
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    return seconds, _processor_seconds() - processor_before, done.stdout


def _processor_seconds() -> float:
    """Return the processor seconds of children that have ended. On a machine with other work they
    vary less than the wall clock.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def starts(command: list[str], times: int) -> dict[str, Any]:
    """Return the seconds of several starts, after one that fills the file cache."""
    timed(command)
    measured = [timed(command) for _ in range(times)]
    seconds = sorted(wall for wall, _, _ in measured)
    processor_seconds = [processor for _, processor, _ in measured]
    return {
        "median_processor_seconds": round(statistics.median(processor_seconds), 4),
        "median_seconds": round(statistics.median(seconds), 4),
        "fastest_seconds": round(seconds[0], 4),
        "slowest_seconds": round(seconds[-1], 4),
        "starts": times,
    }


def write_files(folder: Path, count: int) -> list[str]:
    """Write run configs and DeepSpeed JSON, all different, and the same ones every time."""
    chance = random.Random(0)
    rendered_files = sorted((ROOT / "ds_configs/rendered").glob("*.json"))
    rendered = [json.loads(path.read_text()) for path in rendered_files]
    configs = [path.read_text() for path in sorted((ROOT / "ds_configs").glob("*.yaml"))]
    paths = []
    for number in range(count):
        is_wrong = number % 8 < 2
        if number % 2:
            values = chance.choice(rendered) | {"steps_per_print": number + 1}
            if is_wrong:
                values[chance.choice(TYPOS)] = number
                values["zero_optimization"] = {"stage": 4, "stge": number}
            path = folder / f"{number}.json"
            text = json.dumps(values, indent=2)
        else:
            text = f"# {number}\n{chance.choice(configs)}\n"
            if is_wrong:
                text += f"zerro: {{stage: {number}}}\n"
            path = folder / f"{number}.yaml"
        path.write_text(text)
        paths.append(str(path))
    return paths


def measure(num_files: int, num_starts: int) -> dict[str, Any]:
    """Return all results, as they are written to the file."""
    check = [sys.executable, "-m", "framework", "check"]
    with tempfile.TemporaryDirectory() as name:
        paths = write_files(Path(name), num_files)
        check_many = [sys.executable, "-c", PROGRAM, "check"]
        check_many += paths
        seconds = []
        processor_seconds = []
        for _ in range(5):
            wall, processor, output = timed(check_many)
            seconds.append(wall)
            processor_seconds.append(processor)
    _, code, peak_mib, heavy = output.splitlines()[-1].split()
    if heavy != "none" or code != "2":
        raise SystemExit(f"check ended with {code} and held {heavy} in memory")
    return {
        "machine": {
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "pydantic": importlib.metadata.version("pydantic"),
            "PyYAML": importlib.metadata.version("PyYAML"),
            "system": f"{platform.system()} {platform.release()}",
            "load_average_before": round(os.getloadavg()[0], 2),
        },
        "one_run_config": starts([*check, "ds_configs/quickstart.yaml"], num_starts),
        "one_deepspeed_json": starts([*check, "ds_configs/rendered/zero3.json"], num_starts),
        "python_alone": starts([sys.executable, "-c", ""], num_starts),
        "python_with_pydantic": starts(
            [sys.executable, "-c", "import pydantic, yaml; pydantic.BaseModel"], num_starts
        ),
        "many_files": {
            "files": num_files,
            "calls": len(seconds),
            "peak_memory_mib": int(peak_mib),
            "median_seconds": round(statistics.median(seconds), 3),
            "slowest_seconds": round(max(seconds), 3),
            "median_processor_seconds": round(statistics.median(processor_seconds), 3),
        },
        "torch_in_memory": heavy != "none",
        "targets": {
            "one_file_seconds": TARGET_ONE_SECONDS,
            "many_files_seconds": TARGET_MANY_SECONDS,
        },
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="Measure how long check takes.")
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = measure(arguments.files, arguments.starts)
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
