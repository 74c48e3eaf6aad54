"""Which code may be called: what a checkpoint's manifest names as a target is code that the author
of the folder chooses.

Trusted are runs that this user has trained, where they lie below the present folder, and folders
that the user lists. That a run belongs to this user is no sign of either, because an archive that
is unpacked belongs to whom unpacks it: so a training notes, in the user's own files, the run folder
and the code that it called (`note_trained`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import SavedCheckpoint, read_checkpoint
from framework.checkpoint.names import MANIFEST
from framework.config.run_config import CODE_SECTIONS
from framework.errors import ConfigError, StorageError
from framework.system.files import open_own, replace_text

# Notes are cut to their newer half at this size: some 20,000 runs.
_MOST_BYTES: Final = 4 << 20
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_HEADER: Final = "# Checkpoints in these folders may call the code that they name (dsf trust).\n"


def trained_file() -> Path:
    """Return the file that notes what this user has trained; the environment variable
    XDG_STATE_HOME may place it.

    Raises:
        RuntimeError: this user has no home folder.
    """
    return _own_place("XDG_STATE_HOME", ".local/state") / "trained"


def trusted_file() -> Path:
    """Return the file that lists folders which this user trusts; XDG_CONFIG_HOME may place it.

    Raises:
        RuntimeError: this user has no home folder.
    """
    return _own_place("XDG_CONFIG_HOME", ".config") / "trusted"


def _own_place(variable: str, default: str) -> Path:
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():  # the specification has other values ignored
        return given / "dsf"
    return Path.home() / default / "dsf"


def note_trained(folder: Path, config: Mapping[str, Any]) -> None:
    """Note that this user trains a run, with the code that its config names. Where nothing can be
    written, its checkpoints will need to be trusted by name.

    Args:
        folder: of the run.
        config: resolved, as manifests hold it.
    """
    with contextlib.suppress(OSError, RuntimeError):
        path = trained_file()
        line = json.dumps([str(folder.resolve()), _digest_of(config)]) + "\n"
        lines = _lines_of(path)
        if line in lines:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists() or sum(map(len, lines)) > _MOST_BYTES:
            replace_text(path, "".join([*lines[len(lines) // 2 :], line]), mode=0o600)
            return
        with open_own(path, "a") as stream:
            stream.write(line)


def _digest_of(config: Mapping[str, Any]) -> str:
    """Return a hash of all sections that may name code."""
    sections = {name: config.get(name) for name in CODE_SECTIONS}
    sections = json.loads(json.dumps(sections))  # as a manifest holds them: every key is text
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def _lines_of(path: Path) -> list[str]:
    """Return the lines of a file of the user's own; none where it is not there, or others may write
    into it.
    """
    try:
        if _writers(path, of_user=True) or _writers(path.parent, of_user=True):
            return []
        with open_own(path, "r") as stream:
            text: str = stream.read()
            return text.splitlines(keepends=True)
    except OSError:
        return []


def _writers(path: Path, *, of_user: bool) -> str:
    """Return who but this user may change a file or folder; empty: no other.

    With `of_user` it must be this user's; otherwise another owner is not looked at.

    Raises:
        OSError: it is not there.
    """
    found = path.lstat()
    if of_user and found.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if found.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody"
    if of_user and found.st_mode & _OTHERS_MAY_WRITE:
        return f"{path} can be written by its group"
    return ""


def why_not_trusted(checkpoint: SavedCheckpoint) -> str:
    """Return why the code that a checkpoint names is not trusted; empty: it is.

    All links are resolved first, and the manifest there must be the one that was read, so that the
    folders that are looked at are those that it came from.
    """
    try:
        path = checkpoint.path.resolve(strict=True)
        there = read_checkpoint(path)
        if there is None or there.manifest != checkpoint.manifest:
            return f"{path} has changed since it was read"
        if _is_listed(path):
            return ""
        return _why_not_trained(path, checkpoint.manifest["config"])
    except (OSError, RuntimeError) as error:
        return str(error)


def _is_listed(path: Path) -> bool:
    """Check whether the user's list has a folder around a checkpoint, below which only known users
    can write.
    """
    for folder in trusted_folders():
        if not path.is_relative_to(folder) or _replaceable(folder):
            continue
        if not any(_writers(each, of_user=False) for each in _read_of(folder, path)):
            return True
    return False


def _replaceable(folder: Path) -> str:
    """Return the folder above in which everybody can put another one in its place; empty: none. In
    a sticky folder, such as /tmp, only owners rename.
    """
    for above in folder.parents:
        mode = above.lstat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return str(above)
    return ""


def _why_not_trained(path: Path, config: Mapping[str, Any]) -> str:
    """Return why a checkpoint is not of a run that this user trained below the present folder."""
    run = path.parent.parent
    here = Path.cwd().resolve()
    if json.dumps([str(run), _digest_of(config)]) + "\n" not in _lines_of(trained_file()):
        return "this user has not trained it at this place, by the notes of this machine"
    if not path.is_relative_to(here):
        return f"it was trained by this user, but not below the present folder, {here}"
    for each in _read_of(here, path):
        writers = _writers(each, of_user=True)
        if writers:
            return f"it was trained by this user, but {writers}"
    return ""


def _read_of(folder: Path, path: Path) -> list[Path]:
    """Return what decides the code of a checkpoint: the folders from `folder` down to `path`, both
    of them too, and the manifest.
    """
    inside = path.relative_to(folder).parts
    folders = [folder.joinpath(*inside[:count]) for count in range(len(inside) + 1)]
    return [*folders, path / MANIFEST]


# The user's list: `dsf trust`.


def trusted_folders() -> list[Path]:
    """Return the folders of the user's list, as they stand there: without links."""
    folders = []
    for line in _lines_of(trusted_file()):
        text = line.strip()
        if Path(text).is_absolute():  # others are comments
            folders.append(Path(text))
    return folders


