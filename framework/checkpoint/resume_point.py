"""Resume point: the checkpoint that a run, or a command, starts from; the named one, or the newest
that is sound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import (
    SavedCheckpoint,
    best_of,
    diagnose,
    list_checkpoints,
    read_checkpoint,
)
from framework.checkpoint.names import (
    BEST,
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
    named: SavedCheckpoint | None = None,
) -> tuple[SavedCheckpoint | None, list[str]]:
    """Find the newest undamaged checkpoint that ``checkpoint.resume`` allows. Also returns the
    faults of newer ones, a line for each.

    A folder with the name of a checkpoint counts, also if its manifest is damaged or the file
    system does not give it out: its steps were trained.

    Args:
        resume: ``auto``, ``never`` or a path.
        run_checkpoints: where `auto` looks.
        allow_unverified: a path may name a checkpoint without a manifest, about which little is
            known.
        damage_of: lists the changed files of a checkpoint, a line for each; called for one
            checkpoint after the other.
        named: the checkpoint at a path, if it was looked up before.

    Raises:
        ConfigError: there is no finished checkpoint at a path.
        StorageError: there are checkpoints, and none is sound: starting afresh would be no answer
            to ``resume: auto``. Or storage does not answer.
    """
    if resume == "never":
        return None, []
    candidates: list[SavedCheckpoint] = []
    faults: dict[int, str] = {}
    with explaining_storage_errors(_RESUME, resume):
        if named is not None:
            candidates = [named]
        elif resume == "auto":
            candidates = list_checkpoints(run_checkpoints)[::-1]
            faults = _unreadable(run_checkpoints, known=candidates, key=_RESUME)
        else:
            candidates, faults = _checkpoints_at(
                named_best(resume, key=_RESUME), key=_RESUME, allow_unverified=allow_unverified
            )
    if resume != "auto":
        if not candidates:
            raise _not_found(resume)
        candidates = candidates[:1]
        _refuse_replaced(candidates[0])
    for candidate in candidates:
        newer = _newer(faults, than=candidate)
        if resume != "auto" and newer:
            break
        damage = damage_of(candidate)
        if not damage:
            return candidate, newer
        # Without a manifest the step is not known yet, and there is no other candidate.
        step = candidate.step if candidate.verified else -1
        faults[step] = f"{candidate.path}/{_shortened(damage)}"
    if faults:
        raise _none_is_sound(resume, faults)
    return None, []


def _shortened(damage: Sequence[str]) -> str:
    if len(damage) == 1:
        return damage[0]
    return f"{damage[0]} (and {len(damage) - 1} more)"


def _none_is_sound(resume: str, faults: Mapping[int, str]) -> StorageError:
    if resume == "auto":
        outcome = "no checkpoint is sound"
    else:
        outcome = "the checkpoint is damaged"
    lines = "; ".join(faults[step] for step in sorted(faults, reverse=True))
    return StorageError(
        f"{_RESUME} = {resume}: {outcome}: {lines}; restore it from a "
        "copy, name another one, or start afresh with checkpoint.resume=never "
        "[checkpoint-damaged]"
    )


def find_checkpoint(
    resume: str, *, run_checkpoints: Path, allow_unverified: bool = False
) -> SavedCheckpoint | None:
    """Find the checkpoint that ``checkpoint.resume`` names, without a look at its files; None for a
    fresh start.

    Arguments and errors are as in `find_sound_checkpoint`, except for a folder in which the newest
    manifest is damaged: there it is the error of `newest_at`.
    """
    if resume in ("auto", "never"):
        checkpoint, _ = find_sound_checkpoint(
            resume, run_checkpoints=run_checkpoints, damage_of=lambda _: []
        )
        return checkpoint
    checkpoint = newest_at(resume, key=_RESUME, allow_unverified=allow_unverified)
    if checkpoint is None:
        raise _not_found(resume)
    return checkpoint


class ResumeLookup:
    """The checkpoint that a config's `checkpoint.resume` names, looked up once, when it is first
    needed: for keys that are ``auto``, for first weights, and for a start at a path.

    A start with ``auto`` looks anew when it has locked the run folder: an earlier start may have
    saved since.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @cached_property
    def checkpoint(self) -> SavedCheckpoint | None:
        """The checkpoint as `find_checkpoint` finds it, with its errors."""
        section = self._config.checkpoint
        return find_checkpoint(
            section.resume,
            run_checkpoints=self._config.run.folder / CHECKPOINTS,
            allow_unverified=section.allow_unverified,
        )

    def manifest(self) -> Mapping[str, Any]:
        """Return the manifest of the checkpoint; empty for a fresh start, or if the checkpoint
        cannot be found or read, which the start will report.
        """
        with contextlib.suppress(ConfigError, StorageError, OSError):
            if self.checkpoint is not None:
                return self.checkpoint.manifest
        return {}


