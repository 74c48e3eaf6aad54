"""Checkpoints that are written while training goes on: the loop pays for a copy of the state into
memory.

A save copies what each rank would write into memory that it shares with a process of its own
(`writer`), and returns. Those processes write, and rank 0's publishes when all have written; the
ranks exchange the outcome only when they meet for the next save or at the end. At most one save is
under way. A failed save is a warning, as with a `Checkpointer`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

from framework.checkpoint.checkpointer import Checkpointer, SaveOptions, first_failure, make_room
from framework.checkpoint.names import SAVING, tag_of
from framework.checkpoint.save_stream import StagedFiles
from framework.checkpoint.writer import ALL_WRITTEN, GIVE_UP, WriterProcess
from framework.engine_protocol import Engine
from framework.errors import StorageError
from framework.system.files import FileRecord
from framework.system.log import warn

# After an error the ranks cannot meet any more, and it is unknown whether the others still write.
_LAST_SECONDS: Final = 10.0
_BEAT_SECONDS: Final = 5.0
State = Literal["writing", "written", "published", "failed", "dead"]
"""Of this rank's writer: busy with the files, done with them, or at the end of its order in one of
three ways.
"""


class AsyncCheckpointer(Checkpointer):
    """A Checkpointer with a `save` that returns when the state is copied. Its owner calls `finish`
    and then `close`.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        options: SaveOptions,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """Take the parts of a run as Checkpointer does, and start this rank's writer.

        Raises:
            StorageError: the system starts no process.
        """
        super().__init__(engine, folder, options)
        self._rank = rank
        self._world_size = world_size
        self._staged = StagedFiles()
        self._step: int | None = None  # of the save that is under way
        self._state: State = "published"
        self._failure = ""  # this rank's
        self._has_warned = False
        try:
            self._writer: WriterProcess | None = WriterProcess(self._staged.descriptor)
        except OSError as error:
            reported = StorageError(
                f"checkpoint.mode = async: rank {rank} cannot start the process that writes "
                f"checkpoints: {error.strerror or error}; use checkpoint.mode=sync "
                "[checkpoint-writer]"
            )
            reported.is_of_one_rank = True
            raise reported from error

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Copy the state, which becomes ``global_step<step>`` while training goes on. Collective.

        Blocks until the save before it is published, and after the last step until this one is.

        Returns:
            True if the state was copied. If not, a warning gives the reason.

        Raises:
            StorageError: the save of the run's last step failed.
        """
        self._warn_if_waiting(due=step)
        self.finish()
        tag = tag_of(step)
        state = {"step": step, **self._position(step)}
        written = dict[str, FileRecord]()
        self._staged.clear()

        def stage() -> None:
            # Files that do not pass through memory are written already, such as DeepSpeed's copies
            # of state on NVMe.
            saving = self._folder / SAVING
            records = self._engine.save(saving, tag, state, open_file=self._staged.open)
            written.update(records or {})

        failure = self._agree(lambda: make_room(self._folder), only_main=True)
        if not failure:
            failure = self._agree(stage)
        if failure:
            self._discard()
            self._report(step, failure)
            return False
        ticket = self._gather(uuid.uuid4().hex if self._is_main else "")[0]
        self._step = step
        description = self._describe(state, metrics or {})
        self._begin(self._order(tag, ticket, description, written))
        if step == self._last_step:
            self.finish()
        return True

    def finish(self, *, is_final: bool = False) -> None:
        """Wait until the save that is under way is published, or has failed on any rank, which
        costs a warning. Collective.

        Raises:
            StorageError: it failed, and no other follows (`is_final`, or it was of the last step).
        """
        if self._step is None:
            return
        step = self._step
        write_failure = first_failure(self._await_all("writing", lambda: self._failure))
        if self._state == "written" and self._is_main and self._writer is not None:
            command = GIVE_UP if write_failure else ALL_WRITTEN
            with suppress(OSError):  # rank 0's writer may have ended or died: its answer shows it
                self._writer.send(word=command, failure=write_failure)

        def conclusion() -> tuple[str, bool]:
            """Return rank 0's failure, and True if its writer has logged it."""
            # Rank 0's writer publishes when the files of all ranks are there: another writer that
            # died before it answered has written them.
            if self._state == "published":
                return "", False
            return write_failure or self._failure, self._state == "failed"

        failure, is_reported = self._await_all("written", conclusion, awaits_mine=self._is_main)[0]
        self._step = None
        if failure:
            self._discard()
            self._report(step, failure, is_reported=is_reported, is_final=is_final)

    def close(self) -> None:
        """End the writer; a save that is under way has `_LAST_SECONDS` to be finished. Not
        collective.
        """
        deadline = time.monotonic() + _LAST_SECONDS
        if self._step is not None:
            with suppress(TimeoutError):
                while self._is_awaited():
                    self._await_answer(max(0.0, deadline - time.monotonic()))
        self._step = None
        self._close_writer()
        self._staged.close()

    def _is_awaited(self) -> bool:
        """Check whether this rank's writer still has work: rank 0's publishes what is written."""
        return self._state == "writing" or (self._state == "written" and self._is_main)

    def _order(
        self,
        tag: str,
        ticket: str,
        description: Mapping[str, Any],
        written: Mapping[str, FileRecord],
    ) -> dict[str, Any]:
        """Build the order for this rank's writer; rank 0's publishes as well. The ticket is unique
        to this save; `written` has files that did not pass through memory.
        """
        root = self._folder / SAVING / tag
        files = []
        for file in self._staged.files:
            files.append((file.path.relative_to(root).as_posix(), file.offset, file.num_bytes))
        order: dict[str, Any] = {
            "folder": str(self._folder.absolute()),
            "tag": tag,
            "ticket": ticket,
            "rank": self._rank,
            "files": files,
            "written": {name: asdict(record) for name, record in written.items()},
        }
        if self._is_main:
            order["description"] = description
            order["retention"] = asdict(self._retention)
            order["world_size"] = self._world_size
            # A failure to save the last step is raised by `finish` instead.
            order["warns"] = description["step"] != self._last_step
        return order

    def _begin(self, order: Mapping[str, Any]) -> None:
        """Send the order; to a new writer if the last one has died."""
        self._state = "writing"
        self._failure = ""
        for is_last_try in (False, True):
            try:
                if self._writer is None:
                    self._writer = WriterProcess(self._staged.descriptor)
                self._writer.send(**order)
                return
            except OSError as error:
                self._close_writer()
                if is_last_try:
                    self._state = "dead"
                    self._failure = (
                        f"no process can be started to write it: {error.strerror or error}"
                    )

    def _await_all(
        self, state: State, result: Callable[[], Any], *, awaits_mine: bool = True
    ) -> list[Any]:
        """Wait until no writer is in `state` any more, of the ranks that set `awaits_mine`; returns
        `result()` of every rank, in the order of ranks. Collective.

        Ranks meet every few seconds: a disk may take longer than they wait for each other in a
        collective.
        """
        while True:
            if awaits_mine and self._state == state:
                with suppress(TimeoutError):
                    self._await_answer(_BEAT_SECONDS)
            is_waiting = awaits_mine and self._state == state
            ranks = self._gather((is_waiting, result()))
            if not any(waits for waits, _ in ranks):
                return [rank_result for _, rank_result in ranks]

    def _await_answer(self, timeout: float | None = None) -> None:
        """Take the writer's next answer as this rank's state and failure. Raises TimeoutError."""
        assert self._writer is not None
        answer = self._writer.answer(timeout)
        self._state = answer["state"]
        self._failure = answer.get("failure", "")
        if self._state == "dead":
            self._close_writer()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _warn_if_waiting(self, *, due: int) -> None:
        """Warn, once in a run, if the last save is not published when the next one is `due`: the
        disk is too slow for the interval of saves, which is not visible otherwise.
        """
        if self._step is None or not self._is_main or self._has_warned:
            return
        try:
            while self._state in ("writing", "written"):
                self._await_answer(0.0)
        except TimeoutError:
            self._has_warned = True
            warn(
                f"checkpoint.mode = async: step {due} is to be saved while step {self._step} is "
                "still being written: training waits for it, now and from here on without a "
                "word; save less often [checkpoint-waits]"
            )
