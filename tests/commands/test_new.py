"""`new` writes a project whose config is fine, whose code is clean, and which trains; or
nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.cli import main
from tests.launched import TIMEOUT_SECONDS, run_ranks
from tests.places import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-digits"]) == 0
    return tmp_path / "my-digits"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
    }
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_the_project_has_no_place_holders_and_clean_code(project: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file()]
    assert {".gitignore", "Dockerfile", "model.py", "data.py", "task.py", "test_training.py"} <= {
        p.name for p in files
    }
    assert not [path for path in files if "@" in path.read_text("utf-8")]
    pytest.importorskip("ruff", reason="ruff comes with the dev extra")
    checked = run(project, "ruff", "check", "--isolated", ".")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_the_project_trains_and_its_tests_pass(project: Path) -> None:
    checked = run(project, "framework", "check", "run.yaml", "--num_gpus", "8")
    assert "run.yaml: fine on 8 devices" in checked.stdout
    words = ("-q", "-p", "no:cacheprovider", "--override-ini=pythonpath=.")
    assert "2 passed" in run_ranks(
        Path(pytest.__file__).with_name("__main__.py"), *words, num_ranks=1, cwd=project
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch", "package torch already"),
        ("1x", "no name"),
        ("class", "no name"),
        ("full", "not an empty folder"),
    ],
)
def test_what_is_no_name_writes_nothing(
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    assert main(["new", name]) == 64
    assert reason in capsys.readouterr().err
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "full",
        "full/mine.txt",
    ]


@pytest.mark.parametrize(
    "name", ["n" * 300, "/proc/x", "/proc/x/y", "file/x", "n" * 60 + "/" + "m" * 300]
)
def test_a_place_that_cannot_be_written_to_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["new", name]) == 74
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("new: ")
    assert printed.endswith("take another place or name [file-not-written]\n")
    assert len(printed) < 250
