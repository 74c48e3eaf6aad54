"""Where train.py is: in a checkout, in a wheel that is unpacked anywhere, and next to a foreign
file of that name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import framework
from framework.launch.deepspeed_command import find_train_script
from tests.places import ROOT

BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"


def test_in_a_checkout_it_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert find_train_script() == Path("train.py")
    monkeypatch.chdir(tmp_path)
    assert find_train_script() == ROOT / "train.py"


def test_a_file_of_that_name_among_installed_packages_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('not ours')")
    monkeypatch.setattr(framework, "__file__", str(tmp_path / "framework/__init__.py"))
    assert find_train_script() == tmp_path / "framework/entry/train.py"


PACKAGES = ("deepspeed_lint", "framework")


def data_files() -> set[str]:
    """List the files below the packages that are read and are no Python."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    return {
        path.relative_to(ROOT).as_posix() for path in files if path.suffix in (".json", ".typed")
    }


@pytest.mark.slow
def test_an_installed_copy_starts_its_own(tmp_path: Path) -> None:
    """The wheel is built as pip builds it; `pip install` unpacks it where the scheme puts it, and
    nothing of it lies outside of the packages.
    """
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    site = tmp_path / "elsewhere/site-packages"
    with zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist()} == {
            *PACKAGES,
            "dsf_trainer-0.1.0.dist-info",
        }
        assert "dsf_trainer-0.1.0.dist-info/licenses/LICENSE" in wheel.namelist()
        # Schemas, tables, and py.typed, without which mypy takes the package for one without
        # annotations.
        assert {*data_files(), "framework/py.typed"} <= set(wheel.namelist())
        wheel.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "DS_ACCELERATOR": "cpu"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path / "elsewhere",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    program = "import sys; from importlib.metadata import entry_points; sys.argv[0] = 'dsf'; "
    program += "(dsf,) = entry_points(group='console_scripts', name='dsf'); sys.exit(dsf.load()())"
    checked = run("-c", program, "check", str(ROOT / "ds_configs/quickstart.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert "quickstart.yaml: fine on 1 device" in checked.stdout
    shown = run("-m", "framework", "launch", str(ROOT / "ds_configs/quickstart.yaml"), "--dry_run")
    assert " site-packages/framework/entry/train.py --config " in shown.stdout, shown.stderr
    script = site / "framework/entry/train.py"
    refused = run(str(script), "--config", "none.yaml")
    assert (refused.returncode, refused.stderr.count("\n")) == (78, 1)
    assert "[config-not-found]" in refused.stderr
    reported = run(
        "-c",
        f"import sys; sys.path[0] = {str(script.parent)!r}; import framework; print(framework.__file__)",
    )
    assert reported.stdout.strip() == str(site / "framework/__init__.py")
