"""Resume point: the checkpoint that a run, or a command, starts from; the named one, or the newest
that is sound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import (
    SavedCheckpoint,
    diagnose,
    list_checkpoints,
    read_checkpoint,
)
from framework.checkpoint.names import (
    CHECKPOINTS,
    LATEST,
    REPLACED,
    TAG,
    find_raw,
    holders,
    named_folders,
    own_names,
    replaced_names,
)
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, StorageError, show_value
from framework.system.files import replace_text

UNVERIFIED: Final = "checkpoint-unverified"
_RESUME: Final = "checkpoint.resume"


def find_sound_checkpoint(
    resume: str,
    *,
    run_checkpoints: Path,
    allow_unverified: bool = False,
    damage_of: Callable[[SavedCheckpoint], list[str]] = SavedCheckpoint.damage,
) -> tuple[SavedCheckpoint | None, list[str]]:
    """The newest checkpoint that ``checkpoint.resume`` allows and that is undamaged; and what is
    wrong with newer ones.

    A folder with the name of a checkpoint counts, also where its manifest is damaged or not given
    out by the file system: its steps were trained.

    Args:
        resume: ``auto``, ``never`` or a path.
        run_checkpoints: where `auto` looks.
        allow_unverified: a path may name a checkpoint that has no manifest, of which little can be
            told.
        damage_of: what is not as it was written, a line for each file; asked of one checkpoint
            after the other.

    Raises:
        ConfigError: a path was given and there is no finished checkpoint.
        StorageError: there are checkpoints, and none is sound: starting afresh would be no answer
            to ``resume: auto``. Or storage does not answer.
    """
    if resume == "never":
        return None, []
    with explaining_storage_errors(_RESUME, resume):
        if resume == "auto":
            candidates = list_checkpoints(run_checkpoints)[::-1]
            refused = _unreadable(run_checkpoints, known=candidates, key=_RESUME)
        else:
            candidates, refused = _at(resume, key=_RESUME, allow_unverified=allow_unverified)
    if resume != "auto":
        if not candidates:
            raise _not_found(resume)
        candidates = candidates[:1]
        _refuse_replaced(candidates[0])
    for candidate in candidates:
        newer = _newer(refused, than=candidate)
        if resume != "auto" and newer:
            break
        damage = damage_of(candidate)
        if not damage:
            return candidate, newer
        if damage[1:]:
            more = f" (and {len(damage) - 1} more)"
        else:
            more = ""
        refused[candidate.step if candidate.verified else -1] = (
            f"{candidate.path}/{damage[0]}{more}"
        )
    if not refused:
        return None, []
    if resume == "auto":
        stated = "no checkpoint is sound"
    else:
        stated = "the checkpoint is damaged"
    raise StorageError(
        f"{_RESUME} = {resume}: {stated}: "
        f"{'; '.join(refused[step] for step in sorted(refused, reverse=True))}; restore it from a "
        "copy, name another one, or start afresh with checkpoint.resume=never "
        "[checkpoint-damaged]"
    )


def find_checkpoint(
    resume: str, *, run_checkpoints: Path, allow_unverified: bool = False
) -> SavedCheckpoint | None:
    """The checkpoint that ``checkpoint.resume`` asks for, without a look at its files; None for a
    fresh start.

    Arguments and errors are those of `find_sound_checkpoint`, but for a folder whose newest
    manifest is damaged: there it is the error of `newest_at`.
    """
    if resume in ("auto", "never"):
        return find_sound_checkpoint(
            resume, run_checkpoints=run_checkpoints, damage_of=lambda _: []
        )[0]
    found = newest_at(resume, key=_RESUME, allow_unverified=allow_unverified)
    if found is None:
        raise _not_found(resume)
    return found


def saved_manifest(config: RunConfig) -> Mapping[str, Any]:
    """The manifest of the checkpoint that a run goes on from; empty where there is none, or where
    the start will say what is wrong with it.
    """
    asked = config.checkpoint
    with contextlib.suppress(ConfigError, StorageError, OSError):
        own = config.run.folder / CHECKPOINTS
        found = find_checkpoint(
            asked.resume, run_checkpoints=own, allow_unverified=asked.allow_unverified
        )
        return found.manifest if found else {}
    return {}


def newest_at(path: str, *, key: str, allow_unverified: bool = False) -> SavedCheckpoint | None:
    """The checkpoint that a path names, or the newest one of the folder that it names, without a
    look at its files.

    None where there is no finished one; `absence_at` tells why.

    Args:
        path: of a checkpoint, of a run folder, or of its ``checkpoints``.
        key: what the user gave the path for.
        allow_unverified: it may have no manifest.

    Raises:
        ConfigError: there is one without a manifest, and nobody asked for that; kind
            ``checkpoint-unverified``.
        StorageError: the manifest of the newest checkpoint is damaged, or storage does not answer.
    """
    with explaining_storage_errors(key, path):
        found, damaged = _at(path, key=key, allow_unverified=allow_unverified)
    if found and (newer := _newer(damaged, than=found[0])):
        raise StorageError(
            f"{key} = {path}: {'; '.join(newer)}; restore it from a copy, or name an older one, "
            f"such as {found[0].path} [checkpoint-damaged]"
        )
    return next(iter(found), None)


def absence_at(path: str, *, key: str) -> str:
    """Why there is no finished checkpoint at a path where `newest_at` has found none."""
    with explaining_storage_errors(key, path):
        named = Path(path)
        if not named.exists():
            return "there is no such folder"
        bears_a_name = TAG.match(named.name) or REPLACED.match(named.name)
        inside = [
            found for folder in reversed(holders(named)) for _, found in named_folders(folder)
        ]
        wrong = [_reported(found, key=key) for found in ([named] if bears_a_name else inside)]
    if wrong:
        return f"there is no finished checkpoint: {wrong[-1]}"
    return "there is no finished checkpoint"


def refused_unverified(path: Path, *, key: str) -> ConfigError:
    """The error for a checkpoint without a manifest that nobody asked for; `key` is what names
    it.
    """
    if key.startswith("checkpoint."):
        word = "checkpoint.allow_unverified: true"
    else:
        word = "--allow-unverified"
    reason = (
        "it has no manifest (DeepSpeed wrote it by itself, or the manifest is lost), so nothing "
        "tells whether its files are whole, or whose they are"
    )
    fix = f"{word} reads it nevertheless, as weights only"
    return ConfigError.of(kind=UNVERIFIED, key=key, value=str(path), reason=reason, fix=fix)


@contextlib.contextmanager
def explaining_storage_errors(key: str, value: str) -> Iterator[None]:
    """A file system that does not answer is one line; `key` is what the user gave the path for."""
    try:
        yield
    except OSError as error:
        if error.filename:
            place = f": {error.filename}"
        else:
            place = ""
        raise StorageError(
            f"{key} = {show_value(value)}{place}: it cannot be read: {error.strerror or error}; "
            "try again when storage answers [checkpoint-not-read]"
        ) from error


def _at(
    path: str, *, key: str, allow_unverified: bool
) -> tuple[list[SavedCheckpoint], dict[int, str]]:
    """Finished checkpoints at a path, the newest first; where it names their folder, also what
    `_unreadable` finds.
    """
    for named in own_names(Path(path)):
        checkpoint = read_checkpoint(named)
        if checkpoint:
            return [checkpoint], {}
    for folder in holders(Path(path)):
        found = list_checkpoints(folder)
        if found:
            return found[::-1], _unreadable(folder, known=found, key=key)
    raw = find_raw(Path(path))
    if raw is not None and not allow_unverified:
        raise refused_unverified(raw, key=key)
    return [
        SavedCheckpoint(raw.parent, raw.name, {}, verified=False)
    ] if raw is not None else [], {}


def _unreadable(folder: Path, *, known: Sequence[SavedCheckpoint], key: str) -> dict[int, str]:
    """Steps whose checkpoint has its name, and no manifest of this release as it was written ->
    what to say of it.
    """
    tags = {checkpoint.tag for checkpoint in known}
    return {
        step: _reported(path, key=key)
        for step, path in named_folders(folder)
        if path.name not in tags
    }


def _newer(refused: Mapping[int, str], *, than: SavedCheckpoint) -> list[str]:
    return [refused[step] for step in sorted(refused, reverse=True) if step > than.step]


def _reported(path: Path, *, key: str) -> str:
    stated = f"{path}{': ' if path.is_symlink() else '/'}{diagnose(path)}"
    if find_raw(path) is None:
        return stated
    if key.startswith("checkpoint."):
        return f"{stated} ({key}={path} with checkpoint.allow_unverified=true reads it without one)"
    return f"{stated} ({path} --allow-unverified reads it without one)"


def _refuse_replaced(candidate: SavedCheckpoint) -> None:
    """The run that goes on from it writes the checkpoints that follow beside it: it needs its own
    name for that.
    """
    replaced = REPLACED.match(candidate.tag)
    if replaced:
        back = candidate.folder / replaced["tag"]
        fix = (
            "rename it back to "
            f"{back}{', after what has that name now,' if back.exists() else ''} and name that"
        )
        reason = "it was set aside when the steps before it were taken again"
        value = str(candidate.path)
        raise ConfigError.of(
            kind="checkpoint-replaced", key=_RESUME, value=value, reason=reason, fix=fix
        )


def _not_found(resume: str) -> ConfigError:
    reason = absence_at(resume, key=_RESUME)
    fix = "name a .../global_step<N> folder or a run folder that holds one, or write auto or never"
    return ConfigError.of(
        kind="checkpoint-not-found", key=_RESUME, value=resume, reason=reason, fix=fix
    )


def set_aside_later(start: SavedCheckpoint) -> list[Path]:
    """Rename the checkpoints of a run that goes on from an earlier one; returns their new paths.

    They belong to steps that are about to be taken again. Left where they are, `auto` would resume
    from them, and the Checkpointer would count them among the newest and delete its own.
    """
    moved = []
    # damaged ones too: a save of the same step would delete them
    for step, later in named_folders(start.folder):
        if step > start.step:
            names = (start.folder / name for name in replaced_names(later.name))
            moved.append(later.rename(next(name for name in names if not os.path.lexists(name))))
    if moved:
        replace_text(start.folder / LATEST, start.tag)
    return moved
