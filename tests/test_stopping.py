"""Real runs that are asked to stop: they save together, exit with 75, and end, after all, as the
undisturbed run.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from framework.checkpoint.manifest import list_checkpoints
from tests.campaign.kills import TOTAL_STEPS, differences
from tests.forked_launchers import launch
from tests.launched import ROOT
from tests.ports import free_ports
from tests.warm_ranks import Job, WarmRanks

pytestmark = [pytest.mark.slow, pytest.mark.timing]

TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL
SECONDS = 300.0
GONE_SECONDS = 20.0


def write_config(folder: Path, *, num_workers: int = 0) -> Path:
    """Steps of 60 ms, a save after every eighth of them, an evaluation of 400 ms after every
    tenth.
    """
    config: dict[str, Any] = {
        "run": {"name": "stops", "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [64, 64], "dropout": 0.3},
        "data": {
            "target": "tests.jobs.parts:slow_images",
            "args": {"seconds": 0.001, "eval_seconds": 0.002},
            "num_workers": num_workers,
        },
        "batch": {"global_size": 100},
        "zero": {"stage": 2},
        "scheduler": {"kind": "warmup_cosine", "warmup_steps": 5},
        "training": {"max_steps": TOTAL_STEPS, "log_every": 1},
        "evaluation": {"every_steps": 10},
        "checkpoint": {"every_steps": 8, "keep_last": 2, "resume": "auto"},
        "monitors": {"tensorboard": False, "progress": "off"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "run.yaml"


def logged(run: Path) -> int:
    with suppress(FileNotFoundError, IndexError):
        return int(
            json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[-2])["step"]
        )
    return 0


def newest(run: Path) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")), default=0)


def until(holds: Callable[[], object], *, lives: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert lives(), "the job ended before"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def start(warm: WarmRanks, folder: Path, *settings: str) -> Job:
    return warm.start(
        ["--config", str(write_config(folder)), *settings], num_ranks=2, folder=folder / "said"
    )


@pytest.fixture(scope="module")
def unbroken(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    job = start(warm, folder)
    assert job.wait(SECONDS) == [0, 0], job.stated()
    return folder / "stops"


def listens(pid: int) -> bool:
    """Whether a process handles SIGTERM: one that has only been forked does not yet."""
    caught = re.search(
        r"^SigCgt:\s*([0-9a-f]+)",
        Path("/proc", str(pid), "status").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return caught is not None and bool(int(caught[1], 16) >> (TERM - 1) & 1)


def ask(job: Job, run: Path, when: str, number: int, *ranks: int) -> int:
    """Ask a run to stop that has just begun, and return the step that it says to have saved."""
    before = newest(run)
    if when == "save":
        until((run / "checkpoints" / ".saving").exists, lives=lambda: not job.is_over())
    elif when == "evaluation":
        until(
            lambda: logged(run) > before and not logged(run) % 10, lives=lambda: not job.is_over()
        )
    else:
        until(lambda: logged(run) >= before + 3, lives=lambda: not job.is_over())
    job.signal(number, *ranks)
    codes = job.wait(SECONDS)
    assert codes == [75, 75], job.stated()
    line = r"^(\w+): stopped after step (\d+) of 48; .*global_step\2 is complete; .* \[stopped\]$"
    reported = re.findall(line, job.stated(), re.MULTILINE)
    assert len(reported) == 1, job.stated()
    assert reported[0][0] == signal.Signals(number).name
    assert newest(run) == int(reported[0][1]) > before
    assert "Traceback" not in job.stated()
    return int(reported[0][1])


def test_stopped_again_and_again_a_run_ends_as_the_unbroken_one(
    warm: WarmRanks, unbroken: Path, tmp_path: Path
) -> None:
    run = tmp_path / "stops"
    first = start(warm, tmp_path)
    ask(first, run, "step", TERM, 1)
    assert f"resume: auto: no checkpoint in {run}, starting afresh\n" in first.stated()
    ask(start(warm, tmp_path), run, "step", INT, 0, 1)
    ask(start(warm, tmp_path), run, "evaluation", TERM, 0)
    reached = ask(start(warm, tmp_path), run, "save", USR1, 0)
    early = start(warm, tmp_path)
    until(lambda: all(map(listens, early.pids)), lives=lambda: not early.is_over())
    early.signal(TERM, 0, 1)
    assert early.wait(SECONDS) == [75, 75], early.stated()
    assert (
        early.stated().count(
            "SIGTERM: stopped before the first step: nothing new to save [stopped]"
        )
        == 2
    )
    last = start(warm, tmp_path)
    assert last.wait(SECONDS) == [0, 0], last.stated()
    assert f"resume: auto: from {run}/checkpoints/global_step{reached}\n" in last.stated()
    log = (run / "logs" / "rank1.log").read_text(encoding="utf-8")
    assert f"dsf-trainer: SIGUSR1: stopped after step {reached} of {TOTAL_STEPS}; " in log
    assert f"dsf-trainer: step {TOTAL_STEPS}/{TOTAL_STEPS}  epoch " in log
    assert differences(unbroken, run, num_steps=TOTAL_STEPS) == []


def test_two_ranks_evaluate_save_and_stop_by_the_clock(warm: WarmRanks, tmp_path: Path) -> None:
    run, often = tmp_path / "stops", {"evaluation": 0.01, "checkpoint": 0.005}
    by_clock = [
        f"{name}.{key}"
        for name, each in often.items()
        for key in ("every_steps=null", f"every_minutes={each}")
    ]
    first = start(warm, tmp_path, *by_clock, "training.max_minutes=0.08", "training.max_steps=2000")
    assert first.wait(SECONDS) == [75, 75], first.stated()
    (reached,) = re.findall(
        r"^training\.max_minutes: stopped after step (\d+) of 2000; ", first.stated(), re.MULTILINE
    )
    events = [
        json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = {
        kind: [each["step"] for each in events if each["kind"] == kind]
        for kind in ("evaluate", "save", "stop")
    }
    assert newest(run) == int(reached) == steps["stop"][0] == steps["save"][-1]
    assert len(steps["evaluate"]) >= 2
    assert len(steps["save"]) >= 3
    assert steps["evaluate"][0] > 1, "not every step"
    last = start(
        warm, tmp_path, f"training.max_steps={int(reached) + 3}", "evaluation.at_start=true"
    )
    assert last.wait(SECONDS) == [0, 0], last.stated()


def test_a_second_request_ends_a_rank_that_cannot_stop(warm: WarmRanks, tmp_path: Path) -> None:
    job = start(warm, tmp_path)
    until(lambda: logged(tmp_path / "stops") >= 3, lives=lambda: not job.is_over())
    job.signal(signal.SIGSTOP, 1)  # as a rank that hangs
    job.signal(TERM, 0)
    until(
        lambda: "stopping after a step that all ranks agree on" in job.stated(0),
        lives=lambda: not job.is_over(),
    )
    time.sleep(2.5)
    assert not job.is_over()
    job.signal(TERM, 0)
    until(lambda: job.codes()[0] is not None, lives=lambda: True)
    job.signal(KILL, 1)
    assert job.wait(SECONDS) == [143, -9]
    assert "rank 0: SIGTERM again: ending at once" in job.stated(0)


def test_torchrun_asks_all_ranks(warm: WarmRanks, tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", *train_words(tmp_path)]
    job = launch(warm, "torch.distributed.run", *words, folder=tmp_path / "said")
    run = tmp_path / "stops"
    until(lambda: logged(run) >= 3, lives=lambda: not job.is_over())
    job.signal(TERM, 0)
    assert job.wait(SECONDS) != [0]
    stated = job.stated()
    assert f"SIGTERM: stopped after step {newest(run)} of 48" in stated
    assert "again" not in stated


def train_words(folder: Path, *, num_workers: int = 0) -> list[str]:
    """Return the words that a launcher starts on every rank, and write the config."""
    config = write_config(folder, num_workers=num_workers)
    return [str(ROOT / "train.py"), "--config", str(config)]


def launch_py(warm: WarmRanks, folder: Path, said: str) -> Job:
    """Start what `deepspeed --num_gpus 2` starts, and waits for."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    place = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={free_ports(1)}"]
    words = [*place, *train_words(folder, num_workers=1)]
    return launch(warm, "deepspeed.launcher.launch", *words, folder=folder / said)


