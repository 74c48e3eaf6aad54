"""Goodput of a job that fails every two minutes for an hour: python -m
tests.campaign.simulated_hour

By a simulated clock. Trainer, events, metrics and the computation of goodput are the real ones;
what takes time is simulated: steps, saves and recoveries, which last as long as
`tests.campaign.restarts` has measured. A ledger of its own, kept by what moves the clock, says what
was really spent on what.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from framework.config.load import config_from_values
from framework.report.goodput import Goodput, goodput
from framework.report.records import read_run
from framework.system.stopping import Action
from framework.train.cadence import Every, Minutes, Schedule
from framework.train.events import Events
from framework.train.monitors.metric_files import JsonlFile
from tests.train.trainer_of import trainer_of

HOUR, STEP_SECONDS, FIRST_STEP_SECONDS, START = 3600.0, 0.25, 1.0, 1_700_000_000.0
RECOVERY_P50, RECOVERY_P95 = 5.7, 6.2  # from a kill to the `resume` event
_Z95 = 1.645  # of a normal distribution


class KilledError(Exception):
    """The end of a process."""


@dataclass
class Job:
    """A job whose processes are killed every `between` seconds, and its ledger."""

    between: float
    save_seconds: float
    now: float = START
    fails_at: float = START
    step: int = 0
    is_first: bool = True
    unsaved: float = 0.0
    ledger: Counter[str] = field(default_factory=Counter)

    def spend(self, seconds: float) -> None:
        """Let time pass; a kill that falls into it ends it there."""
        passed = min(seconds, self.fails_at - self.now)
        self.now += passed
        self.unsaved += passed
        if passed < seconds:
            raise KilledError

    # What the Trainer asks of an engine and of data.

    def ahead(self, batches: Iterator[Any], *, num_steps: int) -> Iterator[Any]:
        return batches

    def train_step(self, batches: Iterator[Any]) -> Job:
        seconds = FIRST_STEP_SECONDS if self.is_first else STEP_SECONDS
        self.spend(seconds)
        self.is_first = False
        self.step += 1
        return self

    may_be_skipped = False

    def read(self) -> Mapping[str, float]:
        return {"train/loss": 1.0}

    def stream(self, start_step: int) -> Iterator[int]:
        yield from iter(int, 1)

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        self.spend(self.save_seconds)
        self.ledger["kept"] += self.unsaved - self.save_seconds
        self.ledger["saving"] += self.save_seconds
        self.unsaved = 0.0


def simulate(
    folder: Path,
    *,
    every_seconds: float,
    save_seconds: float,
    between: float = 120.0,
    seed: int = 0,
) -> Job:
    """Run the hour; its records are in the folder."""
    section = {"every_minutes": every_seconds / 60, "at_end": False}
    every = config_from_values(
        {"run": {"name": "hour"}, "checkpoint": section}
    ).checkpoint.every_minutes
    draw, job, saved = random.Random(seed), Job(between, save_seconds), 0
    process_began, number, job.fails_at = START, 1, START + between
    job.now += RECOVERY_P50 - 0.5  # the first start has nothing to find out
    job.ledger["down"] += job.now - START
    plan = Schedule(10**9, 10**9, 1, log=Every(4), evaluate=Every(), save=Every())
    while job.now < START + HOUR:
        job.is_first, job.unsaved, job.step = True, 0.0, saved
        minutes = Minutes({Action.SAVE: every}, most=60.0, began=START, clock=lambda: job.now)
        events = Events(
            folder / "events.jsonl",
            from_step=saved,
            seconds=job.now - process_began,
            clock=lambda: job.now,
        )
        try:
            trainer = trainer_of(
                job,  # type: ignore[arg-type]
                schedule=plan,
                train_data=job,
                monitors=[JsonlFile(folder / "metrics.jsonl", from_step=saved), events],
                save=job.save,
                start_step=saved,
                stop=lambda step, minutes=minutes: minutes.due(),
                minutes=minutes,
                record=events,
                clock=lambda: job.now,
            )
            with patch("framework.train.trainer.now", lambda: job.now):
                trainer.fit()
        except KilledError:
            kinds = [
                json.loads(line)
                for line in (folder / "events.jsonl").read_text("utf-8").splitlines()
            ]
            saved = max((event["step"] for event in kinds if event["kind"] == "save"), default=0)
            job.ledger["lost"] += job.unsaved
            seconds = draw.gauss(RECOVERY_P50, (RECOVERY_P95 - RECOVERY_P50) / _Z95)
            job.ledger["down"] += seconds
            process_began, job.now = job.now + 0.5, job.now + seconds
            number += 1
            # at no fixed time since a save
            job.fails_at = START + between * number + draw.uniform(-10.0, 10.0)
    return job


def hour(folder: Path, **options: float) -> tuple[Goodput, Job]:
    """Simulate, and read the goodput as a report does."""
    job = simulate(folder, **options)
    found = goodput(read_run(folder))
    assert found is not None
    return found, job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--between", type=float, default=120.0)
    given = parser.parse_args()
    for save_seconds in (0.02, 0.1, 0.2, 0.5, 1.0):
        every = math.sqrt(2 * save_seconds * given.between)  # Young 1974
        with tempfile.TemporaryDirectory() as folder:
            found, _ = hour(
                Path(folder), every_seconds=every, save_seconds=save_seconds, between=given.between
            )
        parts = {name: round(value, 1) for name, value in found.parts.items()}
        row = {
            "save_seconds": save_seconds,
            "every_seconds": round(every, 1),
            "goodput": round(found.share, 3),
        }
        print(json.dumps(row | {"restarts": found.restarts, "seconds": parts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
