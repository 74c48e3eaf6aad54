"""What goes wrong on one stage ends the whole job, soon, and says what it was."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launched import ROOT, job_environment
from tests.ports import free_ports
from tests.warm_ranks import WarmRanks

pytestmark = [pytest.mark.slow, pytest.mark.timing]

SOON_SECONDS = 30.0
PARTS = "tests.jobs.pipe_parts"
CONFIG = f"""
run: {{name: fails}}
model: {{target: "{PARTS}:rows"}}
data: {{target: "{PARTS}:points"}}
task: {{target: "torch.nn:CrossEntropyLoss"}}
batch: {{global_size: 4, micro_size: 2}}
parallel: {{pipe: 2}}
optimizer: {{kind: sgd, lr: 0.1}}
training: {{max_steps: 40, log_every: 1}}
evaluation: {{every_steps: 2}}
monitors: {{tensorboard: false}}
"""


@dataclass(frozen=True)
class Harm:
    """What is changed in the config, and what must be said of it."""

    settings: tuple[str, ...]
    words: str
    # 76: the rank that waits for it was seen to end first
    codes: set[int] = field(default_factory=lambda: {70, 76})


def failing(how: str, call: int) -> str:
    return f"model={{target: '{PARTS}:failing', args: {{how: {how}, call: {call}}}}}"


# The fifth call of the last stage's layer is in the third step.
HARMS = {
    "layer-raises": Harm((failing("raise", 5),), "ValueError: the layer has had enough"),
    "killed": Harm((failing("kill", 5),), "[peer-lost]", {76, -9, 137, 1, 247}),
    "evaluation-raises": Harm((failing("eval", 1),), "ValueError: the layer has had enough"),
    "data-raises": Harm(
        (f"data={{target: '{PARTS}:breaking', args: {{how: raise}}}}",),
        "OSError: sample 25 is gone",
    ),
    "data-ends": Harm(
        (f"data={{target: '{PARTS}:breaking', args: {{how: end}}}}",), "[training-data-ended]"
    ),
    "loss-is-no-number": Harm(
        (f"task.target={PARTS}:unmeaned_loss",), "a tensor of shape (2,)", {76, 78}
    ),
    "shapes-differ": Harm(
        (
            f"data={{target: '{PARTS}:ragged'}}",
            f"model.target={PARTS}:reader",
            "batch.micro_size=1",
        ),
        "[batch-shapes-differ]",
    ),
}


# Otherwise ranks alone: how launchers end is held where campaigns kill their ranks.
LAUNCHED = [
    pytest.param("killed", "deepspeed", marks=pytest.mark.exhaustive),
    pytest.param("layer-raises", "torchrun", marks=pytest.mark.exhaustive),
]


def command(launcher: str) -> list[str]:
    scripts = Path(sys.executable).parent
    return {
        "torchrun": [str(scripts / "torchrun"), "--standalone", "--nproc-per-node", "2"],
        "deepspeed": [
            str(scripts / "deepspeed"),
            "--num_gpus",
            "2",
            "--master_port",
            str(free_ports(1)),
        ],
    }[launcher]


def harmed_at(folder: Path, otherwise: float) -> float:
    return max((float(path.read_text()) for path in folder.glob("harmed-*")), default=otherwise)


def launched(launcher: str, arguments: list[str], folder: Path) -> tuple[set[int], str]:
    """Exit code and output of a launcher."""
    env = job_environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    done = subprocess.run(
        [*command(launcher), str(ROOT / "train.py"), *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return {done.returncode}, done.stdout + done.stderr


def started(warm: WarmRanks, arguments: list[str], folder: Path) -> tuple[set[int], str]:
    """Exit codes and output of the ranks."""
    job = warm.start(arguments, num_ranks=2, folder=folder)
    return set(job.wait(120, alone_seconds=15)), job.stated()


@pytest.mark.parametrize(
    ("name", "launcher"),
    [*((name, "warm") for name in HARMS), *LAUNCHED],
)
def test_the_whole_job_ends_and_gives_the_reason(
    tmp_path: Path, warm: WarmRanks, name: str, launcher: str
) -> None:
    (tmp_path / "fails.yaml").write_text(CONFIG, encoding="utf-8")
    harm, begin = HARMS[name], time.time()
    arguments = ["--config", "fails.yaml", *harm.settings]
    codes, stated = (
        started(warm, arguments, tmp_path)
        if launcher == "warm"
        else launched(launcher, arguments, tmp_path)
    )
    assert codes <= ({1} if launcher == "torchrun" else harm.codes), stated
    assert harm.words in stated, stated
    assert time.time() - harmed_at(tmp_path, begin + 30) < SOON_SECONDS, stated
    assert "finished after" not in stated
    deadline = time.monotonic() + 30  # workers look every five seconds for their rank
    while (left := left_running(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that work in this folder still."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve():
                found.append(re.sub(r"\0", " ", (process / "cmdline").read_text()))
        except OSError:
            continue
    return found
