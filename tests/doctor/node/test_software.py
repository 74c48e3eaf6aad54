"""Hashes of code: changes that they show, and changes that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import framework
from framework.doctor.node.software import hash_of_files, hash_of_framework


def test_another_table_of_the_framework_is_another_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "words.json").write_text('{"lr": "lr"}')
    monkeypatch.setattr(framework, "__file__", str(tmp_path / "__init__.py"))
    before = hash_of_framework()
    (tmp_path / "data.bin").write_text("of no interest")
    assert hash_of_framework() == before
    (tmp_path / "words.json").write_text('{"lr": "rate"}')
    assert hash_of_framework() != before


def test_of_a_users_folder_the_code_is_hashed_and_not_the_data(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("a = 1")
    before = hash_of_files(tmp_path)
    (tmp_path / "data.json").write_text("[]")
    assert hash_of_files(tmp_path) == before
    (tmp_path / "nets.py").write_text("a = 2")
    assert hash_of_files(tmp_path) != before