def trust_folder(name: str) -> Path:
    """Add a folder to the user's list, and return it with links resolved.

    Raises:
        ConfigError: kind ``trust-folder``: it is no folder, or everybody can write there.
        StorageError: the list cannot be written.
    """
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError.of(
            "trust-folder", "it is no folder", "name a run folder, or one around it", value=name
        )
    if not str(folder).isprintable() or str(folder) != str(folder).strip():
        reason = "its name cannot stand on a line of the list"
        raise ConfigError.of("trust-folder", reason, "rename it", value=name)
    above = _replaceable(folder)
    if above:
        reason = f"everybody can put another folder in its place, in {above}"
        fix = f"take that right away first: chmod o-w {above}"
        raise ConfigError.of("trust-folder", reason, fix, value=name)
    if _writers(folder, of_user=False):
        reason = "everybody can write there, and so choose what code is run"
        fix = f"take that right away first: chmod o-w {folder}"
        raise ConfigError.of("trust-folder", reason, fix, value=name)
    folders = trusted_folders()
    if folder not in folders:
        _write([*folders, folder])
    return folder


def distrust_folder(name: str) -> Path:
    """Take a folder off the user's list, and return it.

    Raises:
        ConfigError: kind ``trust-folder``: it is not listed.
        StorageError: the list cannot be written.
    """
    folder = Path(name).expanduser().resolve()
    folders = trusted_folders()
    if folder not in folders:
        raise ConfigError.of(
            "trust-folder", "it is not listed", "see the list: dsf trust", value=name
        )
    _write([each for each in folders if each != folder])
    return folder


def _write(folders: list[Path]) -> None:
    try:
        path = trusted_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = "".join(f"{folder}\n" for folder in folders)
        replace_text(path, _HEADER + lines, mode=0o600)
        is_read = trusted_folders() == folders
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"trust: the list cannot be written ({error}); set XDG_CONFIG_HOME to a folder of "
            "your own [file-not-written]"
        ) from error
    if not is_read:
        raise StorageError(
            f"trust: others can write to {path.parent}, so the list in it is not read; "
            f"chmod go-w {path.parent} [file-not-written]"
        )
