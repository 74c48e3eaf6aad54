"""Which checkpoint a run, or a command, starts from: the one that was named, or the newest that is sound."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from framework.errors import ConfigError, Problem, StorageError, show_value
from framework.files import replace_text
from framework.train.saved import (
    LATEST,
    REPLACED,
    TAG,
    SavedCheckpoint,
    list_checkpoints,
    named_folders,
    read_checkpoint,
    whats_wrong,
)
from framework.train.unverified import find_raw, refused


def find_checkpoint(
    resume: str, *, run_checkpoints: Path, allow_unverified: bool = False, key: str = "checkpoint.resume"
) -> SavedCheckpoint | None:
    """The checkpoint that ``checkpoint.resume`` asks for, without a look at its files; None for a fresh start.

    Args:
        resume: ``auto``, ``never`` or a path.
        run_checkpoints: where `auto` looks.
        allow_unverified: a path may name a checkpoint that has no manifest.
        key: what the user gave the path for.

    Raises:
        ConfigError: a path was given and there is no finished checkpoint, or one without a manifest that nobody asked for.
        StorageError: `auto`, and all that are there are damaged; a folder was given, and the manifest of its newest checkpoint
            is damaged; or storage does not answer.
    """
    with telling_of_storage(key, resume):
        candidates = _candidates(resume, run_checkpoints=run_checkpoints, allow_unverified=allow_unverified, key=key)
        damaged = _unreadable(_searched(resume, candidates, run_checkpoints=run_checkpoints), known=candidates, key=key)
    if damaged and not candidates:
        raise _none_sound(resume, damaged)
    if resume != "auto":
        newer = [damaged[step] for step in sorted(damaged, reverse=True) if step > candidates[0].step]
        if newer:
            raise StorageError(f"{key} = {resume}: {'; '.join(newer)}; restore it from a copy, or name an older one, such as "
                               f"{candidates[0].path} [checkpoint-damaged]")  # fmt: skip
    return next(iter(candidates), None)


def find_sound_checkpoint(
    resume: str, *, run_checkpoints: Path, allow_unverified: bool = False,
    damage_of: Callable[[SavedCheckpoint], list[str]] = SavedCheckpoint.damage,
) -> tuple[SavedCheckpoint | None, list[str]]:  # fmt: skip
    """The newest checkpoint that ``checkpoint.resume`` allows and that is undamaged; and what is wrong with newer ones.

    A folder with the name of a checkpoint counts, also where its manifest is what is damaged: its steps were trained.
    One whose manifest the file system does not give out counts as damaged, as it does with any other file.

    Args:
        resume: ``auto``, ``never`` or a path.
        run_checkpoints: where `auto` looks.
        allow_unverified: a path may name a checkpoint that has no manifest, of which little can be told.
        damage_of: what is not as it was written, a line for each file; asked of one checkpoint after the other.

    Raises:
        ConfigError: a path was given and there is no finished checkpoint.
        StorageError: there are checkpoints, and none is sound: starting afresh would be no answer to ``resume: auto``. Or
            storage does not answer.
    """
    with telling_of_storage("checkpoint.resume", resume):
        candidates = _candidates(resume, run_checkpoints=run_checkpoints, allow_unverified=allow_unverified)
        refused = _unreadable(_searched(resume, candidates, run_checkpoints=run_checkpoints), known=candidates)
    _refuse_replaced(candidates)
    for candidate in candidates:
        newer = [refused[step] for step in sorted(refused, reverse=True) if step > candidate.step] if candidate.verified else []
        if resume != "auto" and newer:
            break
        damage = damage_of(candidate)
        if not damage:
            return candidate, newer
        more = f" (and {len(damage) - 1} more)" if damage[1:] else ""
        refused[candidate.step if candidate.verified else -1] = f"{candidate.path}/{damage[0]}{more}"
        if resume != "auto":
            break
    if refused:
        raise _none_sound(resume, refused)
    return None, []


def _none_sound(resume: str, refused: Mapping[int, str]) -> StorageError:
    told = "; ".join(refused[step] for step in sorted(refused, reverse=True))
    return StorageError(
        f"checkpoint.resume = {resume}: {'no checkpoint is sound' if resume == 'auto' else 'the checkpoint is damaged'}: {told}; "
        "restore it from a copy, name another one, or start afresh with checkpoint.resume=never [checkpoint-damaged]"
    )


def _refuse_replaced(candidates: Sequence[SavedCheckpoint]) -> None:
    """The run that goes on from it writes checkpoints of the steps that follow, beside it: it needs its own name for that."""
    for candidate in candidates:
        if replaced := REPLACED.match(candidate.tag):
            back = candidate.folder / replaced["tag"]
            raise ConfigError(Problem(
                kind="checkpoint-replaced", key="checkpoint.resume", value=str(candidate.path),
                reason="it was set aside when the steps before it were taken again",
                fix=f"rename it back to {back}" + (", after what has that name now," if back.exists() else "") + " and name that",
            ))  # fmt: skip


def _searched(resume: str, candidates: Sequence[SavedCheckpoint], *, run_checkpoints: Path) -> Path | None:
    """The folder of which the newest checkpoint is asked for; None where one is named, or none at all."""
    if resume == "auto":
        return run_checkpoints
    if not candidates or not candidates[0].verified or candidates[0].path.resolve() == Path(resume).resolve():
        return None
    return candidates[0].folder


def _unreadable(
    folder: Path | None, *, known: Sequence[SavedCheckpoint], key: str = "checkpoint.resume"
) -> dict[int, str]:
    """Steps whose checkpoint has its name, and no manifest of this release as it was written; and what to say of them."""
    tags = {checkpoint.tag for checkpoint in known}
    return {step: _told(path, key=key) for step, path in named_folders(folder) if path.name not in tags} if folder else {}


def _told(path: Path, *, key: str) -> str:
    said = f"{path}{': ' if path.is_symlink() else '/'}{whats_wrong(path)}"
    if find_raw(path) is None:
        return said
    how = f"{key}={path} with checkpoint.allow_unverified=true" if key.startswith("checkpoint.") else f"{path} --allow-unverified"
    return f"{said} ({how} reads it without one)"


@contextlib.contextmanager
def telling_of_storage(key: str, value: str) -> Iterator[None]:
    """A file system that does not answer is one line; `key` is what the user gave the path for."""
    try:
        yield
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise StorageError(f"{key} = {show_value(value)}{place}: it cannot be read: {error.strerror or error}; try again when "
                           "storage answers [checkpoint-not-read]") from error  # fmt: skip


def _candidates(
    resume: str, *, run_checkpoints: Path, allow_unverified: bool, key: str = "checkpoint.resume"
) -> list[SavedCheckpoint]:
    """Finished checkpoints that would do, the best first."""
    if resume == "never":
        return []
    if resume == "auto":
        return list(reversed(list_checkpoints(run_checkpoints)))
    path = Path(resume)
    for named in (path, path.resolve()):  # a link, or `.`, may stand for a checkpoint
        if checkpoint := read_checkpoint(named):
            return [checkpoint]
    for folder in (path, path / "checkpoints"):
        if found := list_checkpoints(folder):
            return list(reversed(found))
    if raw := find_raw(path):
        if allow_unverified:
            return [SavedCheckpoint(raw.parent, raw.name, {}, verified=False)]
        raise refused(raw, key=key)
    reason = "there is no finished checkpoint" if path.exists() else "there is no such folder"
    if wrong := [_told(named, key=key) for named in _bearing_a_name(path)]:
        reason += f": {wrong[-1]}"
    raise ConfigError(Problem(
        kind="checkpoint-not-found", key="checkpoint.resume", value=resume, reason=reason,
        fix="name a .../global_step<N> folder or a run folder that holds one, or write auto or never",
    ))  # fmt: skip


def _bearing_a_name(path: Path) -> list[Path]:
    """What would be a checkpoint by its name: the path itself, or folders in it, the oldest first."""
    if (TAG.match(path.name) or REPLACED.match(path.name)) and path.exists():
        return [path]
    return [found for folder in (path / "checkpoints", path) for _, found in named_folders(folder)]


def set_aside_later(start: SavedCheckpoint) -> list[Path]:
    """Rename the checkpoints of a run that goes on from an earlier one; returns their new paths.

    They belong to steps that are about to be taken again. Left where they are, `auto` would resume from them, and the
    Checkpointer would count them among the newest and delete its own.
    """
    moved = []
    for step, later in named_folders(start.folder):  # damaged ones too: a save of the same step would delete them
        if step > start.step:
            names = (f"{later.name}.replaced{suffix}" for suffix in ("", *(f"-{n}" for n in range(1, 1000))))
            target = next(start.folder / name for name in names if not os.path.lexists(start.folder / name))
            moved.append(later.rename(target))
    if moved:
        replace_text(start.folder / LATEST, start.tag)
    return moved
