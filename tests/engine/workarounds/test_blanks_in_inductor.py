"""Compiled functions in a folder with a blank in its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import ROOT, run_ranks


@pytest.mark.slow
def test_a_folder_with_a_blank(tmp_path: Path) -> None:
    run_ranks(ROOT / "tests/jobs/blank_folders.py", str(tmp_path), num_ranks=2, cwd=tmp_path)
    plain, quoted = ((tmp_path / name).read_text(encoding="utf-8") for name in ("0", "1"))
    assert "CppCompileError" in plain, "not needed any more"
    assert quoted == "600.0"
    assert list((tmp_path / "a 1" / "headers").glob("*.gch")), "a header was compiled"
