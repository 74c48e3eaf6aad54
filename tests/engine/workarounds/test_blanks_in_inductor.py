"""Compiled functions in a folder with a blank in its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import NO_COMPILE, job_environment

SCRIPT = """
import sys
from contextlib import nullcontext
import torch
from framework.engine.workarounds.blanks_in_inductor import quoting_paths

rows = torch.ones(300)
with quoting_paths() if "quoting" in sys.argv else nullcontext():
    found = torch.compile(lambda rows: (2 * rows).relu().sum())(rows)
print(float(found))
"""


def compiled(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir(parents=True)
    paths = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=job_environment(**paths, **{NO_COMPILE: "0"}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_folder_with_a_blank(tmp_path: Path) -> None:
    assert "CppCompileError" in compiled(tmp_path / "a b").stderr, "not needed any more"
    found = compiled(tmp_path / "c d", "quoting")
    assert found.stdout == "600.0\n", found.stderr[-3000:]
