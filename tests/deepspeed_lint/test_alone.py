"""The linter as a distribution of its own: it is installed alone, with PyYAML, and works without
torch, pydantic and the framework.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

import deepspeed_lint
from tests.places import ROOT

BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 4}}


def test_it_imports_the_standard_library_and_pyyaml() -> None:
    packages = set()
    for path in (ROOT / "deepspeed_lint").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.partition(".")[0])
    assert packages - sys.stdlib_module_names == {"deepspeed_lint", "yaml"}


@pytest.mark.slow
def test_it_works_installed_alone(tmp_path: Path) -> None:
    """The wheel is built as pip builds ``pip install ./deepspeed_lint``, and installed by pip into
    a fresh environment, which gets the PyYAML of this one: no index is used.
    """
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "deepspeed_lint", source, ignore=ignored)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=True
    )
    wheel = source / built.stdout.splitlines()[-1]
    venv.create(tmp_path / "fresh", with_pip=True)
    fresh = tmp_path / "fresh/bin"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    installed = run(fresh / "python", "-m", "pip", "install", "--no-index", "--no-deps", wheel)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    site = next((tmp_path / "fresh/lib").glob("python*/site-packages"))
    shutil.copytree(Path(yaml.__file__).parent, site / "yaml")
    folders = {path.name for path in site.iterdir()}
    assert {"deepspeed_lint", f"deepspeed_lint-{deepspeed_lint.__version__}.dist-info"} <= folders
    assert not {"framework", "torch", "pydantic"} & folders
    files = {path.relative_to(site).as_posix() for path in (site / "deepspeed_lint").rglob("*")}
    for path in (ROOT / "deepspeed_lint").rglob("*"):
        if path.suffix in (".json", ".typed"):
            assert path.relative_to(ROOT).as_posix() in files

    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    checked = run(fresh / "deepspeed-lint", "check", "ds.json", "--json")
    assert checked.returncode == 2, checked.stderr
    assert "wrong-value" in [problem["kind"] for problem in json.loads(checked.stdout)]
    as_module = run(fresh / "python", "-m", "deepspeed_lint", "check", "ds.json", "--json")
    assert as_module.stdout == checked.stdout
    explained = run(fresh / "deepspeed-lint", "explain", "zero_optimization.stage")
    assert explained.stdout.startswith("zero_optimization.stage\n  meaning"), explained.stderr
    schema = run(fresh / "deepspeed-lint", "schema")
    assert json.loads(schema.stdout)["title"].startswith("DeepSpeed ")
    assert run(fresh / "deepspeed-lint", "fix", "ds.json").returncode == 2
    assert run(fresh / "deepspeed-lint", "resolve", "ds.json").returncode == 2
