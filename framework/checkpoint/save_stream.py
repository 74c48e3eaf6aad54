"""Destinations of the bytes of a checkpoint's files: disk (`framework.system.files.NewFile`), or
memory at first (`StagedFiles`).
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from framework.system.files import FileRecord
from framework.system.limits import room


class SaveStream(Protocol):
    """Stream that a file of a checkpoint is written to: the methods that `torch.save` calls, and
    two that end it.
    """

    def write(self, data: bytes | memoryview, /) -> int:
        """Append data; returns the number of bytes."""
        ...

    def flush(self) -> None:
        """Write what is held back, if anything."""
        ...

    def close(self) -> FileRecord | None:
        """Finish the file. Returns its record, or None if the writer process computes it."""
        ...

    def abandon(self) -> None:
        """Drop the file, which will not be complete."""
        ...


OpenFile = Callable[[Path], SaveStream]


_PAGE: Final = mmap.PAGESIZE
_GROWTH: Final = 1 << 24  # bytes, as all sizes here: the memory is a multiple of it
# All ranks of a host take their memory at the same time, and each sees what the others have taken
# before its next piece.
_PIECE: Final = 1 << 26  # a copy of it takes some 20 ms, and holds Python's lock


@dataclass(frozen=True)
class StagedFile:
    """A file that waits in memory: its path on disk, and where in the memory it lies."""

    path: Path
    offset: int
    num_bytes: int


class StagedFiles:
    """Files that wait in memory, one save after the other: written by the training process, read by
    the process that writes them to disk.

    The memory is one anonymous file (`memfd`), mapped by both: it has no name, so nothing is left
    in /dev/shm however a run ends, and no mount limits its size. It grows to the size of the
    largest save and is used again by every save after it: pages that are touched for the first time
    cost about eight times as much. A process that touches more memory than there is gets killed,
    without an error first: so memory is taken piece by piece, while there is room for it.
    """

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        self.files: list[StagedFile] = []
        self._map: mmap.mmap | None = None
        self._capacity = 0
        self._capacity_before = 0  # this save
        self._used = 0
        self._refusal: OSError | None = None

    def clear(self) -> None:
        """Forget the last save's files; the next save's take their memory."""
        self.files = []
        self._used = 0
        self._capacity_before = self._capacity
        self._refusal = None

    def open(self, path: Path) -> _Stream:
        """Begin a file for `path`; one at a time."""
        self._used = -(-self._used // _PAGE) * _PAGE  # rounded up to a page
        return _Stream(self, path)

    @property
    def num_bytes(self) -> int:
        """Size of the files, with the room between them."""
        return self._used

    def append(self, data: bytes | memoryview) -> int:
        """Copy data to the end; returns the number of bytes. Raises OSError if there is no more
        memory.
        """
        count = memoryview(data).nbytes
        end = self._used + count
        if self._refusal is not None:  # torch writes once more while it closes
            raise self._refusal
        if end > self._capacity:
            self._grow(end)
        if count:
            assert self._map is not None
            view = memoryview(data).cast("B")
            # Python's other threads, such as a request to stop, wait until a piece is copied.
            for start in range(0, count, _PIECE):
                piece = view[start : start + _PIECE]
                begin = self._used + start
                self._map[begin : begin + len(piece)] = piece
        self._used = end
        return count

    def close(self) -> None:
        """Release this process's hold on the memory. A second call does nothing."""
        self._unmap()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _grow(self, least: int) -> None:
        """Grow the memory to `least` bytes or more. An OSError is of this save alone: the memory
        that it had taken is given back, and the next save tries again.
        """
        capacity = -(-least // _GROWTH) * _GROWTH  # rounded up
        try:
            _reserve(self.descriptor, self._capacity, capacity)
            self._remap(capacity)
        except OSError as error:
            self._refusal = error
            # Give back pieces that were taken earlier in this save.
            if self._capacity > self._capacity_before:
                self._unmap()
                if self._capacity_before:
                    self._remap(self._capacity_before)
            os.ftruncate(self.descriptor, self._capacity)
            raise

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map = None
        self._capacity = 0

    def _remap(self, capacity: int) -> None:
        """Map `capacity` bytes; the old map is closed when the new one is there."""
        mapped = mmap.mmap(self.descriptor, capacity)
        self._unmap()
        self._map = mapped
        self._capacity = capacity
        if hasattr(mmap, "MADV_DONTFORK"):  # data loaders that are forked have no use for it
            mapped.madvise(mmap.MADV_DONTFORK)


def _reserve(descriptor: int, start: int, stop: int) -> None:
    """Lengthen the file from `start` to `stop` bytes, with memory for all of it. Raises OSError
    (ENOMEM) before the system kills a process for want of memory.
    """
    for begin in range(start, stop, _PIECE):
        size = min(_PIECE, stop - begin)
        free = room()
        if free is not None and free.num_bytes < size:
            left = f"{free.limit} has {max(0, free.num_bytes) / 1e9:.2f} GB left beside a margin"
            raise OSError(
                errno.ENOMEM,
                f"{left}, and checkpoint.mode: async keeps in host memory what a rank writes",
            )
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, begin, size)
        else:
            os.ftruncate(descriptor, begin + size)


class _Stream:
    """Stream that `torch.save` writes one file to."""

    def __init__(self, staged: StagedFiles, path: Path) -> None:
        self._staged = staged
        self._path = path
        self._offset = staged.num_bytes

    def write(self, data: bytes | memoryview, /) -> int:
        return self._staged.append(data)

    def flush(self) -> None:
        """Do nothing: memory holds nothing back."""

    def close(self) -> None:
        num_bytes = self._staged.num_bytes - self._offset
        self._staged.files.append(StagedFile(self._path, self._offset, num_bytes))

    def abandon(self) -> None:
        """Do nothing: the next save begins anew."""


def _anonymous_file() -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dsf-save", os.MFD_CLOEXEC)
    # Other systems than Linux: the file is on disk, and has no name or loses it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
