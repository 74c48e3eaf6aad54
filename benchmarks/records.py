"""Functions of all benchmarks: the description of the machine, medians with their spread, jobs of
several processes, the results file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
_SET_BY_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def machine() -> dict[str, Any]:
    """Describe the machine and the software that the figures come from."""
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "deepspeed": importlib.metadata.version("deepspeed"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed_since_commit": bool(changes),
    }


def load_average() -> float:
    """Return the load of the last minute. Above the number of cores, other work has shared them,
    and times are too long.
    """
    return round(os.getloadavg()[0], 2)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the fastest and the slowest time."""
    return {
        "median": round(statistics.median(seconds), 4),
        "fastest": round(min(seconds), 4),
        "slowest": round(max(seconds), 4),
    }


def launch(*words: str, num_ranks: int, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a job on `num_ranks` CPU processes of one thread each, so that a device is a core.

    Raises:
        SystemExit: the job failed; with the end of its output.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS
    }
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks)]
    command += words
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)}: ended with {done.returncode}\n"
            f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.jsonl."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    """Return the model name of the processor, as Linux reports it."""
    source = Path("/proc/cpuinfo")
    if source.exists():
        for line in source.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
