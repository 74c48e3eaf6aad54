"""train.py as a person starts it: three launchers, one run; and wrong input refused in one line
before anything starts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launched import ROOT, TIMEOUT_SECONDS, job_environment, read_metrics, run_ranks
from tests.ports import free_ports
from tests.warm_ranks import WarmRanks

pytestmark = [pytest.mark.slow, pytest.mark.timing]

CONFIG = """
run: {name: start}
model: {kind: lenet}
data: {kind: synthetic_images, image_size: 28, channels: 1, num_classes: 10, num_samples: 1437, num_eval_samples: 360}
batch: {global_size: 60}
zero: {stage: 1}
training: {max_steps: 8, log_every: 2}
"""


def launcher(name: str, num_ranks: int) -> list[str]:
    scripts = Path(sys.executable).parent
    return {
        "python": [sys.executable],
        "torchrun": [str(scripts / "torchrun"), "--standalone", "--nproc-per-node", str(num_ranks)],
        "deepspeed": [
            str(scripts / "deepspeed"),
            "--num_gpus",
            str(num_ranks),
            "--master_port",
            str(free_ports(1)),
        ],
    }[name]


def start(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH of the tests would hide that train.py must find the framework by itself.
    env = job_environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin", **environment) | {
        "PYTHONPATH": ""
    }
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def learnt(run: Path) -> list[tuple[Any, ...]]:
    return [
        (row["step"], row.get("train/loss"), row.get("eval/accuracy")) for row in read_metrics(run)
    ]


# How a run under DeepSpeed's launcher begins and ends is held below and in tests/test_stopping.py.
@pytest.mark.parametrize(
    ("num_ranks", "launchers"),
    [
        (1, ("python",)),
        (2, ("torchrun",)),
        pytest.param(2, ("deepspeed",), marks=pytest.mark.exhaustive),
    ],
)
def test_every_launcher_gives_the_same_run(
    warm: WarmRanks, tmp_path: Path, num_ranks: int, launchers: tuple[str, ...]
) -> None:
    (tmp_path / "start.yaml").write_text(CONFIG, encoding="utf-8")
    job = warm.start(
        ["--config", "start.yaml", "run.name=ranks"], num_ranks=num_ranks, folder=tmp_path
    )
    assert not any(job.wait(TIMEOUT_SECONDS)), job.stated()
    seen = [learnt(tmp_path / "runs/ranks")]
    for name in launchers:
        command = [
            *launcher(name, num_ranks),
            str(ROOT / "train.py"),
            "--config",
            "start.yaml",
            f"run.name={name}",
        ]
        done = start(command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "final eval/accuracy" in done.stdout
        assert f"runs/{name}" in done.stdout
        seen.append(learnt(tmp_path / "runs" / name))
    assert all(other == seen[0] for other in seen)
    assert len(seen[0]) == 5
    files = {path.name for path in (tmp_path / "runs" / launchers[0]).iterdir()}
    assert files >= {
        "config.yaml",
        "ds_config.json",
        "plan.json",
        "report.html",
        "environment.json",
        "metrics.jsonl",
        "metrics.csv",
        "events.jsonl",
        "tensorboard",
        "logs",
        "checkpoints",
    }
    measured = json.loads(
        (tmp_path / "runs" / launchers[0] / "plan.json").read_text(encoding="utf-8")
    )["measured"]
    assert measured["step_seconds"]["measured"] > 0
    assert measured["device_peak_bytes"]["measured"] is None  # on processors
    logs = {path.name for path in (tmp_path / "runs" / launchers[0] / "logs").iterdir()}
    assert logs == {f"rank{rank}.log" for rank in range(num_ranks)}


WRONG = {
    "unknown-key": (["trainin.max_steps=3"], 78, "[unknown-key]"),
    "batch": (["batch.global_size=61", "batch.micro_size=2"], 78, "[batch-not-divisible]"),
    "bad-module": (["model={target: 'broken:Net'}"], 78, "[target-import-failed]"),
    "world-size": (["run.world_size=2"], 78, "[world-size-differs]"),
    "not-a-setting": (["max_steps"], 64, "max_steps"),
}


# What takes torch to find, and so seconds, is in tests/setup/test_prepare_run.py; one of those is
# here.
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing_behind(tmp_path: Path, case: str) -> None:
    (tmp_path / "start.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import torch\n\nwidth = 1 / 0\n", encoding="utf-8")
    before = sorted(path.name for path in tmp_path.iterdir())
    overrides, code, expected = WRONG[case]
    done = start(
        [sys.executable, str(ROOT / "train.py"), "--config", "start.yaml", *overrides], tmp_path
    )
    reported = [line for line in done.stderr.splitlines() if "[kind" in line or expected in line]
    assert done.returncode == code, done.stdout + done.stderr
    assert len(reported) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    done = start([sys.executable, str(ROOT / "train.py"), "--config", "nowhere.yaml"], tmp_path)
    assert done.returncode == 78
    assert done.stderr == (
        "nowhere.yaml: there is no such file; check the path [config-not-found]\n"
    )


def test_only_one_rank_speaks_and_the_launcher_reports_the_code(tmp_path: Path) -> None:
    (tmp_path / "start.yaml").write_text(CONFIG, encoding="utf-8")
    command = [
        *launcher("deepspeed", 2),
        str(ROOT / "train.py"),
        "--config",
        "start.yaml",
        "zero.stage=7",
    ]
    done = start(command, tmp_path)
    assert done.returncode == 78
    assert (done.stdout + done.stderr).count("zero.stage = 7") == 1


def examples() -> dict[str, str]:
    """The Python of the page on a model of one's own: the ten lines, and a task."""
    page = (ROOT / "docs/tutorials/own-model.md").read_text(encoding="utf-8")
    return dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', page, re.DOTALL))


