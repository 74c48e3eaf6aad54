"""Files that grow by records while a run trains: a record that fails now is written later.

A full disk, a quota and a server that is away pass. Until then the records wait in memory, within a
bound, and each new one tries again. No half record stays in a file.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from framework.errors import counted
from framework.system.files import open_own
from framework.system.log import note, warn

_AGAIN_SECONDS: Final = 1.0
_MOST_BYTES: Final = 16 << 20
# Errors of a descriptor that works no more, though its file is there again.
_GONE: Final = frozenset({errno.ESTALE, errno.ENODEV, errno.ENOTCONN, errno.EBADF})


class Troubles:
    """Failures of one file: when it is tried again, and the records that are lost in the end."""

    def __init__(
        self, name: str, *, kind: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Note that nothing has failed yet.

        Args:
            name: of the file, in warnings.
            kind: of the warnings.
            clock: seconds.
        """
        self._name = name
        self._kind = kind
        self._clock = clock
        self._failed_at: float | None = None
        self._reason = ""
        self._is_reported = False
        self._num_lost = 0
        self._lost: list[tuple[int, int]] = []  # first and last step of each gap
        self._is_in_gap = False

    @property
    def is_open(self) -> bool:
        """True if the last attempt has failed."""
        return self._failed_at is not None

    @property
    def is_waiting(self) -> bool:
        """True if the last attempt has failed less than a second ago."""
        return self._failed_at is not None and self._clock() - self._failed_at < _AGAIN_SECONDS

    def failed(self, error: OSError) -> None:
        """Note a failure, and warn of the first one."""
        self._failed_at = self._clock()
        self._reason = error.strerror or str(error)
        if not self._is_reported:
            self._is_reported = True
            kept = "what it is to hold is kept, and tried again"
            warn(f"{self._name}: {self._reason}; {kept} [{self._kind}]")

    def worked(self) -> None:
        """Note that all is written."""
        self._is_in_gap = False
        if self._failed_at is not None:
            self._failed_at = None
            note(f"{self._name}: what was kept is written")

    def lose(self, step: int | None) -> None:
        """Note a record that will never be written; `step`: where the run was."""
        self._num_lost += 1
        if step is None:
            return
        if self._is_in_gap:
            first, last = self._lost[-1]
            self._lost[-1] = (min(first, step), max(last, step))
        else:
            self._lost.append((step, step))
        self._is_in_gap = True

    def close(self) -> None:
        """Warn of the records that are missing."""
        if not self._num_lost:
            return
        lacks = counted(self._num_lost, "line")
        if self._lost:
            gaps = [
                f"{first} to {last}" if last > first else f"{first}" for first, last in self._lost
            ]
            is_one_step = len(self._lost) == 1 and self._lost[0][0] == self._lost[0][1]
            lacks = f"{'step' if is_one_step else 'steps'} {', '.join(gaps)}"
        warn(f"{self._name} lacks {lacks}: {self._reason} [{self._kind}]")


class KeptFile:
    """A file to append whole records to; a record that fails waits for the next attempt.

    Attributes:
        file: open at this moment.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "",
        kind: str = "monitor-failed",
        most_bytes: int = _MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file.

        Args:
            path: of the file.
            name: of the file in warnings; left out: that of the path.
            kind: of the warnings.
            most_bytes: of records that wait; of more the oldest are lost.
            clock: seconds.

        Raises:
            OSError: it cannot be opened.
        """
        self._path = path
        self._troubles = Troubles(name or path.name, kind=kind, clock=clock)
        self._most_bytes = most_bytes
        self._records: deque[tuple[bytes, int | None]] = deque()
        self._num_bytes = 0
        self.file = open_own(path, "ab")
        self._inode = os.fstat(self.file.fileno()).st_ino
        self._torn_at: int | None = None  # size of the file before a record that it has a part of

    def append(self, record: bytes, *, step: int | None = None) -> None:
        """Write a record after all that wait; `step`: for the warning if it is lost."""
        self._records.append((record, step))
        self._num_bytes += len(record)
        if not self._troubles.is_waiting:
            self._try()
        while self._num_bytes > self._most_bytes:
            self._lose_oldest()

    def flush(self) -> None:
        """Try again, even if the last attempt was a moment ago."""
        if self._records and not self.file.closed:
            self._try()

    def close(self) -> None:
        """Try for the last time, warn of missing records, and close the file."""
        if self.file.closed:
            return
        self._try()
        while self._records:
            self._lose_oldest()
        self.file.close()
        self._troubles.close()

    def _lose_oldest(self) -> None:
        record, step = self._records.popleft()
        self._num_bytes -= len(record)
        self._troubles.lose(step)

    def _try(self) -> None:
        try:
            while self._records:
                record = self._records[0][0]
                self._write(record)
                self._records.popleft()
                self._num_bytes -= len(record)
        except OSError as error:
            self._troubles.failed(error)
        else:
            self._troubles.worked()

    def _write(self, record: bytes) -> None:
        try:
            descriptor = self.file.fileno()
            if self._torn_at is not None:
                os.ftruncate(descriptor, self._torn_at)
                self._torn_at = None
            size = os.fstat(descriptor).st_size
            self._torn_at = size
            write_all(descriptor, record)
            self._torn_at = None
        except OSError as error:
            self._cut(error)
            raise

    def _cut(self, error: OSError) -> None:
        """Remove a part of a record from the file; if this fails, the next attempt does it."""
        with suppress(OSError):
            if error.errno in _GONE:
                self._open_again()
            elif self._torn_at is not None:
                os.ftruncate(self.file.fileno(), self._torn_at)
                self._torn_at = None

    def _open_again(self) -> None:
        """Open the file anew, as the old descriptor works no more (`_GONE`); not another file that
        has its name by now.
        """
        # Without O_CREAT: under this name there may be another run's folder by now.
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._path, flags)
        status = os.fstat(descriptor)
        # Not the device's number: a file system that was mounted again has another one.
        if not stat.S_ISREG(status.st_mode) or status.st_ino != self._inode:
            os.close(descriptor)
            return
        before = self.file
        self.file = os.fdopen(descriptor, "ab")
        with suppress(OSError):
            before.close()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes: a signal or a quota may leave a part of them unwritten."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
