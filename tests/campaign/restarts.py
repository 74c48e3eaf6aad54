"""Kill ranks of a supervised job again and again: python -m tests.campaign.restarts --kills 20

One `launch` of two ranks with `supervision.max_restarts`, nobody to start it again. A kill (SIGKILL) comes at a random
instant: some time after the last checkpoint of a start, or, every fifth at most, while a start still imports. The job
must end with 0, and with the losses and the last checkpoint's bits of a run that nobody touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from framework.checkpoint.manifest import list_checkpoints
from framework.report.figures import goodput_line
from framework.report.goodput import goodput
from framework.report.records import read_run
from tests.campaign.traces import differences
from tests.launched import ROOT, job_environment

RANKS, STEPS_PER_KILL = 2, 30


def write_config(folder: Path, name: str, *, steps: int) -> Path:
    config: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [64, 64], "dropout": 0.3},
        "data": {"target": "tests.jobs.parts:slow_digits", "args": {"seconds": 0.001, "eval_seconds": 0.0}},
        "batch": {"global_size": 100},
        "zero": {"stage": 2},
        "training": {"max_steps": steps, "log_every": 1},
        "evaluation": {"at_end": False},
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "supervision": {"max_restarts": 1000, "wait_seconds": 0.5},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def start(path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "framework", "launch", str(path), "--num_gpus", str(RANKS)]
    said = path.with_suffix(".log").open("w")
    environment = job_environment() | {"DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=said, stderr=said, text=True)


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(job.pid).children():
        with suppress(psutil.Error):
            if "RANK" in process.environ():
                found.append(process)
    return found


def begun(run: Path) -> list[float]:
    """When each start had come to its first step."""
    with suppress(OSError):
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        return [event["time_seconds"] for event in events if event["kind"] in ("start", "resume")]
    return []


def newest(run: Path) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")), default=0)


def until(job: subprocess.Popen[str], holds: Callable[[], bool]) -> bool:
    """Wait; returns False where the job has ended before."""
    while job.poll() is None:
        if holds():
            return True
        time.sleep(0.01)
    return False


def campaign(folder: Path, kills: int, *, seed: int) -> dict[str, Any]:
    """Run it; returns what was counted and measured."""
    draw, run = random.Random(seed), folder / "killed"
    job = start(write_config(folder, "killed", steps=STEPS_PER_KILL * (kills + 1)))
    recoveries, was_early, done = [], False, 0
    while done < kills and job.poll() is None:
        starts, saved = len(begun(run)), newest(run)
        is_early = not was_early and done > 0 and draw.random() < 0.2
        if is_early:
            until(job, lambda: len(ranks_of(job)) == RANKS)
            time.sleep(draw.uniform(0.0, 3.0))
        elif not until(job, lambda saved=saved: newest(run) > saved):
            break
        else:
            time.sleep(draw.uniform(0.0, 1.0))
        victims = ranks_of(job)
        if len(victims) < RANKS:
            continue
        killed_at, starts = time.time(), len(begun(run))
        for victim in draw.choice([victims[:1], victims[1:], victims]):
            os.kill(victim.pid, signal.SIGKILL)
        done, was_early = done + 1, is_early
        until(job, lambda pid=victims[0].pid: pid not in {each.pid for each in ranks_of(job)})
        if not is_early and until(job, lambda starts=starts: len(begun(run)) > starts):
            recoveries.append(begun(run)[-1] - killed_at)
    code = job.wait()
    whole = start(write_config(folder, "whole", steps=STEPS_PER_KILL * (kills + 1)))
    assert whole.wait() == 0
    found = differences(folder / "whole", run, num_steps=STEPS_PER_KILL * (kills + 1))
    print("\n".join(found), file=sys.stderr)
    recoveries.sort()
    spent = goodput(read_run(run))
    return {
        "kills": done,
        "code": code,
        "equal": not found,
        "recovery_seconds": {
            "p50": round(statistics.median(recoveries), 2),
            "p95": round(recoveries[int(0.95 * len(recoveries))], 2),
        },
        "goodput": "" if spent is None else goodput_line(spent),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), given.kills, seed=given.seed)
    print(json.dumps(found))
    return 0 if found["equal"] and found["code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
