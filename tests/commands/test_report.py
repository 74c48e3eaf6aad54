"""The command `report`: what it writes where, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from framework.cli import main
from tests.places import ROOT
from tests.report.made_runs import write_run

Capture = pytest.CaptureFixture[str]


def test_the_page_lies_in_the_run_folder(tmp_path: Path, capsys: Capture) -> None:
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == (
        "run: finished after 100 steps; compute-bound: forward and backward take 78% of a step, at 35% of the device's "
        f"peak (MFU)\nreport: {folder}/report.html\n"
    )
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_charts_and_another_place(tmp_path: Path, capsys: Capture) -> None:
    folders = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    out, charts = tmp_path / "new/page.html", tmp_path / "charts"
    assert main(["report", *folders, "--out", str(out), "--svg", str(charts)]) == 0
    assert capsys.readouterr().out.endswith(f"report: {out}\n")
    assert "2 runs: a, b" in out.read_text()
    assert {"loss.svg", "step-parts.svg", "memory-plan.svg", "goodput.svg"} <= {
        path.name for path in charts.iterdir()
    }
    assert not (tmp_path / "a/report.html").exists()


def test_figures_as_json_leave_no_page(tmp_path: Path, capsys: Capture) -> None:
    folder = write_run(tmp_path / "run\x7f")
    assert main(["report", str(folder), "--json"]) == 0
    out = capsys.readouterr().out
    (found,) = json.loads(out, parse_constant=pytest.fail)
    assert (found["name"], found["verdict"]["kind"]) == ("run\x7f", "compute-bound")
    assert "\x7f" not in out
    assert not (folder / "report.html").exists()


def test_figures_that_are_not_known_are_no_nan(tmp_path: Path, capsys: Capture) -> None:
    folder = write_run(
        tmp_path / "run", lines=[{"step": 1, "train/loss": None, "eval/x": None}], events=None
    )
    assert main(["report", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["goodput"], found["last"], found["verdict"]["kind"]) == (None, {}, "unknown")


@pytest.mark.parametrize(
    ("words", "code", "stated"),
    [
        (
            ["nowhere"],
            78,
            "nowhere: the run folder cannot be read (No such file or directory); check the path ",
        ),
        ([str(ROOT / "docs")], 78, "it is no run folder"),
        ([], 64, "the following arguments are required: RUN"),
        (["RUN", "--port", "80000"], 64, "80000 is not a port; write 0 to 65535"),
        (["RUN", "--port", "8000"], 64, "report: --port goes with --serve"),
        (["RUN", "--out", "/proc/nowhere/x.html"], 74, "it cannot be written"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], code: int, stated: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = write_run(tmp_path / "run")
    try:
        found = main(["report", *(word.replace("RUN", str(folder)) for word in words)])
    except SystemExit as end:
        found = int(end.code or 0)
    out, err = capsys.readouterr()
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert stated in err


def test_serve_prints_where_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "framework", "report", str(folder), "--serve"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            address, _, rest = process.stdout.readline().partition(" ")
            assert rest == "follows the run; Ctrl-C ends it\n"
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert b"Finished after 100 steps" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
