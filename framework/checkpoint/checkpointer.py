"""Checkpoints of a run: saved, published under their names, kept or deleted, and put right at the
next start.

A save never touches what is there: it is written under ``.saving/``, every file flushed to disk,
its manifest last; then the folder is renamed to its name, and `latest` is replaced. Whenever it is
interrupted, the checkpoints that have a name are whole. What an interruption leaves behind bears a
name that begins with a dot, and is removed at the next start.
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
from framework.engine.protocol import Engine, Gather
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

_SCRIPTS: Final = ("zero_to_fp32.py", "zero_to_torch.py")


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
            folder: the ``checkpoints`` folder.
            gather: every rank's value, in the order of ranks, on every rank.
            position: where a step stands in the data; goes into the state and into the manifest.
            description: what else the manifest says: topology, versions, config.
            last_step: the step after which a save that fails is an error, because none follows;
                None where any may be followed.
        """
        self._engine = engine
        self._folder = folder
        self._retention = retention
        self._last_step = last_step
        self._is_main = is_main
        self._gather = gather
        self._position = position
        self._description = description
        self._kept: dict[str, SavedCheckpoint] = {}

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Write ``global_step<step>``, point `latest` at it and delete what is no longer kept.

        `metrics` are noted in the manifest: those of this very step, which the retention may ask
        for.

        Returns:
            Whether it was written. If not, all earlier checkpoints are as they were, and a warning
            says why.

        Raises:
            StorageError: the last save of the run failed.
        """
        tag = tag_of(step)
        state = {"step": step, **self._position(step)}
        records = dict[str, FileRecord]()

        def write() -> None:
            records.update(self._engine.save(self._folder / SAVING, tag, state) or {})

        def name() -> None:
            stated = self._stated(state, metrics or {})
            publish(
                self._folder,
                tag,
                stated=stated,
                records=records,
                retention=self._retention,
                kept=self._kept,
            )

        failure = self._agree(lambda: make_room(self._folder), only_main=True) or self._agree(write)
        if not failure:
            for written in self._gather(records):
                records |= written
            failure = self._agree(name, only_main=True)
        if failure:
            self._discard()
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
        measured = {
            name: value if math.isfinite(value) else str(value) for name, value in metrics.items()
        }
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        described = {
            name: value
            for name, value in state.items()
            if name not in (CALLBACKS, STREAM, BAD_STEPS)
        }
        return {**described, **self._description, "saved_at": now, "metrics": measured}

    def _agree(self, work: Callable[[], None], *, only_main: bool = False) -> str:
        """Do it on every rank, or on rank 0; the first rank's failure, on every rank, or
        nothing.
        """
        failure = ""
        try:
            if self._is_main or not only_main:
                work()
        except OSError as error:
            failure = error.strerror or str(error)
        return next(filter(None, self._gather(failure)), "")

    def _discard(self) -> None:
        """Remove what a failed save has written; what cannot be removed now is removed before the
        next save.
        """
        if self._is_main:
            shutil.rmtree(self._folder / SAVING, ignore_errors=True)

    def _report(
        self, step: int, failure: str, *, is_reported: bool = False, is_final: bool = False
    ) -> None:
        """A save has failed: a warning, unless it has been given, or an error where no other save
        follows.
        """
        if step == self._last_step or is_final:
            raise StorageError(
                f"{_described(self._folder, step, failure)}; free space or check permissions, "
                "then resume with checkpoint.resume=auto [checkpoint-not-written]"
            )
        if self._is_main and not is_reported:
            warn_of_failure(self._folder, step, failure)


def _described(folder: Path, step: int, failure: str) -> str:
    return (
        f"{folder / tag_of(step)}: the checkpoint cannot be written ({failure}); earlier ones "
        "are untouched"
    )


def warn_of_failure(folder: Path, step: int, failure: str) -> None:
    """A save has failed, and the run does without it."""
    warn(
        f"{_described(folder, step, failure)}, training goes on, and the next save tries again "
        "[checkpoint-not-written]"
    )


# What follows is done by rank 0, or by the process that writes for it: it knows of no engine and of
# no other rank.


def make_room(folder: Path) -> None:
    """An empty ``.saving`` in a ``checkpoints`` folder."""
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
    stated: Mapping[str, Any],
    records: Mapping[str, FileRecord],
    retention: Retention,
    kept: dict[str, SavedCheckpoint],
) -> None:
    """All files of ``.saving/<tag>`` are written: describe them, flush them, give the checkpoint
    its name, delete old ones.

    Args:
        folder: the ``checkpoints`` folder.
        stated: what the manifest says beside its format and its files; ``step`` is in it.
        records: the files that the ranks wrote; others that lie there are hashed.
        kept: finished checkpoints by tag, as far as they have been read; this one is added.

    Raises:
        OSError: the file system refused; the checkpoints that have a name are as they were, or the
            new one has its own.
    """
    written = folder / SAVING / tag
    target = folder / tag
    complete, folders = _all_records(written, records)
    files = {name: asdict(record) for name, record in sorted(complete.items())}
    replace_text(written / MANIFEST, seal({"format": FORMAT, **stated, "files": files}))
    for name in folders:
        sync_folder(written / name)
    aside = folder / f"{LEAVING}{tag}"
    if target.exists():  # the same step, saved again after a resume
        target.rename(aside)
    written.rename(target)
    sync_folder(folder)
    replace_text(folder / LATEST, tag)
    kept[tag] = SavedCheckpoint(
        folder, tag, {name: stated[name] for name in ("step", "metrics") if name in stated}
    )
    _tidy(folder, aside, retention=retention, newest=int(stated["step"]), kept=kept)


def _all_records(
    written: Path, records: Mapping[str, FileRecord]
) -> tuple[dict[str, FileRecord], list[str]]:
    """Records of what the ranks wrote, and of what DeepSpeed put there by itself; and the folders
    that hold it.

    A run folder on a disk that each host has for itself is refused: its ranks write, and rank 0
    sees nothing of it.
    """
    found = dict(records)
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
            found[name] = hash_file(Path(entry.path))
    for name in unseen:
        reason = "is not whole where rank 0 looks: all hosts must share the run folder"
        raise OSError(errno.EIO, f"{name}, which a rank has written, {reason}")
    return found, folders


def _kept(folder: Path, kept: dict[str, SavedCheckpoint]) -> list[SavedCheckpoint]:
    """The finished checkpoints, oldest first, by step and metrics alone. Manifests of a thousand
    ranks are large: each is read once in a run.
    """
    there = {path.name: path for _, path in named_folders(folder)}
    for tag in kept.keys() - there.keys():
        del kept[tag]
    for tag in there.keys() - kept.keys():
        with suppress(OSError):  # `diagnose` tells it
            found = read_checkpoint(there[tag])
            if found is not None:
                known = {
                    name: found.manifest[name]
                    for name in ("step", "metrics")
                    if name in found.manifest
                }
                kept[tag] = replace(found, manifest=known)
    return [kept[tag] for tag in there if tag in kept]


def _tidy(
    folder: Path,
    replaced: Path,
    *,
    retention: Retention,
    newest: int,
    kept: dict[str, SavedCheckpoint],
) -> None:
    """Failing here costs disk space, not the run: the new checkpoint is complete."""
    try:
        for script in _SCRIPTS:
            if (folder / SAVING / script).exists():
                (folder / SAVING / script).replace(folder / script)
        remove_folder(folder / SAVING)
        if replaced.exists():
            remove_folder(replaced)
        checkpoints = _kept(folder, kept)
        absence = retention.describe_absence(checkpoints, newest=newest)
        if absence:
            warn(absence)
        for old in retention.superfluous(checkpoints, newest=newest):
            # Without a name and a manifest first, so that a kill in the middle leaves nothing to
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
        last: the newest so many.
        every_steps: those whose step is a multiple of it; None for no such rule.
        best: name of a metric; the one checkpoint that has its best value. While none has a value,
            any may turn out to be what was meant, and none is deleted. None for no such rule.
        best_is: whether the largest or the smallest value is the best.
    """

    last: int
    every_steps: int | None = None
    best: str | None = None
    best_is: Literal["max", "min"] = "max"

    def superfluous(
        self, checkpoints: Sequence[SavedCheckpoint], *, newest: int
    ) -> list[SavedCheckpoint]:
        """List what may be deleted of checkpoints, oldest first, up to the `newest` step, which was
        just written; later ones belong to another past of the run.
        """
        own = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest]
        kept = {checkpoint.step for checkpoint in own[-self.last :]}
        if self.every_steps is not None:
            kept |= {
                checkpoint.step for checkpoint in own if checkpoint.step % self.every_steps == 0
            }
        if self.best is not None:
            best = self.best_of(own)
            if best is None:
                return []
            kept.add(best.step)
        return [checkpoint for checkpoint in own if checkpoint.step not in kept]

    def best_of(self, checkpoints: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """The checkpoint with the best value, the newest of equals; None where none has one."""
        sign = 1 if self.best_is == "max" else -1
        known = []
        for checkpoint in checkpoints:
            value = checkpoint.manifest.get("metrics", {}).get(self.best)
            if isinstance(value, (int, float)) and not math.isnan(value):  # NaN is best of nobody
                known.append((sign * value, checkpoint.step, checkpoint))
        if known:
            return max(known, key=lambda entry: entry[:2])[2]
        return None

    def describe_absence(self, checkpoints: Sequence[SavedCheckpoint], *, newest: int) -> str:
        """Describe, at the first save of a run, a metric that was not measured at its step; else
        empty.
        """
        own = [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest]
        if self.best is None or len(own) != 1 or self.best_of(own) is not None:
            return ""
        known = ", ".join(sorted(own[0].manifest.get("metrics", {}))) or "nothing"
        return (
            f"checkpoint.keep_best = {self.best}: it was not measured at step {own[0].step}, "
            f"where {known} was; until a checkpoint has it none is deleted: evaluate at the steps "
            "that are saved, or name another metric [metric-not-measured]"
        )


def clear_unfinished(folder: Path) -> list[str]:
    """Remove what interrupted saves and deletions left, and put `latest` right; returns what was
    removed.

    A checkpoint that was about to be replaced by one of the same step gets its name back.
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