def test_the_ten_lines_of_the_page_train_a_plain_module(tmp_path: Path) -> None:
    check = 'assert result.metrics["train/loss"] < 0.3, result\n'
    (tmp_path / "mine.py").write_text(examples()["mine.py"] + check, encoding="utf-8")
    run_ranks(tmp_path / "mine.py", num_ranks=2, cwd=tmp_path)
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "latest").exists()
    config = (tmp_path / "runs" / "mine" / "config.yaml").read_text(encoding="utf-8")
    assert "torch.nn.modules.container.Sequential" in config


# A line through the origin, fitted on 64 samples and evaluated on 24: the mean error must be that
# over all of them.
_FIT = """
torch.manual_seed(0)
x = torch.randn(88, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5])
samples = torch.utils.data.TensorDataset(x, y)
net = torch.nn.Linear(3, 1)
config = {"run": {"name": "own-task"}, "batch": {"global_size": 16}, "training": {"max_epochs": 40},
          "optimizer": {"kind": "adamw", "lr": 0.05, "weight_decay": 0.0}}
result = framework.fit(config, model=net, train_data=torch.utils.data.Subset(samples, range(64)),
                       eval_data=torch.utils.data.Subset(samples, range(64, 88)), task=Distance())
with torch.no_grad():
    expected = (net(x[64:]).squeeze(1) - y[64:]).abs().mean().item()
assert abs(result.metrics["eval/mean_error"] - expected) < 1e-6, (result, expected)
assert result.metrics["eval/mean_error"] < 0.1, result
import sys
assert "mlflow" not in sys.modules, "DeepSpeed's autotuner imports it, for a second"
"""


# A second run of the same script, whose own code fails while it trains.
_FAIL = """
import atexit

class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        raise OSError("the disk is gone")

atexit.register(print, "exit handlers would wait for other ranks")
print("the first run is over")
framework.fit(config | {"run": {"name": "failing"}}, model=net, train_data=Unreadable(), task=Distance())
"""


def test_the_task_of_the_page_trains_and_measures(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(examples()["my_tasks.py"] + _FIT + _FAIL, encoding="utf-8")
    env = job_environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    done = subprocess.run(
        [sys.executable, "own.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 70, done.stdout + done.stderr
    assert "the first run is over" in done.stdout
    assert "exit handlers" not in done.stdout
    assert "OSError: the disk is gone" in done.stderr
    assert "Traceback" in done.stderr, "it is the user's own code that failed"
    assert "try next" not in done.stdout, (
        "a script of one's own takes no settings from the command line"
    )
