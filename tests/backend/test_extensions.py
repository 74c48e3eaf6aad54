"""Compiled ops have a folder for each environment and each ninja: sharing one, they would be compiled at every start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from framework.backend.extensions import use_own_cache


def cache(monkeypatch: pytest.MonkeyPatch, path: str) -> str:
    with monkeypatch.context() as patch:
        patch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        patch.setenv("PATH", path)
        use_own_cache()
        return os.environ.pop("TORCH_EXTENSIONS_DIR")


def test_each_ninja_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("system", "environment"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ninja").write_text("#!/bin/sh\n")
        (tmp_path / name / "ninja").chmod(0o755)
    first, second = (cache(monkeypatch, str(tmp_path / name)) for name in ("system", "environment"))
    assert first != second
    assert first == cache(monkeypatch, f"{tmp_path / 'system'}:{tmp_path / 'environment'}")


def test_the_users_own_folder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    use_own_cache()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/somewhere"
