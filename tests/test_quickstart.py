"""What `./launch.sh` trains, to its end and as the first tutorial shows it: LeNet on digits, on two
processors.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from framework.system.metric_names import BY_NAME
from tests.launched import ROOT, TIMEOUT_SECONDS, job_environment

# From the first logged step to the last; a machine that does nothing else takes a tenth of it.
LONGEST_SECONDS = 120
SUMMARY = (
    "quickstart: finished after 220 steps",
    r"  final eval/accuracy  (0\.\d{4}|1\.0000)",
    r"  final eval/loss      0\.\d{4}",
    r"  final train/loss     0\.\d{4}",
    r"  throughput           [\d,]+ samples/s",
    r"  step                 [\d,]+\.\d ms: ((data|copy|forward|backward|communication|optimizer|other) \d+%(, |$))+",
    r"  goodput              [\d.]+% of \S.*: .*training [\d.]+ (s|min).*",
    "  run folder           runs/quickstart",
    "  report               runs/quickstart/report.html",
    r"  TensorBoard          (\.venv/bin/)?tensorboard --logdir runs",
    r"try next: \./launch\.sh train \S*ds_configs/quickstart\.yaml (run\.backend=gloo )?precision\.dtype=autocast "
    r"run\.name=second",
)


def check_summary(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) == len(SUMMARY), text
    for line, pattern in zip(lines, SUMMARY, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert float(lines[1].split()[-1]) >= 0.97


def test_the_tutorial_shows_what_is_printed() -> None:
    shown = re.search(
        r"```\n(quickstart: finished.*?)```",
        (ROOT / "docs/tutorials/first-run.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert shown
    check_summary(shown[1])


@pytest.mark.slow
def test_the_quickstart_trains_to_its_end(tmp_path: Path) -> None:
    """`run.backend` is what it would be anyway; given by name it goes another way through the
    code.
    """
    environment = job_environment(
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin", DSF_DOOR="./launch.sh"
    )
    environment.pop("DSF_SHELL_PATH", None)
    command = [
        sys.executable,
        "-m",
        "framework",
        "launch",
        str(ROOT / "ds_configs/quickstart.yaml"),
        "run.backend=gloo",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    check_summary(done.stdout[done.stdout.index("quickstart: finished") :])
    run = tmp_path / "runs" / "quickstart"
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert rows[-1]["time"] - rows[0]["time"] < LONGEST_SECONDS
    names = {name for row in rows for name in row} - {"step", "epoch", "time"}
    assert {name for name in names if not name.startswith("eval/")} <= set(BY_NAME)
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "Finished after 220 steps." in report
    assert {
        'id="chart-loss"',
        'id="chart-evaluation-0"',
        'id="chart-step-parts"',
        'id="chart-goodput"',
    } <= set(re.findall(r'id="chart-[\w-]+"', report))
    for rank in (0, 1):
        assert "dsf-trainer: step 220/220  epoch 20.00  loss 0." in (
            run / f"logs/rank{rank}.log"
        ).read_text(encoding="utf-8")
