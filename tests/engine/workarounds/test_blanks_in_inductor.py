"""Compiled functions in a folder with a blank in its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import found_by_ranks


@pytest.mark.slow
def test_a_folder_with_a_blank(tmp_path: Path) -> None:
    plain, quoted = found_by_ranks("blank_folders.py", num_ranks=1, folder=tmp_path)
    assert "CppCompileError" in plain, "not needed any more"
    assert quoted == "600.0"
    assert list((tmp_path / "c d/headers").glob("*.gch")), "a header was compiled"
