"""When a checkpoint is complete, and which are kept.

A save never touches what is there: it is written under ``.saving/``, every file flushed to disk, its manifest last;
then the folder is renamed to its name, and `latest` is replaced. Whenever it is interrupted, the checkpoints that have
a name are whole. What an interruption leaves behind bears a name that begins with a dot, and is removed at the next
start.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from framework.checkpoint.commit import discard, failure_of, make_room, publish, warn_of_failure
from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.names import LATEST, LEAVING, MANIFEST, SAVING, latest_tag, tag_of
from framework.checkpoint.retention import Retention
from framework.engine.protocol import Engine, Gather
from framework.errors import StorageError
from framework.system.files import FileRecord, refuse_link, replace_text


def clear_unfinished(folder: Path) -> list[str]:
    """Remove what interrupted saves and deletions left, and put `latest` right; returns what was removed.

    A checkpoint that was about to be replaced by one of the same step gets its name back.
    """
    removed = []
    for path in sorted(folder.glob(f"{LEAVING}*")):
        refuse_link(path)
        original = folder / path.name.removeprefix(LEAVING)
        if (path / MANIFEST).exists() and not original.exists():
            path.rename(original)
        else:
            shutil.rmtree(path)
            removed.append(path.name)
    refuse_link(folder / SAVING)
    if (folder / SAVING).exists():
        removed += sorted(f"{SAVING}/{path.name}" for path in (folder / SAVING).iterdir())
        shutil.rmtree(folder / SAVING)
    for path in folder.glob(f".{LATEST}.*.tmp"):
        path.unlink()
    newest = next(reversed(list_checkpoints(folder)), None)
    if newest is not None and latest_tag(folder) != newest.tag:
        replace_text(folder / LATEST, newest.tag)
    return removed


class Checkpointer:
    """Writes checkpoints of one run and keeps the newest of them. `save` is collective."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        retention: Retention,
        is_main: bool,
        gather: Gather,
        position: Callable[[int], Mapping[str, Any]],
        description: Mapping[str, Any],
        last_step: int | None,
    ) -> None:
        """Rank 0 (`is_main`) names and deletes; all ranks take part in what the engine writes.

        Args:
            engine: what is saved.
            folder: the ``checkpoints`` folder.
            retention: which are kept.
            is_main: whether this is rank 0.
            gather: every rank's value, in the order of ranks, on every rank.
            position: where a step stands in the data; goes into the state and into the manifest.
            description: what else the manifest says: topology, versions, config.
            last_step: the step after which a save that fails is an error, because none follows; None where any may be
                followed.
        """
        self._engine, self._folder, self._retention, self._last_step = engine, folder, retention, last_step
        self._is_main, self._gather, self._position, self._description = is_main, gather, position, description

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Write ``global_step<step>``, point `latest` at it and delete what is no longer kept.

        `metrics` are noted in the manifest: those of this very step, which the retention may ask for.

        Returns:
            Whether it was written. If not, all earlier checkpoints are as they were, and a warning says why.

        Raises:
            StorageError: the last save of the run failed.
        """
        tag = tag_of(step)
        state = {"step": step, **self._position(step)}
        failure = (
            self._agree(lambda: self._on_main(lambda: make_room(self._folder)))
            or self._write(tag, state)
            or self._agree(
                lambda: self._on_main(
                    lambda: publish(
                        self._folder,
                        tag,
                        stated=self._stated(state, metrics or {}),
                        records=self._records,
                        retention=self._retention,
                    )
                )
            )
        )
        if failure:
            self._on_main(lambda: discard(self._folder))
            self._report(step, failure)
        return not failure

    def finish(self, *, is_final: bool = False) -> None:
        """Wait until the last save is done, where that takes longer than `save`. Collective.

        Raises:
            StorageError: it failed, and `is_final` says that no other follows.
        """

    def close(self) -> None:
        """Let go of everything. Not collective: also called on a rank that has failed."""

    def _stated(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
        """Describe the run for the manifest, beside its files."""
        # JSON knows no NaN and no infinity.
        measured = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {**state, **self._description, "saved_at": now, "metrics": measured}

    def _report(self, step: int, failure: str, *, is_reported: bool = False, is_final: bool = False) -> None:
        """A save has failed: a warning, unless it has been given, or an error where no other save follows."""
        if step == self._last_step or is_final:
            raise StorageError(
                f"{failure_of(self._folder, step, failure)}; free space or check permissions, then resume with "
                "checkpoint.resume=auto [checkpoint-not-written]"
            )
        if self._is_main and not is_reported:
            warn_of_failure(self._folder, step, failure)

    def _write(self, tag: str, state: Mapping[str, Any]) -> str:
        """All ranks write their files; the first failure of any of them."""
        self._records: dict[str, FileRecord] = {}

        def write() -> None:
            self._records = dict(self._engine.save(self._folder / SAVING, tag, state) or {})

        failure = self._agree(write)
        if not failure:
            for records in self._gather(self._records):
                self._records |= records
        return failure

    def _agree(self, work: Callable[[], None]) -> str:
        """Do it on every rank; the first rank's failure, on every rank, or nothing."""
        failure = ""
        try:
            work()
        except OSError as error:
            failure = error.strerror or str(error)
        return next((stated for stated in self._gather(failure) if stated), "")

    def _on_main(self, work: Callable[[], None]) -> None:
        if self._is_main:
            work()
