"""Measures how long `check` takes: one file from process start to exit, and a thousand files in one
call.

    python benchmarks/check_speed.py [--files 1000] [--starts 15] [--out
    benchmarks/results/check_speed.json]

The thousand are half run configs and half DeepSpeed JSON, all different, a quarter of each with a
few mistakes: like a repository of experiments, and without answers that a cache could hold. Starts
of the process are repeated in turn, and the results have the median and the spread. The bare start
of Python and the import of pydantic and PyYAML are measured beside it, because no work here can
make them shorter. A process that has torch in memory at the end is a failure. Python must be able
to keep bytecode (no PYTHONDONTWRITEBYTECODE), or every start compiles the framework anew.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET_ONE_SECONDS = 0.35
TARGET_MANY_SECONDS = 5.0
TARGET_OVER_IMPORTS = 3.0  # processor time of one run config, over importing pydantic and PyYAML
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


def starts(commands: Mapping[str, list[str]], times: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of several starts of each command, in turn, after one that fills the file
    cache.
    """
    for command in commands.values():
        timed(command)
    measured: dict[str, list[tuple[float, float, str]]] = {name: [] for name in commands}
    for _ in range(times):
        for name, command in commands.items():
            measured[name].append(timed(command))
    return {name: _summary(runs) for name, runs in measured.items()}


def _summary(measured: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    seconds = sorted(wall for wall, _, _ in measured)
    processor_seconds = [processor for _, processor, _ in measured]
    return {
        "median_processor_seconds": round(statistics.median(processor_seconds), 4),
        "median_seconds": round(statistics.median(seconds), 4),
        "fastest_seconds": round(seconds[0], 4),
        "slowest_seconds": round(seconds[-1], 4),
        "starts": len(measured),
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
    started = starts(
        {
            "one_run_config": [*check, "ds_configs/quickstart.yaml"],
            "one_deepspeed_json": [*check, "ds_configs/rendered/zero3.json"],
            "python_alone": [sys.executable, "-c", ""],
            "python_with_imports": [sys.executable, "-c", "import pydantic, yaml"],
            "python_with_pydantic": [
                sys.executable,
                "-c",
                "import pydantic, yaml; pydantic.BaseModel",
            ],
        },
        num_starts,
    )
    imports = started["python_with_imports"]["median_processor_seconds"]
    over_imports = started["one_run_config"]["median_processor_seconds"] / imports
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
        **started,
        "one_run_config_over_imports": round(over_imports, 2),
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
            "one_run_config_over_imports": TARGET_OVER_IMPORTS,
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
