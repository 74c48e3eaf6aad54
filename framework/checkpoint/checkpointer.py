"""Checkpoints of a run: saved, published under their names, kept or deleted, and cleaned up at the
next start.

A save never touches earlier checkpoints: it is written under ``.saving/``, every file flushed to
disk, its manifest last; then the folder is renamed to its name, and `latest` is replaced. Whenever
it is interrupted, the checkpoints that have a name are whole. An interruption leaves only files
with names that begin with a dot, which are removed at the next start.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal

from framework.checkpoint.manifest import (
    FORMAT,
    SavedCheckpoint,
    best_of,
    newest_first,
    read_checkpoint,
    seal,
)
from framework.checkpoint.names import (
    BAD_STEPS,
    CALLBACKS,
    LATEST,
    LEAVING,
    MANIFEST,
    SAVING,
    STREAM,
    latest_tag,
    named_folders,
    tag_of,
)
from framework.engine_protocol import Engine, Gather
from framework.errors import StorageError
from framework.system.files import (
    FileRecord,
    hash_file,
    refuse_link,
    remove_folder,
    replace_text,
    sync_file,
    sync_folder,
    walk,
)
from framework.system.log import warn

# DeepSpeed copies them into the folder above the checkpoint's, which is `.saving` during a save.
_SCRIPTS: Final = ("zero_to_fp32.py", "zero_to_torch.py")


@dataclass(frozen=True)
class SaveOptions:
    """What the saves of a run need to know of it.

    Attributes:
        retention: which checkpoints are never deleted.
        is_main: this is rank 0, which names and deletes.
        gather: returns every rank's value, in the order of ranks, on every rank.
        position: returns the place of a step in the data, for the state and the manifest.
        description: further keys of the manifest: topology, versions, config.
        last_step: the last step of the run: a failure to save it is an error, because no other save
            follows. None if another may always follow.
    """

    retention: Retention
    is_main: bool
    gather: Gather
    position: Callable[[int], Mapping[str, Any]]
    description: Mapping[str, Any]
    last_step: int | None = None


class Checkpointer:
    """Writes checkpoints of one run and keeps the newest of them. `save` is collective."""

    def __init__(self, engine: Engine, folder: Path, options: SaveOptions) -> None:
        """Take the parts of a run that saves need. All ranks write with the engine.

        Args:
            engine: writes the state.
            folder: the ``checkpoints`` folder.
            options: of the run.
        """
        self._engine = engine
        self._folder = folder
        self._retention = options.retention
        self._last_step = options.last_step
        self._is_main = options.is_main
        self._gather = options.gather
        self._position = options.position
        self._description = options.description
        self._kept: dict[str, SavedCheckpoint] = {}  # as `publish` has read them, by tag

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Write ``global_step<step>``, point `latest` at it and delete superfluous checkpoints.

        `metrics` of this very step go into the manifest; the retention may compare them.

        Returns:
            True if it was written. If not, all earlier checkpoints are as they were, and a warning
            gives the reason.

        Raises:
            StorageError: the last save of the run failed.
        """
        tag = tag_of(step)
        state = {"step": step, **self._position(step)}
        records = dict[str, FileRecord]()

        def write() -> None:
            records.update(self._engine.save(self._folder / SAVING, tag, state) or {})

        def name() -> None:
            publish(
                self._folder,
                tag,
                description=self._describe(state, metrics or {}),
                records=records,
                retention=self._retention,
                kept=self._kept,
            )

        failure = self._agree(lambda: make_room(self._folder), only_main=True)
        if not failure:
            failure = self._agree(write)
        if not failure:
            for rank_records in self._gather(records):
                records |= rank_records
            failure = self._agree(name, only_main=True)
        if failure:
            self._discard()
            self._report(step, failure)
        return not failure

    def finish(self, *, is_final: bool = False) -> None:
        """Wait until the last save is done, if that takes longer than `save`. Collective.

        Raises:
            StorageError: it failed, and no other follows (`is_final`).
        """

    def close(self) -> None:
        """Release all resources. Not collective: also called on a rank that has failed."""

    def _describe(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the manifest of a save, without its format and its files."""
        description = dict(state)
        for name in (CALLBACKS, STREAM, BAD_STEPS):
            description.pop(name, None)
        description |= self._description
        description["saved_at"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        # JSON knows no NaN and no infinity.
        description["metrics"] = {
            name: value if math.isfinite(value) else str(value) for name, value in metrics.items()
        }
        return description

    def _agree(self, work: Callable[[], None], *, only_main: bool = False) -> str:
        """Call `work` on every rank, or on rank 0 alone. Returns the first rank's OSError as text,
        on every rank, or empty text. Collective.
        """
        failure = ""
        try:
            if self._is_main or not only_main:
                work()
        except OSError as error:
            failure = error.strerror or str(error)
        return first_failure(self._gather(failure))

    def _discard(self) -> None:
        """Remove the files of a failed save, on rank 0; those that cannot be removed now are
        removed before the next save.
        """
        if self._is_main:
            shutil.rmtree(self._folder / SAVING, ignore_errors=True)

    def _report(
        self, step: int, failure: str, *, is_reported: bool = False, is_final: bool = False
    ) -> None:
        """Warn of a failed save, unless that has been done (`is_reported`); raise StorageError if
        no other save follows.
        """
        if step == self._last_step or is_final:
            raise StorageError(
                f"{_failure_text(self._folder, step, failure)}; free space or check permissions, "
                "then resume with checkpoint.resume=auto [checkpoint-not-written]"
            )
        if self._is_main and not is_reported:
            warn_of_failure(self._folder, step, failure)


def first_failure(failures: Sequence[str]) -> str:
    """Return the first text that is not empty, or empty text."""
    for failure in failures:
        if failure:
            return failure
    return ""


def _failure_text(folder: Path, step: int, failure: str) -> str:
    return (
        f"{folder / tag_of(step)}: the checkpoint cannot be written ({failure}); earlier ones "
        "are untouched"
    )


def warn_of_failure(folder: Path, step: int, failure: str) -> None:
    """Warn of a failed save that the run continues without."""
    warn(
        f"{_failure_text(folder, step, failure)}, training goes on, and the next save tries again "
        "[checkpoint-not-written]"
    )


# The functions below are called by rank 0, or by the process that writes for it: they use no engine
# and no other rank.


def make_room(folder: Path) -> None:
    """Make an empty ``.saving`` in a ``checkpoints`` folder."""
    staging = folder / SAVING
    refuse_link(folder)
    refuse_link(staging)
    if staging.exists():
        remove_folder(staging)
    if not folder.exists():
        folder.mkdir()  # and no parents: a run folder that was removed is not made anew
    staging.mkdir()


def publish(
    folder: Path,
    tag: str,
    *,
    description: Mapping[str, Any],
    records: Mapping[str, FileRecord],
    retention: Retention,
    kept: dict[str, SavedCheckpoint],
) -> None:
    """Publish the written files of ``.saving/<tag>``: describe and flush them, give the checkpoint
    its name, delete old ones.

    Args:
        folder: the ``checkpoints`` folder.
        tag: the name of the checkpoint.
        description: the manifest without its format and its files; ``step`` is in it.
        records: the files that the ranks wrote; others that lie there are hashed.
        retention: which checkpoints are never deleted.
        kept: finished checkpoints by tag, as far as they have been read; this one is added.

    Raises:
        OSError: the file system refused; the checkpoints that have a name are as they were, or the
            new one has its own.
    """
    written = folder / SAVING / tag
    target = folder / tag
    all_records, folders = _all_records(written, records)
    files = {name: asdict(record) for name, record in sorted(all_records.items())}
    replace_text(written / MANIFEST, seal({"format": FORMAT, **description, "files": files}))
    for name in folders:
        sync_folder(written / name)
    aside = folder / f"{LEAVING}{tag}"
    if target.exists():  # the same step, saved again after a resume
        target.rename(aside)
    written.rename(target)
    sync_folder(folder)
    replace_text(folder / LATEST, tag)
    kept[tag] = SavedCheckpoint(folder, tag, _step_and_metrics(description))
    _clean_up(folder, aside, retention=retention, newest=int(description["step"]), kept=kept)


def _step_and_metrics(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in ("step", "metrics") if name in manifest}


def _all_records(
    written: Path, records: Mapping[str, FileRecord]
) -> tuple[dict[str, FileRecord], list[str]]:
    """Return the records of all files in `written`, and the folders that hold them. Files without a
    record, which DeepSpeed wrote by itself, are flushed and hashed here.

    Raises:
        OSError: a file with a record is not whole here: the run folder is a local disk of each
            host, and rank 0 sees nothing of the others' files.
    """
    all_records = dict(records)
    folders = [""]
    unseen = dict(records)
    for name, entry in walk(written):
        if entry.is_dir(follow_symlinks=False):
            folders.append(name)
        elif name in records:
            if entry.stat(follow_symlinks=False).st_size == records[name].num_bytes:
                del unseen[name]
        elif entry.is_file():
            sync_file(Path(entry.path))
            all_records[name] = hash_file(Path(entry.path))
    for name in unseen:
        reason = "is not whole where rank 0 looks: all hosts must share the run folder"
        raise OSError(errno.EIO, f"{name}, which a rank has written, {reason}")
    return all_records, folders


def _finished(folder: Path, kept: dict[str, SavedCheckpoint]) -> list[SavedCheckpoint]:
    """List the finished checkpoints, oldest first, with step and metrics alone; brings `kept` up to
    date with the folder. Manifests of a thousand ranks are large: each is read once in a run.
    """
    paths = {path.name: path for _, path in named_folders(folder)}
    for tag in kept.keys() - paths.keys():
        del kept[tag]
    for tag in paths.keys() - kept.keys():
        with suppress(OSError):  # `diagnose` reports it
            checkpoint = read_checkpoint(paths[tag])
            if checkpoint is not None:
                manifest = _step_and_metrics(checkpoint.manifest)
                kept[tag] = replace(checkpoint, manifest=manifest)
    return [kept[tag] for tag in paths if tag in kept]


def _clean_up(
    folder: Path,
    replaced: Path,
    *,
    retention: Retention,
    newest: int,
    kept: dict[str, SavedCheckpoint],
) -> None:
    """Keep DeepSpeed's scripts; remove staging, the replaced checkpoint and superfluous ones. A
    failure is a warning: it costs disk space, not the run, for the new checkpoint is complete.
    """
    try:
        for script in _SCRIPTS:
            if (folder / SAVING / script).exists():
                (folder / SAVING / script).replace(folder / script)
        remove_folder(folder / SAVING)
        if replaced.exists():
            remove_folder(replaced)
        checkpoints = _finished(folder, kept)
        absence = retention.describe_absence(checkpoints, newest=newest)
        if absence:
            warn(absence)
        for old in retention.superfluous(checkpoints, newest=newest):
            # The name and the manifest go first, so that a kill in the middle leaves nothing to
            # resume from.
            leaving = folder / f"{LEAVING}{old.tag}"
            old.path.rename(leaving)
            (leaving / MANIFEST).unlink()
            remove_folder(leaving)
    except OSError as error:
        warn(f"{folder}: an old checkpoint cannot be deleted ({error}) [checkpoint-not-deleted]")


@dataclass(frozen=True)
class Retention:
    """Rules for checkpoints that are never deleted.

    Attributes:
        last: number of the newest checkpoints that are kept, or ``all``.
        every_steps: checkpoints of steps that are multiples of it are kept; None for no such rule.
        best: name of a metric: the checkpoint with its best value is kept. While none has a value,
            none is deleted, as any may be the best. None for no such rule.
        best_is: the largest or the smallest value is the best.
    """

    last: int | Literal["all"]
    every_steps: int | None = None
    best: str | None = None
    best_is: Literal["max", "min"] = "max"

    def superfluous(
        self, checkpoints: Sequence[SavedCheckpoint], *, newest: int
    ) -> list[SavedCheckpoint]:
        """List the checkpoints that may be deleted, oldest first, up to the `newest` step, which
        was just written; later ones belong to another past of the run.
        """
        if self.last == "all":
            return []
        past = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest]
        kept_steps = {checkpoint.step for checkpoint in past[-self.last :]}
        if self.best is not None:
            best = self.best_of(past)
            if best is None:
                return []
            kept_steps.add(best.step)
        kept_steps |= {checkpoint.step for checkpoint in past if self._is_regular(checkpoint.step)}
        return [checkpoint for checkpoint in past if checkpoint.step not in kept_steps]

    def _is_regular(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def best_of(self, checkpoints: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """Return the checkpoint with the best value, the newest of equals; None if none has one."""
        return best_of(checkpoints, self.best, best_is=self.best_is)

    def describe_absence(self, checkpoints: Sequence[SavedCheckpoint], *, newest: int) -> str:
        """Describe, at the first save of a run, that `best` was not measured at its step; otherwise
        return empty text.
        """
        past = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest]
        if self.best is None or len(past) != 1 or self.best_of(past) is not None:
            return ""
        first = past[0]
        known = ", ".join(sorted(first.manifest.get("metrics", {}))) or "nothing"
        return (
            f"checkpoint.keep_best = {self.best}: it was not measured at step {first.step}, "
            f"where {known} was; until a checkpoint has it none is deleted: evaluate at the steps "
            "that are saved, or name another metric [metric-not-measured]"
        )


def _clear_leaving(folder: Path) -> list[str]:
    """Remove checkpoints that were about to be deleted, and give back its name to one that was
    about to be replaced; return the names that were removed.
    """
    removed = []
    for path in sorted(folder.glob(f"{LEAVING}*")):
        refuse_link(path)
        original = folder / path.name.removeprefix(LEAVING)
        if (path / MANIFEST).exists() and not original.exists():
            path.rename(original)
        else:
            remove_folder(path)
            removed.append(path.name)
    return removed


def clear_unfinished(folder: Path) -> list[str]:
    """Remove the leftovers of interrupted saves and deletions, and correct `latest`; returns the
    names that were removed.

    A checkpoint that was about to be replaced by one of the same step gets its name back.
    """
    removed = _clear_leaving(folder)
    refuse_link(folder / SAVING)
    if (folder / SAVING).exists():
        removed += sorted(f"{SAVING}/{path.name}" for path in (folder / SAVING).iterdir())
        remove_folder(folder / SAVING)
    for path in folder.glob(f".{LATEST}.*.tmp"):
        path.unlink()
    newest = next(newest_first(folder), None)
    if newest is not None and latest_tag(folder) != newest.tag:
        replace_text(folder / LATEST, newest.tag)
    return removed
