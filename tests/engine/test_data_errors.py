"""What one rank of a real job meets is told in one line, whichever rank it is; the traceback is in
its log.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm_ranks import Job, WarmRanks

pytestmark = pytest.mark.slow

PARTS = "tests.jobs.failing_parts"
CONFIG = f"""
run: {{name: fails}}
model: {{target: "torch.nn:Linear", args: {{in_features: 3, out_features: 2}}}}
data: {{target: "{PARTS}:rows"}}
task: {{target: "torch.nn:CrossEntropyLoss"}}
batch: {{global_size: 8, micro_size: 4}}
training: {{max_steps: 4, log_every: 1}}
evaluation: {{every_steps: 2}}
monitors: {{tensorboard: false}}
"""
DAMAGED = "there/dog/7.jpg: cannot be read as an image; replace it [image-damaged]"
KILLED = (
    "rank 1: a worker that reads the data is killed by signal: Killed: the host, or the memory limit of this job, has "
    "no room for it: set data.num_workers or data.prefetch_batches lower [data-worker-ended]"
)
FULL = (
    "rank 1: the device has no memory left (2.00 GiB were asked for, 1.06 GiB of 79.15 GiB are free) in the forward "
    "pass; set a smaller batch.micro_size (batch.global_size may stay), training.recompute_every, a higher zero.stage "
    "or zero.offload_optimizer [out-of-memory]"
)
WORKERS = "data.num_workers=1"


def data(name: str, **arguments: str) -> str:
    args = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return f"data={{target: '{PARTS}:{name}', args: {{{args}}}}}"


FAILURES: dict[str, tuple[list[str], str, str, int]] = {
    "memory": ([f"task.target={PARTS}:loss_without_memory"], FULL, "OutOfMemoryError: CUDA", 70),
    "sample": ([data("unreadable")], DAMAGED, "OSError: image file is truncated", 70),
    "sample-of-worker": (
        [data("unreadable"), WORKERS],
        DAMAGED,
        "OSError: image file is truncated",
        70,
    ),
    "evaluation-of-worker": (
        [data("unreadable_in_evaluation"), WORKERS],
        DAMAGED,
        "is truncated",
        70,
    ),
    "problem-of-worker": (
        [data("unreadable", how="problem"), WORKERS],
        "data.root = there: it is torn [dataset-torn]",
        "worker",
        78,
    ),
    "worker-killed": (
        [data("unreadable", how="killed"), WORKERS],
        KILLED,
        "DataLoader worker (pid",
        70,
    ),
}


@pytest.fixture(scope="module")
def failing(
    warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Job, Path]]:
    """All of them at once: each waits some seconds for the rank that is gone."""
    jobs = {}
    for name, (settings, *_) in FAILURES.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "fails.yaml").write_text(CONFIG, encoding="utf-8")
        jobs[name] = (
            warm.start(["--config", "fails.yaml", *settings], num_ranks=2, folder=folder),
            folder,
        )
    return jobs


@pytest.mark.parametrize("name", FAILURES)
def test_it_is_one_line(failing: dict[str, tuple[Job, Path]], name: str) -> None:
    (_, line, behind, code), (job, folder) = FAILURES[name], failing[name]
    codes = job.wait(120, alone_seconds=60)
    assert codes == [76, code], job.stated()
    assert job.stated(1).splitlines() == [line]
    assert "Traceback" not in job.stated(0)
    log = (folder / "runs/fails/logs/rank1.log").read_text(encoding="utf-8")
    assert line in log
    assert "Traceback" in log
    assert behind in log


def test_what_all_ranks_meet_is_one_line(tmp_path: Path, warm: WarmRanks) -> None:
    (tmp_path / "fails.yaml").write_text(CONFIG, encoding="utf-8")
    arguments = ["--config", "fails.yaml", data("unreadable", rank="all"), WORKERS]
    job = warm.start(arguments, num_ranks=2, folder=tmp_path)
    job.wait(120, alone_seconds=60)
    assert job.stated(0).splitlines()[-1] == DAMAGED
    # A rank that comes to its sample after rank 0 has ended cannot ask it any more, and tells it
    # too. Torch may complain that the store has gone.
    stated = job.stated(1)
    assert stated.count("image-damaged") == stated.splitlines().count(DAMAGED) <= 1
    assert "Traceback" not in stated
