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
    data, staged, heard = bytes(range(256)) * (1 << 19), save_stream.StagedFiles(), list[int]()
    started = threading.Event()

    def listen() -> None:
        started.set()
        while not heard or heard[-1] < len(data):
            heard.append(staged.num_bytes)

    listener = threading.Thread(target=listen)
    listener.start()
    started.wait()
    staged.append(data)
    listener.join()
    during = sum(count == 0 for count in heard)
    assert during > 3, f"{during} looks while 128 MiB were copied"
    assert os.pread(staged.descriptor, len(data), 0) == data
    staged.close()