def at_step(path: str, step: str | None, *, key: str) -> str:
    """Return the path of the checkpoint of a step, or of ``best``, within a run folder; for no step
    the path as it is.

    Raises:
        ConfigError: kind ``checkpoint-not-found``: the run has no checkpoint of this step, or the
            path is one checkpoint.
    """
    if not step:
        return path
    if step != BEST and not step.isdecimal():
        reason = f"{show_value(step)} is no step"
        fix = f"write a number, or {BEST}"
        raise ConfigError.of("checkpoint-not-found", reason, fix, key, path)
    if any(TAG.match(name.name) for name in own_names(Path(path))):
        reason = "it is one checkpoint, and a step chooses among those of a run"
        fix = "leave the step out, or name the run folder"
        raise ConfigError.of("checkpoint-not-found", reason, fix, key, path)
    if step == BEST:
        return str(Path(path, BEST))
    with explaining_storage_errors(key, path):
        folder_of = _folders_by_step(Path(path))
    if not folder_of:
        return path  # its absence is explained there
    if int(step) in folder_of:
        return str(folder_of[int(step)])
    reason = f"there is no checkpoint of step {step}"
    fix = f"there are {', '.join(map(str, folder_of))}, and {BEST}"
    raise ConfigError.of("checkpoint-not-found", reason, fix, key, path)


def _folders_by_step(run_folder: Path) -> dict[int, Path]:
    """Map the steps of the checkpoints in a run folder to their folders, the first of each step."""
    folder_of: dict[int, Path] = {}
    for holder in holders(run_folder):
        for step, folder in named_folders(holder):
            folder_of.setdefault(step, folder)
    return folder_of


def named_best(path: str, *, key: str) -> str:
    """Return a path, or for ``.../best`` the path of the best checkpoint of that run or
    ``checkpoints`` folder, by the metric that its newest checkpoint was kept by.

    Raises:
        ConfigError: kind ``best-not-known``: the run has no such metric, or no checkpoint in which
            it was measured.
        StorageError: storage does not answer.
    """
    place = Path(path)
    if place.name != BEST or os.path.lexists(place):
        return path
    with explaining_storage_errors(key, path):
        for holder in holders(place.parent):
            checkpoints = list_checkpoints(holder)
            if checkpoints:
                return str(_best_among(checkpoints, path, key=key).path)
    return path  # its absence is explained there


def _best_among(checkpoints: Sequence[SavedCheckpoint], path: str, *, key: str) -> SavedCheckpoint:
    section = checkpoints[-1].manifest["config"].get("checkpoint", {})
    metric = section.get("keep_best")
    best = best_of(checkpoints, metric, best_is=section.get("best_is", "max"))
    if metric is not None and best is not None:
        return best
    steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
    if metric is None:
        reason = "the run was not given a metric for the best (checkpoint.keep_best)"
    else:
        reason = f"no checkpoint has a value of {metric}"
    fix = f"name a step: there are {steps}"
    raise ConfigError.of("best-not-known", reason, fix, key, path)


def newest_at(path: str, *, key: str, allow_unverified: bool = False) -> SavedCheckpoint | None:
    """Return the checkpoint at a path, or the newest one of the folder at a path, without a look at
    its files. None if there is no finished one; `absence_at` explains it.

    Args:
        path: of a checkpoint, of a run folder, or of its ``checkpoints``; ``.../best`` in one of
            these is the best one.
        key: the config key or option that the path is the value of.
        allow_unverified: it may have no manifest.

    Raises:
        ConfigError: it has no manifest, which is not allowed; kind ``checkpoint-unverified``.
        StorageError: the manifest of the newest checkpoint is damaged, or storage does not answer.
    """
    path = named_best(path, key=key)
    with explaining_storage_errors(key, path):
        checkpoints, faults = _checkpoints_at(path, key=key, allow_unverified=allow_unverified)
    if not checkpoints:
        return None
    newest = checkpoints[0]
    newer = _newer(faults, than=newest)
    if newer:
        raise StorageError(
            f"{key} = {path}: {'; '.join(newer)}; restore it from a copy, or name an older one, "
            f"such as {newest.path} [checkpoint-damaged]"
        )
    return newest


def absence_at(path: str, *, key: str) -> str:
    """Explain why there is no finished checkpoint at a path where `newest_at` has found none."""
    with explaining_storage_errors(key, path):
        folder = Path(path)
        if not folder.exists():
            return "there is no such folder"
        candidates = []
        for holder in reversed(holders(folder)):
            candidates += [candidate for _, candidate in named_folders(holder)]
        if TAG.match(folder.name) or REPLACED.match(folder.name):
            candidates = [folder]
        faults = [_fault_of(candidate, key=key) for candidate in candidates]
    if faults:
        return f"there is no finished checkpoint: {faults[-1]}"
    return "there is no finished checkpoint"


