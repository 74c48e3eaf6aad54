"""Background writer: the process that writes a rank's checkpoints while the rank trains on, and the rank's view of it.

It takes orders over a channel and finds the files in memory that it shares with the rank. Beside the files it leaves a
record of what they hold. The writer of rank 0 waits for the records of all ranks and then publishes the checkpoint, so
that the ranks need no collective for it. It imports neither torch nor DeepSpeed, starts in a tenth of a second and
takes 20 MB.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import framework
from framework.checkpoint.checkpointer import Retention, publish, warn_of_failure
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import SAVING
from framework.system.files import FileRecord, digest_of, replace_text, write_new
from framework.system.parent_watch import die_with
from framework.system.stopping import SIGNALS

GIVE_UP: Final = "give-up"
ALL_WRITTEN: Final = "all-written"
_SHORTEST_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 1.0
# One alone is slower than many a disk; the cores belong to training.
_HASHING_THREADS: Final = 2
# A shared file system shows what another host has written within about a minute (NFS: `acdirmax`, 60 s).
_LONGEST_DELAY_SECONDS: Final = 180.0
_BLOCK: Final = 1 << 16
_END_SECONDS: Final = 5.0
_ROOT: Final = str(Path(framework.__file__).resolve().parents[1])
_PROGRAM: Final = f"import sys; sys.path.insert(0, {_ROOT!r}); from framework.checkpoint.writer import main; main()"


class Channel:
    """One end of a pair of sockets between a rank and its writer: each message is a line of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._read = end, b""
        self._poll = select.poll()  # `select.select` refuses descriptors above 1023, of which a rank may have many
        self._poll.register(end, select.POLLIN)

    def send(self, **message: Any) -> None:
        """Send a message; raises OSError where nobody is at the other end."""
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> Mapping[str, Any] | None:
        """The next message, None when the other end is gone; raises TimeoutError if none comes in so many seconds."""
        while b"\n" not in self._read:
            try:
                if not self._poll.poll(None if timeout is None else math.ceil(timeout * 1000)):
                    raise TimeoutError
                more = self._end.recv(_BLOCK)
            except ConnectionError:
                return None
            if not more:
                return None
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        return dict(json.loads(line))

    def close(self) -> None:
        """The other end sees the end, even where a forked child of this process still holds a copy of this one."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class _NotWrittenError(Exception):
    """A save fails for the reason that it names."""


def write_files(order: Mapping[str, Any], memory: memoryview) -> None:
    """Write what a rank has staged, and its record; raises OSError where the file system refuses."""
    saving = Path(order["folder"], SAVING)
    parts = [(name, memory[offset : offset + num_bytes]) for name, offset, num_bytes in order["files"]]
    hashing = ThreadPoolExecutor(_HASHING_THREADS)
    try:
        digests = [hashing.submit(digest_of, part) for _, part in parts]
        for name, part in parts:
            write_new(saving / order["tag"] / name, part)
        files = {
            name: asdict(FileRecord(len(part), digest.result()))
            for (name, part), digest in zip(parts, digests, strict=True)
        }
    finally:
        hashing.shutdown(cancel_futures=True)  # the memory is the rank's again only when nobody reads it any more
    replace_text(_record(order), json.dumps({"files": files | order["written"], "failure": ""}))


def _record(order: Mapping[str, Any]) -> Path:
    """Of one rank and one save: a writer of an earlier run that was held up cannot speak for a rank of this one."""
    return Path(order["folder"], SAVING, f"written-by-rank{order['rank']}-{order['ticket']}.json")


class Writer:
    """Carries out orders until the rank has no more."""

    def __init__(self, channel: Channel, descriptor: int) -> None:
        self._channel, self._descriptor = channel, descriptor
        self._memory = memoryview(b"")
        self._kept: dict[str, SavedCheckpoint] = {}

    def serve(self) -> None:
        """Returns when the rank is gone, or wants no more."""
        while (order := self._channel.receive()) is not None:
            if "tag" in order:  # otherwise a word about a save that is over
                self._save(order)

    def _save(self, order: Mapping[str, Any]) -> None:
        try:
            self._write(order)
            self._report(state="written")
            if order["rank"] == 0:
                self._publish(order)
                self._report(state="published")
        except (OSError, _NotWrittenError) as error:
            failure = getattr(error, "strerror", None) or str(error)
            if order["rank"] != 0:
                with suppress(OSError):  # without room for it, the ranks tell each other at the next save
                    replace_text(_record(order), json.dumps({"files": {}, "failure": failure}))
            elif order["warns"]:
                warn_of_failure(Path(order["folder"]), order["stated"]["step"], failure)
            self._report(state="failed", failure=failure)

    def _write(self, order: Mapping[str, Any]) -> None:
        """From memory that is mapped once: finding its pages anew takes half as long as hashing them."""
        num_bytes = os.fstat(self._descriptor).st_size
        if num_bytes != len(self._memory):
            populate = getattr(mmap, "MAP_POPULATE", 0)
            # The old mapping goes when nobody refers to it any more, be it an error that tells of a part of it.
            mapped = mmap.mmap(self._descriptor, num_bytes, mmap.MAP_SHARED | populate, mmap.PROT_READ)
            self._memory = memoryview(mapped)
        write_files(order, self._memory)

    def _publish(self, order: Mapping[str, Any]) -> None:
        """Wait for the records of all ranks, and give the checkpoint its name."""
        folder, records = Path(order["folder"]), dict[str, FileRecord]()
        for reported in self._await_records(order):
            if reported["failure"]:
                raise _NotWrittenError(reported["failure"])
            records |= {name: FileRecord(**record) for name, record in reported["files"].items()}
        retention = Retention(**order["retention"])
        publish(folder, order["tag"], stated=order["stated"], records=records, retention=retention, kept=self._kept)

    def _await_records(self, order: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Each rank's record, when it is there. All are looked for in one listing: a file system of several hosts may
        keep for a minute that a name, asked for too early, is not there.
        """
        missing = {_record({**order, "rank": rank}): rank for rank in range(order["world_size"])}
        pause, deadline = _SHORTEST_PAUSE_SECONDS, float("inf")
        while missing:
            with os.scandir(Path(order["folder"], SAVING)) as entries:
                there = [path for path in (Path(entry.path) for entry in entries) if path in missing]
            for path in there:
                del missing[path]
                yield dict(json.loads(path.read_text(encoding="utf-8")))
            message = self._listen(pause) if missing else {}
            if message.get("word") == GIVE_UP:
                raise _NotWrittenError(message["failure"])
            if message.get("word") == ALL_WRITTEN:
                deadline, pause = time.monotonic() + _LONGEST_DELAY_SECONDS, _SHORTEST_PAUSE_SECONDS
            if time.monotonic() > deadline:
                unseen = f"what rank {min(missing.values())} has written is not seen by rank 0"
                raise _NotWrittenError(f"{unseen}: all hosts must share the run folder")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _report(self, **answer: str) -> None:
        try:
            self._channel.send(**answer)
        except ConnectionError:  # the rank is gone: what is written and recorded stays so
            os._exit(0)

    def _listen(self, seconds: float) -> Mapping[str, Any]:
        """A message from the rank; empty where none came within so many seconds."""
        try:
            message = self._channel.receive(seconds)
        except TimeoutError:
            return {}
        if message is None:  # the rank is gone: what it began is not published any more
            os._exit(0)
        return message


