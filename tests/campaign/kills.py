"""Kill real runs at random instants and look whether they end as the unbroken run: python -m
tests.campaign.kills --kills 200

Two ranks, or four or eight in stages of tensor groups, train with dropout, save every fourth step and are
resumed with checkpoint.resume=auto. A third of the kills and more are aimed at saves: the folder in
which a checkpoint is written is watched, and the kill comes somewhere within the time that the last
saves took; or in the moment in which the manifest is seen, or the checkpoint's name, for which it
is waited without a pause. What the dead left on the disk says where it hit. `--launcher torchrun`
starts every run through torchrun, which ends the ranks that are left; otherwise ranks are forked,
which is five times as fast. After every kill the newest checkpoint must be sound and no older than
the last save that had returned; at the end the files of the last checkpoint (weights, optimizer,
schedule, random states), bit for bit, and the metrics of all steps must equal the undisturbed
run's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.records import RESULTS, machine, write
from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.resume_point import find_sound_checkpoint
from tests.campaign.traces import differences, left_behind
from tests.torchrun_ranks import TorchrunJob, TorchrunRanks
from tests.warm_ranks import Job, WarmRanks

_SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 16,
    "dropout": 0.3,
}
_TEXT = {
    "model": {"kind": "gpt", **_SHAPE},
    "data": {"target": "tests.jobs.parts:masked_prompts_and_seven_more"},
    "task": {"kind": "causal_lm"},
    "batch": {"global_size": 8},
}
_STAGES_OF_GROUPS = {
    **_TEXT,
    "batch": {"global_size": 8, "micro_size": 2},
    "parallel": {"pipe": 2, "tensor": 2},
    "zero": {"stage": 1},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "pipe2": {"parallel": {"pipe": 2}},
    "tensor2": {**_TEXT, "parallel": {"tensor": 2}, "zero": {"stage": 1}},
    "pipe2-tensor2": _STAGES_OF_GROUPS,
    "pipe2-tensor2-data2": _STAGES_OF_GROUPS,
    "sequence2": {**_TEXT, "parallel": {"sequence": 2}, "zero": {"stage": 2}},
    "zero2-async": {"zero": {"stage": 2}, "checkpoint": {"mode": "async"}},
    # Six lanes that begin anew four times, and give their states.
    "stream": {
        "zero": {"stage": 1},
        "data": {"target": "tests.jobs.stream_parts:digit_streams", "num_workers": 1},
    },
}
NUM_RANKS = {"pipe2-tensor2": 4, "pipe2-tensor2-data2": 8}  # of all others two
TOTAL_STEPS, SAVE_EVERY, EVALUATE_EVERY = 48, 4, 10
JOB_SECONDS = 300.0
VICTIMS: dict[str, tuple[int, ...]] = {"rank 0": (0,), "rank 1": (1,), "both ranks": (0, 1)}
# aim -> weight
AIMS: dict[str, int] = {"save": 9, "manifest": 4, "name": 3, "any time": 5, "start": 1}
Starter = WarmRanks | TorchrunRanks
AnyJob = Job | TorchrunJob


def config(case: str, folder: Path) -> dict[str, Any]:
    checkpoint = {"every_steps": SAVE_EVERY, "keep_last": 2, "resume": "auto"}
    return {
        "run": {"name": case, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [64, 64], "dropout": 0.3},
        "batch": {"global_size": 120},
        "scheduler": {"kind": "warmup_cosine", "warmup_steps": 5},
        "training": {"max_steps": TOTAL_STEPS, "log_every": 1},
        "evaluation": {"every_steps": EVALUATE_EVERY},
        "monitors": {"tensorboard": False, "progress": "off"},
        **CASES[case],
        "checkpoint": checkpoint | CASES[case].get("checkpoint", {}),
    }


@dataclass
class Kill:
    """One kill: what it was aimed at, whom it met, what it found the run doing, and when, after
    this start of the run.
    """

    case: str
    aim: str
    victim: str
    left: str
    step: int
    seconds: float


@dataclass
class Found:
    """What a campaign has seen."""

    kills: list[Kill] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    start_seconds: list[float] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)


class Campaign:
    """Runs of one case after the other, killed until there are enough kills."""

    def __init__(self, starter: Starter, folder: Path, *, seed: int, found: Found) -> None:
        self._starter, self._folder, self._draw, self._found = (
            starter,
            folder,
            random.Random(seed),
            found,
        )

    def case(self, case: str, *, num_kills: int, others_from: Starter | None = None) -> None:
        """Kill runs of a case `num_kills` times; each run goes on until it ends, and is compared
        with an unbroken one. Another starter may start the undisturbed ones.
        """
        unbroken = self._run_to_end(case, self._folder / f"{case}-unbroken", others_from)
        self._num_done, number = 0, 0
        while self._num_done < num_kills:
            number += 1
            self._broken_run(
                case, self._folder / f"{case}-{number}", unbroken, num_kills, others_from
            )

    def _broken_run(
        self, case: str, folder: Path, unbroken: Path, num_kills: int, others_from: Starter | None
    ) -> None:
        while self._num_done < num_kills and self._kill_once(case, folder):
            self._num_done += 1
            print(
                f"{case}: {self._num_done} kills of {num_kills}, {self._found.kills[-1]}",
                file=sys.stderr,
                flush=True,
            )
        run = self._run_to_end(case, folder, others_from)
        self._found.finished[case] += 1
        self._found.wrong += [
            f"{case}: {stated}" for stated in differences(unbroken, run, num_steps=TOTAL_STEPS)
        ]
        if not self._found.wrong:
            shutil.rmtree(folder)

    def _start(self, case: str, folder: Path, starter: Starter | None = None) -> AnyJob:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config(case, folder)), encoding="utf-8")
        return (starter or self._starter).start(
            ["--config", str(file)], num_ranks=NUM_RANKS.get(case, 2), folder=folder / "said"
        )

    def _run_to_end(self, case: str, folder: Path, starter: Starter | None = None) -> Path:
        job = self._start(case, folder, starter)
        codes = job.wait(JOB_SECONDS)
        if any(codes):
            raise SystemExit(
                f"{case}: the run in {folder} ended with {codes}:\n{job.stated()[-3000:]}"
            )
        return folder / case

    def _kill_once(self, case: str, folder: Path) -> bool:
        """Start or resume the run and kill it. False where it ended before."""
        run, aim = folder / case, self._draw.choices(tuple(AIMS), tuple(AIMS.values()))[0]
        # Rank 0 writes the manifest and the name: killing the other one would not interrupt it.
        victim = self._draw.choice(
            [
                name
                for name, ranks in VICTIMS.items()
                if aim not in ("manifest", "name") or 0 in ranks
            ]
        )
        before = _newest_step(run)
        job, began = self._start(case, folder), time.monotonic()
        if not self._await(aim)(job, run, began):
            if any(codes := job.wait(JOB_SECONDS)):
                self._found.wrong.append(
                    f"{case}: a run that nobody had killed ended with {codes}: {job.stated()[-1500:]}"
                )
            return False
        # Both before and after: a rank that is left may begin a save that its dead peer will never
        # take part in.
        was_saving = (run / "checkpoints" / ".saving").exists()
        job.kill(*VICTIMS[victim])
        instant = round(time.monotonic() - began, 4)
        codes = job.wait(JOB_SECONDS)
        if not any(codes):
            return False  # it had just ended
        self._found.kills.append(
            Kill(
                case,
                aim,
                victim,
                left_behind(run / "checkpoints") if was_saving else "no save",
                _last_logged(run),
                instant,
            )
        )
        self._look(case, run, resumed_from=before, job=job)
        if isinstance(job, TorchrunJob) and (alive := job.left_alive()):
            self._found.wrong.append(
                f"{case}: ranks {alive} outlived the launcher after {self._found.kills[-1]}"
            )
        return True

    def _await(self, aim: str) -> Callable[[AnyJob, Path, float], bool]:
        return {
            "save": self._await_save,
            "manifest": self._await_manifest,
            "name": self._await_name,
            "any time": self._await_any_time,
            "start": self._await_start,
        }[aim]

    def _look(self, case: str, run: Path, *, resumed_from: int, job: AnyJob) -> None:
        """A sound checkpoint is there, and no save that had returned is lost."""
        newest, damaged = find_sound_checkpoint("auto", run_checkpoints=run / "checkpoints")
        step = newest.step if newest is not None else 0
        logged = _last_logged(run)
        # Step n is logged before it is saved; so when it is in the file, all saves before it have
        # returned.
        returned = (logged - 1) // SAVE_EVERY * SAVE_EVERY if logged else 0
        if case.endswith("async"):
            returned -= SAVE_EVERY  # the newest of them may still have been on its way to the disk
        least = max(resumed_from, returned)
        if damaged:
            self._found.wrong.append(f"{case}: damaged after {self._found.kills[-1]}: {damaged}")
        if step < least:
            self._found.wrong.append(
                f"{case}: step {step} is the newest after {self._found.kills[-1]}, and {least} was saved"
            )
        if "Traceback" in job.stated():
            self._found.wrong.append(
                f"{case}: a rank that was left ended with a traceback: {job.stated()[-2500:]}"
            )

    def _await_save(self, job: AnyJob, run: Path, began: float) -> bool:
        """Wait for one of the next saves to begin, and for a part of the time that a save takes."""
        saving, skip = (
            run / "checkpoints" / ".saving",
            self._draw.choice((0, 1, 1, 2) if self._found.save_seconds else (1, 2)),
        )
        # A folder that an earlier kill left is there from the beginning, until the run that resumes
        # clears it away.
        if not (_until(lambda: _has_begun(run, began) and not saving.exists(), job)):
            return False
        self._found.start_seconds.append(time.monotonic() - began)
        for _ in range(skip):
            if not _until(saving.exists, job):
                return False
            at = time.monotonic()
            if not _until(lambda: not saving.exists(), job):
                return False
            self._found.save_seconds.append(time.monotonic() - at)
        instant = (
            self._draw.uniform(
                0, statistics.quantiles([0.0, *self._found.save_seconds[-9:]], n=4)[1]
            )
            * 0.8
        )
        return _until(saving.exists, job) and _pause(instant, job)

    def _await_manifest(self, job: AnyJob, run: Path, began: float) -> bool:
        """Wait for the manifest of one of the next saves, or for what will be renamed to it."""
        return self._await_file(
            job,
            run,
            began,
            seen=lambda saves: any(
                "manifest.json" in name
                for place in _listed(saves / ".saving")
                if place.startswith("global_step")
                for name in _listed(saves / ".saving" / place)
            ),
        )

    def _await_name(self, job: AnyJob, run: Path, began: float) -> bool:
        """Wait for the moment in which one of the next checkpoints has got its name."""
        known: set[str] = set()

        def seen(saves: Path) -> bool:
            named = {name for name in _listed(saves) if name.startswith("global_step")}
            is_new = bool(known) and bool(named - known)
            known.update(named or {"none yet"})
            return is_new

        return self._await_file(job, run, began, seen=seen)

    def _await_file(
        self, job: AnyJob, run: Path, began: float, *, seen: Callable[[Path], bool]
    ) -> bool:
        if not _until(
            lambda: _has_begun(run, began) and not (run / "checkpoints" / ".saving").exists(), job
        ):
            return False
        if isinstance(job, TorchrunJob):
            job.find_ranks()
        return _until(lambda: seen(run / "checkpoints"), job, pause_seconds=0.0)

    def _await_any_time(self, job: AnyJob, run: Path, began: float) -> bool:
        return _until(lambda: _has_begun(run, began), job) and _pause(
            self._draw.uniform(0, 1.5), job
        )

    def _await_start(self, job: AnyJob, run: Path, began: float) -> bool:
        usual = (
            statistics.median(self._found.start_seconds[-9:]) if self._found.start_seconds else 3.0
        )
        return _pause(self._draw.uniform(0, usual), job)


def _until(holds: Callable[[], bool], job: AnyJob, *, pause_seconds: float = 0.001) -> bool:
    """Wait until something holds; False where the job ends before. Without a pause it looks some
    ten thousand times a second.
    """
    deadline = time.monotonic() + JOB_SECONDS
    while not holds():
        if job.is_over() or time.monotonic() > deadline:
            return False
        if pause_seconds:
            time.sleep(pause_seconds)
    return True


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  # names only, and no slower than need be
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pause(seconds: float, job: AnyJob) -> bool:
    time.sleep(seconds)
    return not job.is_over()


def _has_begun(run: Path, began: float) -> bool:
    """Whether this start has taken the folder: its lists of what it is are new, and it trains
    next.
    """
    with suppress(FileNotFoundError):
        rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        # The last line may be in the writing.
        return any(
            json.loads(row)["time"] > time.time() - (time.monotonic() - began)
            for row in rows[-2:-1]
        )
    return False


def _newest_step(run: Path) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")), default=0)


def _last_logged(run: Path) -> int:
    with suppress(FileNotFoundError):
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
        return max((int(json.loads(line)["step"]) for line in text.split("\n")[:-1]), default=0)
    return 0


def summary(found: Found, *, seed: int, seconds: float, launcher: str = "none") -> dict[str, Any]:
    """Counts, for people and for the results file."""
    num_inside = sum(kill.left != "no save" for kill in found.kills)
    return {
        "kills": len(found.kills),
        "kills_inside_a_save": num_inside,
        "share_inside_a_save": round(num_inside / max(1, len(found.kills)), 3),
        "by_case": dict(Counter(kill.case for kill in found.kills)),
        "by_aim": dict(Counter(kill.aim for kill in found.kills)),
        "by_victim": dict(Counter(kill.victim for kill in found.kills)),
        "by_what_was_left": dict(Counter(kill.left for kill in found.kills).most_common()),
        "runs_ended_and_compared": dict(found.finished),
        "wrong": found.wrong,
        "save_seconds_median": round(statistics.median(found.save_seconds), 3)
        if found.save_seconds
        else None,
        "steps": TOTAL_STEPS,
        "save_every": SAVE_EVERY,
        "ranks": 2,
        "seed": seed,
        "launcher": launcher,
        "seconds": round(seconds),
        "machine": machine(),
        # As text, so that each is one line of the file.
        "each_kill": [
            ", ".join(f"{name} {value}" for name, value in asdict(kill).items())
            for kill in found.kills
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="over all cases together")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; a temporary one is the default")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_campaign.json")
    parser.add_argument(
        "--launcher",
        choices=("none", "torchrun"),
        default="none",
        help="what starts and ends the ranks",
    )
    options = parser.parse_args(arguments)
    found, began = Found(), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        starter: Starter = (
            TorchrunRanks() if options.launcher == "torchrun" else stack.enter_context(WarmRanks())
        )
        campaign = Campaign(starter, Path(folder), seed=options.seed, found=found)
        for number, case in enumerate(options.case):
            share = options.kills // len(options.case) + (
                number < options.kills % len(options.case)
            )
            if share:
                campaign.case(case, num_kills=share)
            write(
                summary(
                    found,
                    seed=options.seed,
                    seconds=time.monotonic() - began,
                    launcher=options.launcher,
                ),
                options.out,
            )
            if found.wrong:
                break
    counts = summary(
        found, seed=options.seed, seconds=time.monotonic() - began, launcher=options.launcher
    )
    print(json.dumps(counts, indent=2))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