def refused_unverified(path: Path, *, key: str) -> ConfigError:
    """Return the error for a checkpoint without a manifest; `key` is the config key or option that
    names it.
    """
    if key.startswith("checkpoint."):
        option = "checkpoint.allow_unverified: true"
    else:
        option = "--allow-unverified"
    reason = (
        "it has no manifest (DeepSpeed wrote it by itself, or the manifest is lost), so nothing "
        "tells whether its files are whole, or whose they are"
    )
    fix = f"{option} reads it nevertheless, as weights only"
    return ConfigError.of(kind=UNVERIFIED, key=key, value=str(path), reason=reason, fix=fix)


@contextlib.contextmanager
def explaining_storage_errors(key: str, value: str) -> Iterator[None]:
    """Turn an OSError into a StorageError of one line; `value` is the path that `key` is set to."""
    try:
        yield
    except OSError as error:
        setting = f"{key} = {show_value(value)}"
        if error.filename:
            setting += f": {error.filename}"
        raise StorageError(
            f"{setting}: it cannot be read: {error.strerror or error}; "
            "try again when storage answers [checkpoint-not-read]"
        ) from error


def _checkpoints_at(
    path: str, *, key: str, allow_unverified: bool
) -> tuple[list[SavedCheckpoint], dict[int, str]]:
    """Return the finished checkpoints at a path, the newest first; and the unreadable ones, if it
    is the path of their folder: step -> fault. Raises ConfigError for one without a manifest, if
    that is not allowed.
    """
    for name in own_names(Path(path)):
        checkpoint = read_checkpoint(name)
        if checkpoint:
            return [checkpoint], {}
    for folder in holders(Path(path)):
        checkpoints = list_checkpoints(folder)
        if checkpoints:
            return checkpoints[::-1], _unreadable(folder, known=checkpoints, key=key)
    raw = find_raw(Path(path))
    if raw is None:
        return [], {}
    if not allow_unverified:
        raise refused_unverified(raw, key=key)
    return [SavedCheckpoint(raw.parent, raw.name, {}, verified=False)], {}


def _unreadable(folder: Path, *, known: Sequence[SavedCheckpoint], key: str) -> dict[int, str]:
    """Return the faults of folders that have the name of a checkpoint, and no manifest of this
    release as it was written, by step.
    """
    tags = {checkpoint.tag for checkpoint in known}
    faults = {}
    for step, path in named_folders(folder):
        if path.name not in tags:
            faults[step] = _fault_of(path, key=key)
    return faults


def _newer(faults: Mapping[int, str], *, than: SavedCheckpoint) -> list[str]:
    """List the faults at later steps than a checkpoint's, the newest first."""
    return [faults[step] for step in sorted(faults, reverse=True) if step > than.step]


def _fault_of(path: Path, *, key: str) -> str:
    """Describe the fault of a checkpoint that cannot be read, with the option that reads it without
    a manifest, if one does.
    """
    separator = ": " if path.is_symlink() else "/"
    fault = f"{path}{separator}{diagnose(path)}"
    if find_raw(path) is None:
        return fault
    if key.startswith("checkpoint."):
        return f"{fault} ({key}={path} with checkpoint.allow_unverified=true reads it without one)"
    return f"{fault} ({path} --allow-unverified reads it without one)"


def _refuse_replaced(candidate: SavedCheckpoint) -> None:
    """Refuse a checkpoint that was set aside: a run that resumes from it writes later checkpoints
    beside it, and needs its own name for that.
    """
    replaced = REPLACED.match(candidate.tag)
    if replaced:
        original = candidate.folder / replaced["tag"]
        if original.exists():
            fix = f"rename it back to {original}, after what has that name now, and name that"
        else:
            fix = f"rename it back to {original} and name that"
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
    """Rename the checkpoints of steps after the one that a run starts from, and point `latest` at
    that; returns their new paths.

    Their steps are about to be taken again. Left where they are, `auto` would resume from them, and
    the Checkpointer would count them among the newest and delete its own.
    """
    moved = []
    # damaged ones too: a save of the same step would delete them
    for step, later in named_folders(start.folder):
        if step > start.step:
            moved.append(later.rename(_free_name(later)))
    if moved:
        replace_text(start.folder / LATEST, start.tag)
    return moved


def _free_name(path: Path) -> Path:
    names = replaced_names(path.name)
    target = path.with_name(next(names))
    while os.path.lexists(target):
        target = path.with_name(next(names))
    return target