def main() -> None:
    """Started by `WriterProcess`, with the rank's process id and the descriptors of the channel and of the memory."""
    parent, channel, memory = map(int, sys.argv[1:4])
    # What asks the rank to stop reaches the whole process group; a save that is being written ends in good order.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A writer without a rank could publish over the run that takes its place. Where the kernel does not end it, the end
    # of the channel does, between two saves.
    die_with(parent)
    with suppress(ConnectionError):  # the rank has gone while it was being told
        Writer(Channel(socket.socket(fileno=channel)), memory).serve()


class WriterProcess(Channel):
    """The writer, as a rank sees it: one process, given orders, and replaced when it has died.

    It is not forked, because forks of a process that drives a GPU do not work.
    """

    def __init__(self, memory: int) -> None:
        """Start it, with the descriptor of the memory in which files will wait; raises OSError if that fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # -I: nothing in the current folder or in the environment takes the place of a module.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), str(theirs.fileno()), str(memory)],
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        super().__init__(ours)
        self.pid = self._process.pid

    def answer(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Its next answer, a failure where it has died; raises TimeoutError if none comes within so many seconds."""
        answer = self.receive(timeout)
        return answer if answer is not None else {"state": "dead", "failure": self._exit_reason()}

    def close(self) -> None:
        """End it: at once where it waits, or kill it."""
        super().close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exit_reason(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return f"the process that writes checkpoints {how}"
        return "the process that writes checkpoints has closed its channel"
