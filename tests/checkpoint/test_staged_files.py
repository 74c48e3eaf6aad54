"""Files that wait in memory: what happens where there is not enough of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from framework.checkpoint import save_stream
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
        [sys.executable, "-c", SCARCE, str(num_bytes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["Cannot allocate memory True", "True"], done.stderr


@pytest.mark.slow
def test_a_large_copy_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's lock is free between two pieces of a copy: a request to stop is heard in the middle
    of 50 GB.
    """
    monkeypatch.setattr(save_stream, "_PIECE", 1 << 20)
    num_bytes, staged = 1 << 27, save_stream.StagedFiles()
    staged.append(bytes(num_bytes))
    in_the_middle, is_over = threading.Event(), threading.Event()

    def listen() -> None:
        while not is_over.is_set():
            first = os.pread(staged.descriptor, 1, 0)
            last = os.pread(staged.descriptor, 1, num_bytes - 1)
            if first > last:
                in_the_middle.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        for value in range(1, 256):  # on a busy machine it may sleep during a whole copy
            staged.clear()
            staged.append(bytes([value]) * num_bytes)
            assert os.pread(staged.descriptor, num_bytes, 0) == bytes([value]) * num_bytes
            if in_the_middle.is_set():
                break
    finally:
        is_over.set()
        listener.join(60)
    staged.close()
    assert in_the_middle.is_set()
