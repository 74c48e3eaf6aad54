"""A file that stands for one on storage that stalls: what is written to it waits in a full pipe
until it is read.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from typing import Any


class StalledFile:
    """Takes the place of an open file; `resume` begins to read, and `text` is all that was
    written. As a context manager it resumes in any case: what waits for it ends.
    """

    def __init__(self, file: Any) -> None:
        self._reader, writer = os.pipe()
        self._num_filled = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.dup2(writer, file.fileno())
        os.close(writer)
        os.write(file.fileno(), b"." * self._num_filled)
        self._file, self._read = file, bytearray()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._starting = threading.Lock()

    def __enter__(self) -> StalledFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.resume()

    def _drain(self) -> None:
        while block := os.read(self._reader, 1 << 16):
            self._read += block
        os.close(self._reader)

    def resume(self) -> None:
        """Begin to read, if it has not begun."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def resume_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.resume).start()

    def text(self, close: Callable[[], object]) -> str:
        """All of it, once `close` has closed the file."""
        close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._read[self._num_filled :].decode()
