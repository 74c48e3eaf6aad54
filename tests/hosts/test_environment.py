"""The helper of launch.sh that lists what an environment has and lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from framework.hosts import environment
from tests.places import ROOT


def test_reads_pyproject_as_a_toml_reader_does() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in ((), ("train",), ("train", "dev")):
        expected = list(project["dependencies"])
        for extra in extras:
            expected += project["optional-dependencies"][extra]
        assert environment.requirements(extras) == expected


def test_every_requirement_is_a_name_with_a_floor() -> None:
    # `missing` understands nothing else.
    for requirement in environment.requirements(["train", "dev"]):
        name, separator, floor = requirement.partition(">=")
        assert separator
        assert re.fullmatch(r"[\w.-]+", name)
        assert environment._release(floor)


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(SystemExit, match="no extra nonsense"):
        environment.requirements(["nonsense"])


def test_sorts_requirements_into_present_missing_and_too_old() -> None:
    version = metadata.version("pytest")
    absent, too_old = environment.missing(["pytest>=1", "no-such-thing>=2", "pytest>=999"])
    assert absent == ["no-such-thing>=2"]
    assert too_old == [("pytest", version, "999")]
    assert str(too_old[0]) == f"pytest {version} is older than 999"


@pytest.mark.parametrize(
    ("version", "floor", "enough"),
    [
        ("2.10.0a0+git", "2.10", True),
        ("2.9.1", "2.10", False),
        ("2.10", "2.10.0", True),
        ("3", "2.10", True),
        ("77.0", "77", True),
    ],
)
def test_compares_versions(version: str, floor: str, *, enough: bool) -> None:
    assert (environment._release(version) >= environment._release(floor)) is enough


def test_the_stamp_follows_the_files_and_the_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("a")
    (tmp_path / "constraints.txt").write_text("b")
    first = environment.stamp(["train"])
    assert environment.stamp(["train"]) == first
    assert environment.stamp(["train", "dev"]) != first
    (tmp_path / "constraints.txt").write_text("c")
    assert environment.stamp(["train"]) != first


def test_runs_alone_and_lists_what_is_installed(tmp_path: Path) -> None:
    # -S: no site-packages, as on a bare Python.
    command = [
        sys.executable,
        "-S",
        str(ROOT / "framework/hosts/environment.py"),
        "missing",
        "train",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "torch>=2.10" in done.stdout.splitlines()
    assert f"pytest=={metadata.version('pytest')}" in environment.installed()
