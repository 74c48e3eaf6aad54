"""Files that survive a crash: a reader sees the old content or the new one, even after a power cut.

Files of unknown origin are read here as well: no links, no pipes, and no more than a given size.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

# Errors of file systems that cannot flush a folder (some network and FUSE ones).
_CANNOT_FLUSH_FOLDERS: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
_MANY_FILES: Final = 32
_REMOVING_THREADS: Final = 16
_HASH_BLOCK: Final = 1 << 22
_WRITE_BLOCK: Final = 1 << 23
_MARKED_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class FileRecord:
    """Size of a file, and SHA-256 of its content as hexadecimal digits."""

    num_bytes: int
    sha256: str


class NewFile:
    """A file that did not exist, hashed while it is written and flushed to disk when it is closed.

    It has the methods that `torch.save` calls on a file, and no buffer, so that every failure of
    the disk is seen where it happens.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _create(path)
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append data, and return its number of bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            # A signal or a quota may leave a part of the bytes unwritten.
            count = os.write(self._descriptor, rest)
            self._hash.update(rest[:count])
            self._num_bytes += count
            rest = rest[count:]
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> FileRecord:
        """Flush to disk, close, and return the record of the file."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        return FileRecord(self._num_bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close after a failure; the caller removes the file."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def write_new(path: Path, data: memoryview) -> None:
    """Write a file that did not exist, and flush it to disk; its hash is `digest_of(data)`.

    Raises:
        OSError: it cannot be written; a part of it may be there.
    """
    descriptor = _create(path)
    try:
        rest = data
        while rest:
            rest = rest[os.write(descriptor, rest[:_WRITE_BLOCK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(data: memoryview) -> str:
    """Return the SHA-256 as hexadecimal digits; other threads run meanwhile."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path, *, on_read: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Return the size and SHA-256 of a file; `on_read` is called with the bytes read so far."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK):
            digest.update(block)
            num_bytes += len(block)
            on_read(num_bytes)
    return FileRecord(num_bytes, digest.hexdigest())


def read_regular(path: Path, *, num_bytes: int) -> bytes | None:
    """Return a file's first `num_bytes`, and None for a link or a pipe.

    A link may lead elsewhere, and a pipe may keep a reader waiting for ever.

    Raises:
        OSError: there is no such file, or the file system fails.
    """
    try:
        with open_own(path, "rb") as stream:
            content: bytes = stream.read(num_bytes)
            return content
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def open_own(path: Path, mode: str, *, newline: str | None = None) -> IO[Any]:
    """Open a file of a run folder as `open` does, with text as UTF-8, but not through a link.

    Raises:
        OSError: it is a link or a pipe, which its text names, or what `open` raises.
    """

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise _irregular(path) from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _irregular(path)
        return descriptor

    if "b" in mode:
        return open(path, mode, opener=opener, newline=newline)
    return open(path, mode, opener=opener, newline=newline, encoding="utf-8", errors="replace")


def make_own_folder(path: Path) -> None:
    """Make a folder in a run folder, if it does not exist.

    Raises:
        OSError: it is a link, which its text names, or cannot be made.
    """
    refuse_link(path)
    path.mkdir(exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise OSError, with the path in its text, if this is a link."""
    if path.is_symlink():
        raise _irregular(path)


def _irregular(path: Path) -> OSError:
    return OSError(
        errno.ELOOP,
        f"{path} is a link or no regular file, and a run folder's own files are not reached "
        "through such",
    )


def replace_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace a file: write a new one beside it, flush it, rename it, and flush the folder.

    Args:
        path: of the file.
        text: new content.
        mode: permissions to set.

    Raises:
        OSError: it cannot be written or flushed; the file has the former or the new content.
    """
    replace_bytes(path, text.encode("utf-8"), mode=mode)


def replace_bytes(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Replace a file as `replace_text` does."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)  # of an earlier process with this process id
        write_new(aside, memoryview(content))
        if mode is not None:
            aside.chmod(mode)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def refuse_foreign(path: Path, *, marks: Sequence[bytes]) -> None:
    """Check that a file which is about to be replaced is one of ours, empty, or not there.

    Args:
        path: of the file.
        marks: a file of the same origin has one of them, in its first or last 64 KiB.

    Raises:
        OSError: it is a link or no regular file, or has none of the marks.
    """
    if not os.path.lexists(path):
        return
    try:
        with open_own(path, "rb") as stream:
            content = stream.read(_MARKED_BYTES)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _MARKED_BYTES))
            content += stream.read()
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "a link or no regular file is there, and is left alone"
            raise OSError(errno.EEXIST, reason, str(path)) from None
        raise
    if content and not any(mark in content for mark in marks):
        reason = "a file of another origin is there, and is left alone"
        raise OSError(errno.EEXIST, reason, str(path))


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power cut."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def walk(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything in a folder and the folders in it, with its path within the folder.

    Links are not followed. The names are read in one pass: on a network file system each call for a
    file is a message.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            yield entry.name, entry
            if entry.is_dir(follow_symlinks=False):
                for name, inner in walk(Path(entry.path)):
                    yield f"{entry.name}/{name}", inner


def remove_folder(folder: Path) -> None:
    """Remove a folder with all in it.

    Many files are removed at the same time: on a network file system each one takes a while.
    """
    files = [entry.path for _, entry in walk(folder) if not entry.is_dir(follow_symlinks=False)]
    if len(files) > _MANY_FILES:
        with ThreadPoolExecutor(_REMOVING_THREADS) as pool:
            deque(pool.map(os.unlink, files), maxlen=0)
    shutil.rmtree(folder)
