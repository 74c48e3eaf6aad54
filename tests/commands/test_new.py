"""`new` writes a project whose config is fine, whose code is clean, and which trains; or
nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepspeed_lint.text.document import read_document
from framework.cli import main
from framework.config.schema import schema_text
from tests.launched import NO_COMPILE, TIMEOUT_SECONDS, copied_op
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


def commands_of_readme(project: Path) -> str:
    """Return the block of commands of the project's README."""
    text = (project / "README.md").read_text(encoding="utf-8")
    return text.split("```")[1]


def bare_shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines in a shell that knows nothing of this Python but what they say."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    # dsf is installed from another checkout than the one under test
    environment["PYTHONPATH"] = str(ROOT)
    environment[NO_COMPILE] = "1"
    environment["TORCH_EXTENSIONS_DIR"] = copied_op(folder / ".ops")
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.slow
def test_every_command_of_the_readme_works_as_it_stands(project: Path) -> None:
    config = project / "run.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("max_epochs: 6", "max_epochs: 2"), encoding="utf-8")
    script = commands_of_readme(project)
    assert script.count("\n") == 6
    done = bare_shell(script, project)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-3000:]
    assert "Ran 2 tests" in printed
    assert "run.yaml: fine on 8 devices" in printed
    # evaluated without a word about trust: this user has trained it here
    assert json.loads(done.stdout[done.stdout.rindex('{\n  "checkpoint') :])["step"] == 44


@pytest.mark.slow
def test_the_schema_of_the_config_lies_beside_it(project: Path) -> None:
    first = (project / "run.yaml").read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert match
    schema = json.loads((project / match[1]).read_text(encoding="utf-8"))
    assert schema == json.loads(schema_text())
    values = read_document(project / "run.yaml", name="run.yaml").value
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "batch": {"global_sise": 64}}, schema)


@pytest.mark.parametrize("is_on_path", [True, False])
def test_the_last_lines_start_a_training(
    is_on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in ("dsf", "activate"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.setenv("DSF_SHELL_PATH", str(tmp_path / "bin") if is_on_path else "/bin")
    assert main(["new", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    activate = f"source {tmp_path}/bin/activate"
    assert lines[lines.index("") + 1 :] == (
        ["cd mine", "dsf train run.yaml"]
        if is_on_path
        else ["cd mine", activate, "dsf train run.yaml"]
    )
    assert commands_of_readme(tmp_path / "mine").splitlines()[1] == activate


def test_without_the_program_python_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a b/python"))
    assert main(["new", "mine"]) == 0
    python = f"'{tmp_path}/a b/python'"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"export PYTHONPATH={ROOT}",
        f"{python} -m framework train run.yaml",
    ]
    assert f"{python} -m unittest " in commands_of_readme(tmp_path / "mine")


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
