"""Starts a real job of several processes with torchrun, and reads the files of its run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest

from tests.places import ROOT

# The first start on a machine compiles DeepSpeed's shared-memory op and, for some cases, its
# optimizers.
TIMEOUT_SECONDS = 600  # less than the limit of a test: then its output is shown
# DeepSpeed hands a function to torch.compile when it is imported; with this, that does not import
# inductor, for a fifth of the time of every start.
NO_COMPILE = "TORCHDYNAMO_DISABLE"
exhaustive = False  # set by tests/conftest.py before it reads a test


def job_environment(**extra: str) -> dict[str, str]:
    """Return a clean environment for a job, on CPU and without torch.compile unless `extra` has them
    otherwise.
    """
    extra = {"DS_ACCELERATOR": "cpu", NO_COMPILE: "1"} | extra
    if extra["DS_ACCELERATOR"] != "cpu":
        extra[NO_COMPILE] = "0"
    dropped = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = str(ROOT)
    if kept.get("PYTHONPATH"):
        path += os.pathsep + kept["PYTHONPATH"]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | extra


def copied_op(folder: Path) -> str:
    """Copy the op that every start of DeepSpeed needs, and return the folder as what
    TORCH_EXTENSIONS_DIR has to be: in an environment or a home of its own a process would compile it
    anew, in a minute of a processor.
    """
    from framework.engine.extensions import use_own_cache  # here: it imports torch

    with patch.dict(os.environ):
        use_own_cache()
        compiled = Path(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm")
    if compiled.is_dir():
        without_lock = shutil.ignore_patterns("lock")  # of a process that compiles it now
        shutil.copytree(compiled, folder / compiled.name, ignore=without_lock)
    return str(folder)


def torchrun(
    script: Path,
    *arguments: str,
    num_ranks: int,
    cwd: Path,
    timeout: float = TIMEOUT_SECONDS,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script on `num_ranks` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(script)]
    command += arguments
    return subprocess.run(
        command,
        cwd=cwd,
        env=job_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_ranks(
    script: Path, *arguments: str, num_ranks: int, cwd: Path, timeout: float = TIMEOUT_SECONDS
) -> str:
    """Run a script on `num_ranks` processes forked from one that has imported everything. A failure
    fails the test with the job's output.
    """
    from tests.warm_ranks import session_ranks  # which imports this file

    output_folder = cwd / f"said-{len(list(cwd.iterdir()))}"
    job = session_ranks().start(
        list(arguments), num_ranks=num_ranks, folder=output_folder, script=script, cwd=cwd
    )
    codes = job.wait(timeout)
    assert not any(codes), f"job failed ({codes}):\n{job.stated()[-12000:]}"
    return job.stated()


def furthest(run: Path, expected: Sequence[float], *, num_steps: int | None = None) -> float:
    """Return the largest difference of a run's losses, one a step, to the expected ones: to all, or
    to the first `num_steps`.
    """
    count = len(expected) if num_steps is None else num_steps
    losses = series(run, "train/loss")
    assert list(losses) == list(range(1, count + 1))
    return max(
        abs(loss - other) for loss, other in zip(losses.values(), expected[:count], strict=True)
    )


def found_by_ranks(job: str, *, num_ranks: int, folder: Path) -> Any:
    """Run a job of `tests/jobs`, which writes what it has found into the JSON file that it is
    given, and return that.
    """
    out = folder / "found.json"
    run_ranks(ROOT / "tests/jobs" / job, str(out), num_ranks=num_ranks, cwd=folder)
    return json.loads(out.read_text(encoding="utf-8"))


def train_cases(
    configs: Sequence[Mapping[str, Any]],
    *,
    num_ranks: int,
    folder: Path,
    allow_fp16: bool = False,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Train all configs in one job. If the job itself fails, that fails the test with its output.

    `allow_fp16`: also if DeepSpeed's accelerator reports no fp16 (`tests.jobs.half_on_cpu`).
    """
    arguments = [_write_cases(configs, num_ranks=num_ranks, folder=folder)]
    if allow_fp16:
        arguments.append("--allow-fp16")
    script = ROOT / "tests/jobs/run_cases.py"
    run_ranks(script, *arguments, num_ranks=num_ranks, cwd=folder, timeout=timeout)


def train_cases_on_gpu(
    configs: Sequence[Mapping[str, Any]], *, num_ranks: int = 1, folder: Path
) -> None:
    """Train all configs on CUDA devices, by torchrun: a rank must not be forked from a process that
    may have begun to use one.
    """
    cases = _write_cases(configs, num_ranks=num_ranks, folder=folder)
    script = ROOT / "tests/jobs/run_cases.py"
    done = torchrun(script, cases, num_ranks=num_ranks, cwd=folder, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _write_cases(configs: Sequence[Mapping[str, Any]], *, num_ranks: int, folder: Path) -> str:
    cases = folder / f"cases-{num_ranks}-{len(list(folder.iterdir()))}.json"
    cases.write_text(json.dumps([{"config": config} for config in configs]), encoding="utf-8")
    return str(cases)


def fewer(steps: int, *, of: int) -> int:
    """Return `steps`, for a test of single steps beside other tests of the drift; with
    `--exhaustive` all `of` them.
    """
    if exhaustive:
        return of
    return steps


def rarely(cases: Iterable[Any]) -> list[Any]:
    """Return parameters of a test that only `--exhaustive` tries."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl."""
    error = run_folder.with_name(run_folder.name + ".error")
    assert not error.exists(), error.read_text(encoding="utf-8")
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def series(run_folder: Path, name: str) -> dict[int, float]:
    """Return one metric as step -> value."""
    return {int(row["step"]): row[name] for row in read_metrics(run_folder) if name in row}


def hold_parts(run_folder: Path, names: set[str]) -> None:
    """Assert that a step's time has these parts and `other`, and that they add up to it within 2 %.

    That holds for the median of logged points: parts are means over ranks, and a rank may be late
    to read its clock.
    """
    rows = [row for row in read_metrics(run_folder) if "time/step_ms" in row]
    sums = []
    for row in rows:
        whole = row["time/step_ms"]
        parts = {name[5:-3]: value for name, value in row.items() if name.startswith("time/")}
        parts.pop("step")
        parts.pop("checkpoint", None)
        assert set(parts) == names | {"other"}
        assert all(parts[name] > 0 for name in names)
        sums.append(sum(parts.values()) / whole)
    assert abs(median(sums) - 1) < 0.02
