"""The folder of a run: one writer at a time, one run per folder, small files that describe it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

import yaml

from deepspeed_lint.text.document import parse_scalar
from framework.checkpoint.names import CHECKPOINTS
from framework.engine_protocol import Table
from framework.errors import (
    ConfigError,
    Problem,
    RunFolderLostError,
    StorageError,
    in_one_line,
)
from framework.system.files import make_own_folder, open_own, replace_text
from framework.system.log import warn
from framework.system.waiting import waiting

_LOCK: Final = ".lock"
# A folder with one of these is a run's, and may be renamed: a user's project may bear the name of a
# run.
_FILES_OF_A_RUN: Final = frozenset({_LOCK, "plan.json", "metrics.jsonl"})
# Some network file systems (Lustre without -o flock, NFS without its lock daemon).
_CANNOT_LOCK: Final = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
# NFS shows a new folder after 60 s at the latest (`acdirmax`).
_LONGEST_DELAY_SECONDS: Final = 90.0
_POLL_SECONDS: Final = 0.5


class RunFolder:
    """``<output_dir>/<name>/``, held by rank 0 while it trains.

    Attributes:
        path: the folder.
        generation: random text in the lock file of a folder that takes the place of an earlier
            run's, so that other hosts can distinguish the two; else empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = ""
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def events(self) -> Path:
        """File of the run's events."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of every rank's log."""
        return self.path / "logs"

    def lock_if_exists(self) -> None:
        """Lock the folder if it is there, and create nothing.

        This comes before anything is read in it: a run that is about to end may still save.

        Raises:
            StorageError: another process is writing there.
        """
        try:
            if os.path.lexists(self.path / _LOCK):
                self._take_lock()
        except OSError as error:
            raise self._unusable(error) from error

    def open(self, *, fresh: bool) -> Path | None:
        """Take the folder, and create what is missing.

        Args:
            fresh: rename an earlier run's folder first.

        Returns:
            The new path of an earlier run's folder, or None if none was renamed.

        Raises:
            ConfigError: it is no run's folder.
            StorageError: another process is writing there, or the folder cannot be made.
        """
        is_new = False
        try:
            is_new = not self.path.exists()
            return self._take(fresh=fresh)
        except OSError as error:
            self.close()
            if is_new:
                self._remove_empty_folders()
            raise self._unusable(error) from error

    def wait_until_visible(
        self, generation: str, *, wait_seconds: float = _LONGEST_DELAY_SECONDS
    ) -> None:
        """Wait until this host sees the folder of this generation, and no longer the earlier one of
        the same name.

        A network file system may show its cached entry for up to a minute: logs and checkpoints
        would be written to the earlier run's folder. After `wait_seconds` it warns and returns.
        """
        with waiting(f"this host to see the run folder {self.path}", limit_seconds=wait_seconds):
            self._poll_for(generation, deadline=time.monotonic() + wait_seconds)

    def _poll_for(self, generation: str, *, deadline: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                next(self.path.parent.iterdir(), None)  # makes the file system look again
                if (self.path / _LOCK).read_text(encoding="utf-8") == generation:
                    return
            if time.monotonic() > deadline:
                warn(
                    f"{self.path}: this host does not see the folder that rank 0 has made: all "
                    "hosts must share the run folder [run-folder-not-shared]"
                )
                return
            time.sleep(_POLL_SECONDS)

    def check_usable(self) -> None:
        """Check that a folder can be made there, and leave nothing behind.

        It is called before other ranks wait for the folder.

        Raises:
            StorageError: it cannot be made.
        """
        folders = [self.path, *self.path.parents]
        nearest = next(folder for folder in folders if os.path.lexists(folder))
        try:
            Path(tempfile.mkdtemp(prefix=".can-write-", dir=nearest)).rmdir()
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StorageError:
        fix = "set run.output_dir to a folder you can write to"
        if error.errno == errno.ELOOP:
            fix = (
                "put what the link leads to in its place; for a larger disk move the whole run "
                "folder there and set run.output_dir, which may be a link itself"
            )
        return StorageError(
            f"run.output_dir: {self.path} cannot be used as run folder "
            f"({error.strerror or error}); {fix} [run-folder-unusable]"
        )

    def _remove_empty_folders(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / _LOCK).unlink()
        for place in (self.logs, self.checkpoints, self.path):
            with contextlib.suppress(OSError):
                place.rmdir()

    def _take(self, *, fresh: bool) -> Path | None:
        """Make and lock the folder; arguments, result and errors are as in `open`, but OSErrors."""
        self.path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in self.path.iterdir()}
        if fresh and names and not names & _FILES_OF_A_RUN:
            raise ConfigError.of(
                kind="run-folder-foreign",
                key="run.name",
                value=self.path.name,
                reason=f"{self.path} holds files that are no run's",
                fix="choose another run.name, or move them away",
            )
        self._take_lock()
        renamed: Path | None = None
        if fresh and names - {_LOCK}:
            # The lock is renamed with the folder: no other run can take the folder meanwhile.
            renamed = _move_aside(self.path)
            self.close()
            self.path.mkdir(exist_ok=True)
            self._take_lock()
            self._mark_generation()
        make_own_folder(self.checkpoints)
        make_own_folder(self.logs)
        return renamed

    def _mark_generation(self) -> None:
        assert self._lock is not None
        self.generation = uuid.uuid4().hex
        self._lock.write(self.generation)
        self._lock.flush()
        # The file stays open: other hosts would see its text only once the system writes it back.
        os.fsync(self._lock.fileno())

    def describe(
        self,
        *,
        config: Mapping[str, Any],
        ds_config: Mapping[str, Any],
        plan: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> None:
        """Write ``config.yaml`` (resolved), ``ds_config.json``, ``plan.json`` and
        ``environment.json``.
        """
        config_yaml = yaml.dump(dict(config), Dumper=_ConfigDumper, sort_keys=False)
        replace_text(self.path / "config.yaml", config_yaml)
        self.write_ds_config(ds_config)
        for name, content in {"plan": plan, "environment": environment}.items():
            self._write_json(name, content)

    def write_ds_config(self, ds_config: Mapping[str, Any]) -> None:
        """Write ``ds_config.json``."""
        self._write_json("ds_config", ds_config)

    def keep_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Write ``tables.json``: metrics of an evaluation that are matrices, in place of the ones
        before; a disk that does not take them costs only them.
        """
        content = {name: {"step": step, "rows": rows} for name, rows in tables.items()}
        try:
            replace_text(self.path / "tables.json", json.dumps(content) + "\n")
        except OSError as error:
            warn(f"tables.json: {in_one_line(error)} [tables-not-written]")

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, default=str) + "\n"
        replace_text(self.path / f"{name}.json", text)

    def check_held(self) -> None:
        """Check that the folder is still there and still this run's; a folder that is not held
        passes.

        Storage that does not answer for a moment is no reason to end a run.

        Raises:
            RunFolderLostError: it was removed, renamed or taken by another run.
        """
        reason = self._why_lost()
        if reason:
            error = RunFolderLostError(
                f"{self.path}: the run folder was lost while the run was writing to it ({reason}); "
                "what it held goes on with checkpoint.resume once it is back under its name "
                "[run-folder-lost]"
            )
            error.is_of_one_rank = True
            raise error

    def _why_lost(self) -> str:
        """Return why the folder is lost; empty if it is not, if it is not held, or if storage does
        not answer.
        """
        if self._lock is None:
            return ""
        try:
            lock_there = (self.path / _LOCK).lstat()
            if os.path.samestat(os.fstat(self._lock.fileno()), lock_there):
                return ""
        except OSError as error:
            if error.errno in _GONE:
                return "it was removed or renamed"
            return ""
        return "its lock is another run's"

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        """Lock the folder, unless this run holds it; on a file system without locks, warn.

        Raises:
            StorageError: another run holds it.
            OSError: the lock file cannot be opened or locked.
        """
        if self._lock is not None:
            return
        lock = open_own(self.path / _LOCK, "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have renamed the folder since the file was opened.
            is_busy = not os.path.samestat(os.fstat(lock.fileno()), (self.path / _LOCK).stat())
        except BlockingIOError:
            is_busy = True
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                lock.close()
                raise
            warn(
                f"{self.path}: its file system has no locks ({error.strerror}): nothing keeps a "
                "second run of the same name from writing there [run-folder-not-locked]"
            )
            is_busy = False
        if is_busy:
            lock.close()
            raise StorageError(
                Problem(  # no ConfigError: a later start gets the folder
                    kind="run-folder-busy",
                    key="run.name",
                    value=self.path.name,
                    reason=f"another run is writing to {self.path}",
                    fix="wait for it, or choose another run.name",
                )
            )
        self._lock = lock


# libyaml's, where PyYAML has it, writes the same in a fifth of the time; it folds long quoted text at
# other places.
_Dumper: Final[type[yaml.SafeDumper]] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _ConfigDumper(_Dumper):  # type: ignore[misc, valid-type]
    """Puts text in quotes that our reader would take for another value: `1e3` is text in YAML
    1.1.
    """


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _is_read_as_text(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


@lru_cache(maxsize=1000)  # most texts of a config are its keys
def _is_read_as_text(text: str) -> bool:
    try:
        return isinstance(parse_scalar(text, name=""), str)
    except ConfigError:
        return False


_ConfigDumper.add_representer(str, _represent_text)


def _move_aside(path: Path) -> Path:
    """Rename a finished or broken run's folder, so that its files are never mixed with the next
    run's; returns the new path, with the time of its last change.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    target = path.with_name(f"{path.name}.{stamp}")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{stamp}-{number}")
    return path.rename(target)
