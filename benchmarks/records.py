"""What every benchmark here needs: the machine in words, medians with their spread, jobs of several
processes, a results file.
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
    """Where the figures come from; the versions are those that took part."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed")},
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed_since_commit": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
        ),
    }


def load_average() -> float:
    """Of the last minute: above the number of cores, other work has shared them and times are too
    long.
    """
    return round(os.getloadavg()[0], 2)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, quickest and slowest."""
    return {
        "median": round(statistics.median(seconds), 4),
        "fastest": round(min(seconds), 4),
        "slowest": round(max(seconds), 4),
    }


def launch(*words: str, num_ranks: int, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """A job on `num_ranks` CPU processes of one thread each, so that a device is a core.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    job = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    done = subprocess.run(
        [*job, *words],
        cwd=ROOT,
        env={**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)}: ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Rows of a run's metrics.jsonl."""
    return [
        json.loads(line)
        for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def write(found: Mapping[str, Any], path: Path) -> None:
    """A results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    """Model name as Linux reports it."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
