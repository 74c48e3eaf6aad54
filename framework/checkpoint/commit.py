"""Commit of a checkpoint whose files are written: described, flushed, renamed, and `latest` pointed at it.

It is done by rank 0, or by the process that writes for it, so nothing here knows of engines or of other ranks.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import FORMAT, SavedCheckpoint, list_checkpoints, seal
from framework.checkpoint.names import LATEST, LEAVING, MANIFEST, SAVING, tag_of
from framework.checkpoint.retention import Retention
from framework.system.files import (
    FileRecord,
    hash_file,
    refuse_link,
    replace_text,
    sync_file,
    sync_folder,
    sync_folders,
)
from framework.system.log import warn

_SCRIPTS: Final = ("zero_to_fp32.py", "zero_to_torch.py")


def make_room(folder: Path) -> None:
    """An empty ``.saving`` in a ``checkpoints`` folder."""
    staging = folder / SAVING
    refuse_link(folder)
    refuse_link(staging)
    if staging.exists():
        shutil.rmtree(staging)
    if not folder.exists():
        folder.mkdir()  # and no parents: a run folder that was removed is not made anew
    staging.mkdir()


def discard(folder: Path) -> None:
    """Remove what a failed save has written; what cannot be removed now is removed before the next save."""
    shutil.rmtree(folder / SAVING, ignore_errors=True)


def failure_of(folder: Path, step: int, failure: str) -> str:
    """Names a save that failed, and why."""
    return f"{folder / tag_of(step)}: the checkpoint cannot be written ({failure}); earlier ones are untouched"


def warn_of_failure(folder: Path, step: int, failure: str) -> None:
    """A save has failed, and the run does without it."""
    warn(
        f"{failure_of(folder, step, failure)}, training goes on, and the next save tries again [checkpoint-not-written]"
    )


def publish(
    folder: Path, tag: str, *, stated: Mapping[str, Any], records: Mapping[str, FileRecord], retention: Retention
) -> None:
    """All files of ``.saving/<tag>`` are written: describe them, flush them, give the checkpoint its name, delete old
    ones.

    Args:
        folder: the ``checkpoints`` folder.
        tag: the checkpoint's name.
        stated: what the manifest says beside its format and its files; ``step`` is in it.
        records: the files that the ranks wrote; others that lie there are hashed.
        retention: which checkpoints are kept.

    Raises:
        OSError: the file system refused; the checkpoints that have a name are as they were, or the new one has its own.
    """
    written, target = folder / SAVING / tag, folder / tag
    files = {name: asdict(record) for name, record in sorted(_all_records(written, records).items())}
    replace_text(written / MANIFEST, seal({"format": FORMAT, **stated, "files": files}))
    sync_folders(written)
    aside = folder / f"{LEAVING}{tag}"
    if target.exists():  # the same step, saved again after a resume
        target.rename(aside)
    written.rename(target)
    sync_folder(folder)
    replace_text(folder / LATEST, tag)
    _tidy(folder, aside, retention=retention, newest=int(stated["step"]))


def _all_records(written: Path, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Collect the records of what the ranks wrote, and of what DeepSpeed put there by itself."""
    for name, record in records.items():
        _refuse_unseen(written, name, record)
    found = dict(records)
    for path in sorted(written.rglob("*")):
        name = path.relative_to(written).as_posix()
        if path.is_file() and name not in found:
            sync_file(path)
            found[name] = hash_file(path)
    return found


def _refuse_unseen(written: Path, name: str, record: FileRecord) -> None:
    """Refuse a run folder on a disk that each host has for itself: its ranks write, and rank 0 sees nothing of it."""
    try:
        num_bytes = (written / name).lstat().st_size
    except FileNotFoundError:
        num_bytes = -1
    if num_bytes != record.num_bytes:
        raise OSError(
            errno.EIO,
            f"{name}, which a rank has written, is not whole where rank 0 looks: all hosts must share the run folder",
        )


def _tidy(folder: Path, replaced: Path, *, retention: Retention, newest: int) -> None:
    """Failing here costs disk space, not the run: the new checkpoint is complete."""
    try:
        for script in _SCRIPTS:
            if (folder / SAVING / script).exists():
                (folder / SAVING / script).replace(folder / script)
        shutil.rmtree(folder / SAVING)
        if replaced.exists():
            shutil.rmtree(replaced)
        checkpoints = list_checkpoints(folder)
        if absence := retention.describe_absence(checkpoints, newest=newest):
            warn(absence)
        for old in retention.superfluous(checkpoints, newest=newest):
            _delete(folder, old)
    except OSError as error:
        warn(f"{folder}: an old checkpoint cannot be deleted ({error}) [checkpoint-not-deleted]")


def _delete(folder: Path, old: SavedCheckpoint) -> None:
    """Without a name and a manifest first, so that a kill in the middle leaves nothing to resume from."""
    leaving = folder / f"{LEAVING}{old.tag}"
    old.path.rename(leaving)
    (leaving / MANIFEST).unlink()
    shutil.rmtree(leaving)
