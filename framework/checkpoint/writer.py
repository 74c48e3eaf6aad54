"""Background writer: the process that writes a rank's checkpoints while the rank trains on, and the
rank's view of it.

It takes orders over a channel and finds the files in memory that it shares with the rank. Beside
the files it writes a record of their sizes and checksums. The writer of rank 0 waits for the
records of all ranks and then publishes the checkpoint, so that the ranks need no collective for it.
It imports neither torch nor DeepSpeed, starts in a tenth of a second and takes 20 MB; 10 MB more on
rank 0, which reads manifests.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.checkpointer import Retention, publish, warn_of_failure
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import SAVING
from framework.system.child import Child
from framework.system.files import FileRecord, digest_of, replace_text, write_new
from framework.system.json_lines import MessageSocket

GIVE_UP: Final = "give-up"
ALL_WRITTEN: Final = "all-written"
_SHORTEST_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 1.0
# One thread alone is slower than many a disk; the cores belong to training.
_HASHING_THREADS: Final = 2
# A shared file system shows what another host has written within about a minute (NFS: `acdirmax`,
# 60 s).
_LONGEST_DELAY_SECONDS: Final = 180.0


class _NotWrittenError(Exception):
    """Failure of a save, with the reason."""


def write_files(order: Mapping[str, Any], memory: memoryview) -> None:
    """Write the files that a rank has staged, and their record. Raises OSError."""
    folder = Path(order["folder"], SAVING, order["tag"])
    contents = []
    for name, offset, num_bytes in order["files"]:
        contents.append((name, memory[offset : offset + num_bytes]))
    hashing = ThreadPoolExecutor(_HASHING_THREADS)
    try:
        digests = [hashing.submit(digest_of, content) for _, content in contents]
        for name, content in contents:
            write_new(folder / name, content)
        files = {}
        for (name, content), digest in zip(contents, digests, strict=True):
            files[name] = asdict(FileRecord(len(content), digest.result()))
    finally:
        # The memory is the rank's again only when no thread reads it any more.
        hashing.shutdown(cancel_futures=True)
    replace_text(
        _record_path(order), json.dumps({"files": files | order["written"], "failure": ""})
    )


def _record_path(order: Mapping[str, Any]) -> Path:
    """Return the path of the record of one rank and one save; a late writer of an earlier run
    writes another one.
    """
    return Path(order["folder"], SAVING, f"written-by-rank{order['rank']}-{order['ticket']}.json")


def _files_in(folder: Path) -> list[Path]:
    """List a folder once: the file system is asked for all names together."""
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries]


class Writer:
    """The writer process: it carries out orders until the rank has no more."""

    def __init__(self, channel: MessageSocket, descriptor: int) -> None:
        self._channel = channel
        self._descriptor = descriptor
        self._memory = memoryview(b"")
        self._kept: dict[str, SavedCheckpoint] = {}

    def serve(self) -> None:
        """Carry out orders until the rank is gone, or has ended the channel."""
        while (order := self._channel.receive()) is not None:
            if "tag" in order:  # otherwise it is a command for a save that is over
                self._save(order)

    def _save(self, order: Mapping[str, Any]) -> None:
        """Carry out an order, and report each state to the rank. Rank 0's writer warns of a
        failure; another one leaves it in its record, for rank 0's to find.
        """
        try:
            self._write(order)
            self._report(state="written")
            if order["rank"] == 0:
                self._publish(order)
                self._report(state="published")
        except (OSError, _NotWrittenError) as error:
            failure = getattr(error, "strerror", None) or str(error)
            if order["rank"] != 0:
                # Without room for the record, the ranks exchange the failure at the next save.
                with suppress(OSError):
                    replace_text(_record_path(order), json.dumps({"files": {}, "failure": failure}))
            elif order["warns"]:
                warn_of_failure(Path(order["folder"]), order["description"]["step"], failure)
            self._report(state="failed", failure=failure)

    def _write(self, order: Mapping[str, Any]) -> None:
        """Write an order's files from memory that is mapped once: finding its pages anew takes half
        as long as hashing them.
        """
        num_bytes = os.fstat(self._descriptor).st_size
        if num_bytes != len(self._memory):
            populate = getattr(mmap, "MAP_POPULATE", 0)
            # The old mapping goes with the last reference to it, which may be an error's.
            mapped = mmap.mmap(
                self._descriptor, num_bytes, mmap.MAP_SHARED | populate, mmap.PROT_READ
            )
            self._memory = memoryview(mapped)
        write_files(order, self._memory)

    def _publish(self, order: Mapping[str, Any]) -> None:
        """Wait for the records of all ranks, and give the checkpoint its name."""
        folder = Path(order["folder"])
        records = dict[str, FileRecord]()
        for report in self._await_records(order):
            if report["failure"]:
                raise _NotWrittenError(report["failure"])
            records |= {name: FileRecord(**record) for name, record in report["files"].items()}
        retention = Retention(**order["retention"])
        publish(
            folder,
            order["tag"],
            description=order["description"],
            records=records,
            retention=retention,
            kept=self._kept,
        )

    def _await_records(self, order: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield each rank's record, when it is there; raises _NotWrittenError if the rank gives the
        save up, or a record does not appear in time. All are looked for in one listing: a file
        system of several hosts may cache for a minute that a single name does not exist.
        """
        missing = {
            _record_path({**order, "rank": rank}): rank for rank in range(order["world_size"])
        }
        pause = _SHORTEST_PAUSE_SECONDS
        deadline = float("inf")
        while True:
            for path in _files_in(Path(order["folder"], SAVING)):
                if path in missing:
                    del missing[path]
                    yield dict(json.loads(path.read_text(encoding="utf-8")))
            if not missing:
                return
            message = self._listen(pause)
            if message.get("word") == GIVE_UP:
                raise _NotWrittenError(message["failure"])
            if message.get("word") == ALL_WRITTEN:
                deadline = time.monotonic() + _LONGEST_DELAY_SECONDS
                pause = _SHORTEST_PAUSE_SECONDS
            if time.monotonic() > deadline:
                unseen = f"what rank {min(missing.values())} has written is not seen by rank 0"
                raise _NotWrittenError(f"{unseen}: all hosts must share the run folder")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _report(self, **answer: str) -> None:
        """Send an answer to the rank. If that is gone, end this process."""
        try:
            self._channel.send(**answer)
        except ConnectionError:  # the rank is gone: written and recorded files stay
            os._exit(0)

    def _listen(self, seconds: float) -> Mapping[str, Any]:
        """Return a message from the rank, or an empty one after this many seconds. If the rank is
        gone, end this process.
        """
        try:
            message = self._channel.receive(seconds)
        except TimeoutError:
            return {}
        if message is None:  # the rank is gone: its save is not published any more
            os._exit(0)
        return message


def main(channel: MessageSocket, memory: str) -> None:
    """Serve a `WriterProcess`; `memory` is the number of a descriptor. The process must not outlive
    its rank: it could publish over the run that takes its place.
    """
    Writer(channel, int(memory)).serve()


class WriterProcess(Child):
    """The writer, as a rank sees it: a process that takes orders."""

    def __init__(self, memory: int) -> None:
        """Start it, with the descriptor of the memory in which files will wait. Raises OSError."""
        super().__init__("framework.checkpoint.writer:main", str(memory), descriptors=(memory,))

    def answer(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Return its next answer; state ``dead`` and a failure if it has died. Raises TimeoutError
        after `timeout` seconds.
        """
        answer = self.receive(timeout)
        if answer is None:
            return {
                "state": "dead",
                "failure": f"the process that writes checkpoints {self.exit_reason()}",
            }
        return answer
