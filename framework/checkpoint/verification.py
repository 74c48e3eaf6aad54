"""Verification of a checkpoint's files, by one process in threads, or by all ranks of a run
together.
"""

from __future__ import annotations

import heapq
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from framework.engine_protocol import Gather
from framework.system.files import FileRecord, hash_file

if TYPE_CHECKING:
    from framework.checkpoint.manifest import SavedCheckpoint

_MOST_THREADS: Final = 16
_BEAT_SECONDS: Final = 5.0
_BEATS_PER_LINE: Final = 6  # a line about the progress every half a minute


class Verification:
    """Comparison of files with their records, in threads. To be closed."""

    def __init__(
        self, folder: Path, records: Mapping[str, FileRecord], *, num_sharing: int = 1
    ) -> None:
        """Begin to read; `num_sharing` processes share the processors of this host."""
        self._folder = folder
        self._is_closed = threading.Event()
        self._done: dict[str, int] = {}
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // num_sharing))
        self._threads = ThreadPoolExecutor(threads)  # hashing releases the interpreter
        self._lines: list[Future[str]] = [
            self._threads.submit(self._compare, *record) for record in records.items()
        ]

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; returns True if all files are compared."""
        return not wait(self._lines, timeout=seconds).not_done

    @property
    def done_bytes(self) -> int:
        """Number of bytes that have been read."""
        return sum(list(self._done.values()))

    def damage(self) -> list[str]:
        """Wait for all files; list those that are not as they were written, a line for each."""
        damage = []
        for line in self._lines:
            if line.result():
                damage.append(line.result())
        return damage

    def close(self) -> None:
        """Stop reading, and wait for the threads."""
        self._is_closed.set()
        self._threads.shutdown(cancel_futures=True)

    def _compare(self, name: str, record: FileRecord) -> str:
        """Return a line about a file that is not as its record, or empty text."""
        path = self._folder / name
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                return f"{name}: it is not a regular file"
            if facts.st_size != record.num_bytes:
                return f"{name}: {facts.st_size:,} bytes where {record.num_bytes:,} were written"
            actual = hash_file(path, on_read=lambda num_bytes: self._note_progress(name, num_bytes))
            if actual == record:
                return ""
            return f"{name}: its content has changed since it was written"
        except OSError as error:
            return f"{name}: {error.strerror or error}"

    def _note_progress(self, name: str, num_bytes: int) -> None:
        """Note the bytes read of a file. Raises InterruptedError, which ends the read, after
        `close`.
        """
        if self._is_closed.is_set():
            raise InterruptedError
        self._done[name] = num_bytes


def share_of(records: Mapping[str, FileRecord], *, index: int, count: int) -> dict[str, FileRecord]:
    """Return the share of files that reader `index` of `count` reads; shares have about equal
    numbers of bytes.
    """
    loads = [(0, reader) for reader in range(count)]
    share = {}
    for name, record in sorted(records.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        load, reader = loads[0]
        heapq.heapreplace(loads, (load + record.num_bytes, reader))
        if reader == index:
            share[name] = record
    return share


class SharedVerification:
    """Verification of checkpoints by all ranks: rank 0 names a checkpoint (`ask`), and the others
    take part (`help`) until rank 0 ends it (`end`).

    A terabyte takes longer to read than ranks wait for each other in a collective. So every rank
    reads its share, and all of them meet every few seconds meanwhile.
    """

    def __init__(
        self,
        *,
        rank: int,
        gather: Gather,
        from_rank0: Callable[[Any], Any],
        print_line: Callable[[str], None],
    ) -> None:
        """Take the collectives: `gather` returns every rank's value, `from_rank0` that of rank 0.
        `print_line` is called with lines about the progress.
        """
        self._rank = rank
        self._gather = gather
        self._from_rank0 = from_rank0
        self._print_line = print_line

    def ask(self, checkpoint: SavedCheckpoint) -> list[str]:
        """Find the changed files of a checkpoint, as `SavedCheckpoint.damage` does. On rank 0,
        while the others are in `help`.
        """
        if not checkpoint.verified:
            return checkpoint.damage()
        self._from_rank0(checkpoint)
        return self.verify(checkpoint)

    def end(self) -> None:
        """Release the other ranks from `help`. On rank 0."""
        self._from_rank0(None)

    def help(self) -> None:
        """Take part until rank 0 calls `end`. On all other ranks."""
        while (checkpoint := self._from_rank0(None)) is not None:
            self.verify(checkpoint)

    def verify(self, checkpoint: SavedCheckpoint, *, on_every_host: bool = False) -> list[str]:
        """Verify a checkpoint, and return the damage on every rank. Collective.

        With `on_every_host` the ranks of each host read all of it among them: each host may have a
        disk of its own at that path.
        """
        hosts = self._gather(socket.gethostname())
        neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[self._rank]]
        readers = neighbours if on_every_host else list(range(len(hosts)))
        records = checkpoint.records
        share = share_of(records, index=readers.index(self._rank), count=len(readers))
        num_bytes = sum(record.num_bytes for record in records.values())
        # Read once, or with `on_every_host` once for each host.
        total_bytes = num_bytes * len(hosts) / len(readers)
        with closing(Verification(checkpoint.path, share, num_sharing=len(neighbours))) as work:
            self._meet_until_done(work, checkpoint.path, total_bytes)
            damage = work.damage()
            if readers[0] == self._rank:
                damage += checkpoint.unexpected_files()
        lines: set[str] = set()
        for rank_damage in self._gather(damage):
            lines.update(rank_damage)
        return sorted(lines)

    def _meet_until_done(self, work: Verification, path: Path, total_bytes: float) -> None:
        """Wait until every rank has read its share; rank 0 prints the progress. Collective."""
        beat = 0
        is_done = False
        while not is_done:
            states = self._gather((work.wait(_BEAT_SECONDS), work.done_bytes))
            is_done = all(done for done, _ in states)
            if self._rank == 0 and not is_done and beat % _BEATS_PER_LINE == 0:
                done_bytes = sum(num_bytes for _, num_bytes in states)
                progress = f"{done_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are verified"
                self._print_line(f"{path}: {progress}")
            beat += 1