def test_deepspeed_asks_one_rank_after_the_other_and_workers_leave_it_to_them(
    warm: WarmRanks, tmp_path: Path
) -> None:
    """launch.py signals the workers of rank 0, then rank 0, and rank 1 only when rank 0 has
    ended.
    """
    job = launch_py(warm, tmp_path, "first")
    run = tmp_path / "stops"
    until(lambda: logged(run) >= 3, lives=lambda: not job.is_over())
    job.signal(TERM, 0)
    assert job.wait(SECONDS) == [1], "launch.py ends with 1 whatever the ranks said"
    stated = job.stated()
    assert f"SIGTERM: stopped after step {newest(run)} of 48" in stated
    assert "again" not in stated
    assert "Traceback" not in stated

    job = launch_py(warm, tmp_path, "second")
    stopped = newest(run)
    until(lambda: logged(run) >= stopped + 3, lives=lambda: not job.is_over())
    (launcher,) = job.pids
    ranks = psutil.Process(launcher).children(recursive=True)
    assert len(ranks) >= 4, "two ranks with a worker each"
    job.kill(0)
    _, left = psutil.wait_procs(ranks, timeout=GONE_SECONDS)
    assert job.wait(SECONDS) == [-KILL]
    assert not left
    assert f"the launcher (process {launcher}) is gone" in job.stated()
