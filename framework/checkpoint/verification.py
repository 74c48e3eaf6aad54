"""Whether files are as they were written: all of them read in threads, by one process."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from framework.system.files import FileRecord, hash_file

_MOST_THREADS: Final = 16


class Verification:
    """Reads files in threads, and holds them against what was written. To be closed."""

    def __init__(self, folder: Path, records: Mapping[str, FileRecord], *, num_sharing: int = 1) -> None:
        """Begin; `num_sharing` processes share the processors of this host."""
        self._folder, self._is_closed = folder, threading.Event()
        self._done: dict[str, int] = {}
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // num_sharing))
        self._threads = ThreadPoolExecutor(threads)  # hashing releases the interpreter
        self._lines: list[Future[str]] = [self._threads.submit(self._compare, *record) for record in records.items()]

    def wait(self, seconds: float | None = None) -> bool:
        """Whether all of it is done, within so many seconds."""
        return not wait(self._lines, timeout=seconds).not_done

    @property
    def done_bytes(self) -> int:
        """How much of it has been read."""
        return sum(list(self._done.values()))

    def damage(self) -> list[str]:
        """What is not as it was written, a line for each file."""
        return [stated for line in self._lines if (stated := line.result())]

    def close(self) -> None:
        """Stop reading."""
        self._is_closed.set()
        self._threads.shutdown(cancel_futures=True)

    def _compare(self, name: str, record: FileRecord) -> str:
        path = self._folder / name
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                return f"{name}: it is not a regular file"
            if facts.st_size != record.num_bytes:
                return f"{name}: {facts.st_size:,} bytes where {record.num_bytes:,} were written"
            found = hash_file(path, on_read=lambda num_bytes: self._note(name, num_bytes))
            return "" if found == record else f"{name}: its content has changed since it was written"
        except OSError as error:
            return f"{name}: {error.strerror or error}"

    def _note(self, name: str, num_bytes: int) -> None:
        if self._is_closed.is_set():
            raise InterruptedError
        self._done[name] = num_bytes
