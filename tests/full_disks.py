"""Disks that are full for a while: a small file system, and a limit of the length of files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system, and the file that fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, *, free_bytes: int = 0) -> None:
        """Leave so many bytes, in whole pages."""
        with self._filler.open("ab", buffering=0) as file:
            free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
            file.write(b"." * max(0, free - free_bytes))

    def free(self) -> None:
        """Remove the filler."""
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, *, num_bytes: int = 1 << 20) -> Iterator[SmallDisk]:
    """Mount one at a new folder; without the right to do so the test is skipped."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)]
    mounted = subprocess.run(words, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system takes root: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def longest_file(num_bytes: int) -> Iterator[None]:
    """Refuse what makes a file of this process longer, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
