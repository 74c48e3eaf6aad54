"""Modules that a run config names are looked for without running any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.commands.target_search import missing_targets
from framework.config.load import config_from_values

BREAKS = "raise SystemExit('check must not import')\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "single.py").write_text(BREAKS)
    for name in ("package", "package/inner", "namespace/inner"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "package/__init__.py").write_text(BREAKS)
    (tmp_path / "package/nets.py").write_text(BREAKS)
    (tmp_path / "package/inner/__init__.py").write_text(BREAKS)
    (tmp_path / "namespace/inner/code.py").write_text(BREAKS)


def missing(target: str, section: str = "model", **more: Any) -> list[str]:
    config = config_from_values({section: {"target": target}, **more})
    return [problem.reason for problem in missing_targets(config)]


@pytest.mark.parametrize(
    "module",
    [
        "single",
        "package",
        "package.nets",
        "package.inner",
        "namespace.inner.code",
        "json",
        "json.decoder",
        "math",
        "pydantic.fields",
        "torch.nn",
        "torchvision.models",
        "framework.recipes.image_models.small_nets",
        "train",
    ],
)
def test_what_is_there_is_found_and_not_run(module: str) -> None:
    assert missing(f"{module}:x") == []


@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("nowhere", "nowhere"),
        ("nowhere.nets", "nowhere"),
        ("package.nts", "package.nts"),
        ("package.inner.x.y", "package.inner.x"),
        ("single.x", "single.x"),
        ("namespace.outer", "namespace.outer"),
        ("json.nothing", "json.nothing"),
    ],
)
def test_what_is_nowhere_is_named(module: str, first: str) -> None:
    assert missing(f"{module}:x") == [f"there is no module {first} here"]


@pytest.mark.parametrize("section", ["model", "data", "task", "optimizer"])
def test_every_section_that_may_name_code(section: str) -> None:
    config = config_from_values({section: {"target": "nowhere.at_all:x"}})
    (problem,) = missing_targets(config)
    assert (problem.key, problem.kind, problem.severity) == (
        f"{section}.target",
        "target-not-found",
        "warning",
    )
