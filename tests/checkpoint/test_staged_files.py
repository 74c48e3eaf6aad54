"""Files that wait in memory: what happens where there is not enough of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.places import ROOT

SCARCE = """
import os, resource, sys
from pathlib import Path
from framework.checkpoint.save_stream import StagedFiles
staged = StagedFiles()
staged.open(Path("a")).write(bytes(int(sys.argv[1])))
before = os.fstat(staged.descriptor).st_size
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
data = bytes([7]) * (40 << 20)
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20), hard))
staged.clear()
try:
    staged.open(Path("a")).write(data)
except OSError as error:
    print(error.strerror, os.fstat(staged.descriptor).st_size == before)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
staged.clear()
staged.open(Path("a")).write(data)
print(os.pread(staged.descriptor, len(data) + 1, 0)[:len(data)] == data)
"""


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_a_save_that_finds_no_memory_fails_alone(num_bytes: int) -> None:
    """In a process of its own, whose memory is limited for a moment."""
    done = subprocess.run(
        [sys.executable, "-c", SCARCE, str(num_bytes)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["Cannot allocate memory True", "True"], done.stderr
