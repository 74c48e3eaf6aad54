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
from pathlib import Path
from typing import IO, Any, Final

import yaml

from framework.checkpoint.names import CHECKPOINTS
from framework.errors import ConfigError, Problem, StorageError
from framework.system.files import make_own_folder, open_own, replace_text
from framework.system.log import warn
from framework.system.waiting import waiting
from framework.text.document import parse_scalar

_LOCK: Final = ".lock"
# What makes a folder ours to rename: somebody's project may bear the name of a run.
_OF_A_RUN: Final = frozenset({_LOCK, "plan.json", "metrics.jsonl"})
# Some network file systems (Lustre without -o flock, NFS without its lock daemon).
_CANNOT_LOCK: Final = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
# NFS: `acdirmax`, 60 s.
_LONGEST_DELAY_SECONDS: Final = 90.0
_LOOK_SECONDS: Final = 0.5


class RunFolder:
    """``<output_dir>/<name>/``, held by rank 0 while it trains.

    Attributes:
        path: where it is.
        word: stands in the folder where an earlier run's has been renamed, and in no other; else
            empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.word = ""
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def events(self) -> Path:
        """File of what happened to the run."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of every rank's log."""
        return self.path / "logs"

    def lock_if_exists(self) -> None:
        """Keep other runs out before anything is looked for in it: one that is about to end may yet
        save. Makes nothing.

        Raises:
            StorageError: another process is writing there.
        """
        try:
            if os.path.lexists(self.path / _LOCK):
                self._take_lock()
        except OSError as error:
            raise self._unusable(error) from error

    def open(self, *, fresh: bool) -> Path | None:
        """Take the folder. With `fresh`, an earlier run's folder is renamed first; returns its new
        path.

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
                self._remove_what_was_made()
            raise self._unusable(error) from error

    def wait_until_visible(
        self, word: str, *, wait_seconds: float = _LONGEST_DELAY_SECONDS
    ) -> None:
        """Wait until this host sees the folder with this word, and no more the one that bore its
        name before.

        A network file system goes by what it has seen for up to a minute: logs and checkpoints
        would end in the earlier run's.
        """
        with waiting(f"this host to see the run folder {self.path}", limit_seconds=wait_seconds):
            self._look_for(word, deadline=time.monotonic() + wait_seconds)

    def _look_for(self, word: str, *, deadline: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                next(self.path.parent.iterdir(), None)  # makes it look again
                if (self.path / _LOCK).read_text(encoding="utf-8") == word:
                    return
            if time.monotonic() > deadline:
                warn(
                    f"{self.path}: this host does not see the folder that rank 0 has made: all "
                    "hosts must share the run folder [run-folder-not-shared]"
                )
                return
            time.sleep(_LOOK_SECONDS)

    def check_usable(self) -> None:
        """Find out that a folder can be made there, and leave nothing behind: for before other
        ranks wait.

        Raises:
            StorageError: it cannot.
        """
        nearest = next(place for place in (self.path, *self.path.parents) if os.path.lexists(place))
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

    def _remove_what_was_made(self) -> None:
        """Only what is empty."""
        with contextlib.suppress(OSError):
            (self.path / _LOCK).unlink()
        for place in (self.logs, self.checkpoints, self.path):
            with contextlib.suppress(OSError):
                place.rmdir()

    def _take(self, *, fresh: bool) -> Path | None:
        self.path.mkdir(parents=True, exist_ok=True)
        found = {entry.name for entry in self.path.iterdir()}
        if fresh and found and not found & _OF_A_RUN:
            raise ConfigError.of(
                kind="run-folder-foreign",
                key="run.name",
                value=self.path.name,
                reason=f"{self.path} holds files that are no run's",
                fix="choose another run.name, or move them away",
            )
        self._take_lock()
        moved = None
        if fresh and found - {_LOCK}:
            # the lock goes with it: nobody takes the folder while it is renamed
            moved = _move_aside(self.path)
            self.close()
            self.path.mkdir(exist_ok=True)
            self._take_lock()
            self._mark()
        for place in (self.checkpoints, self.logs):
            make_own_folder(place)
        return moved

    def _mark(self) -> None:
        assert self._lock is not None
        self.word = uuid.uuid4().hex
        self._lock.write(self.word)
        self._lock.flush()
        os.fsync(
            self._lock.fileno()
        )  # it stays open: other hosts would not see the word before the system writes it back

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
        replace_text(
            self.path / "config.yaml", yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False)
        )
        for name, content in (
            ("ds_config", ds_config),
            ("plan", plan),
            ("environment", environment),
        ):
            replace_text(
                self.path / f"{name}.json", json.dumps(content, indent=2, default=str) + "\n"
            )

    def check_held(self) -> None:
        """See that the folder is still where it was, and still this run's; where nothing is held
        there is nothing to lose.

        Storage that does not answer for a moment is no reason to end a run.

        Raises:
            StorageError: it was removed, renamed or taken by another run; kind ``run-folder-lost``.
        """
        if self._lock is None:
            return
        try:
            there = (self.path / _LOCK).lstat()
            if os.path.samestat(os.fstat(self._lock.fileno()), there):
                lost = ""
            else:
                lost = "its lock is another run's"
        except OSError as error:
            lost = "it was removed or renamed" if error.errno in _GONE else ""
        if lost:
            reported = StorageError(
                f"{self.path}: the run folder was lost while the run was writing to it ({lost}); "
                "what it held goes on with checkpoint.resume once it is back under its name "
                "[run-folder-lost]"
            )
            reported.is_of_one_rank = True
            raise reported

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = open_own(self.path / _LOCK, "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy = not os.path.samestat(
                os.fstat(lock.fileno()), (self.path / _LOCK).stat()
            )  # renamed since it was opened
        except BlockingIOError:
            busy = True
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                lock.close()
                raise
            warn(
                f"{self.path}: its file system has no locks ({error.strerror}): nothing keeps a "
                "second run of the same name from writing there [run-folder-not-locked]"
            )
            busy = False
        if busy:
            lock.close()
            raise StorageError(
                Problem(  # no ConfigError: whoever tries again later gets the folder
                    kind="run-folder-busy",
                    key="run.name",
                    value=self.path.name,
                    reason=f"another run is writing to {self.path}",
                    fix="wait for it, or choose another run.name",
                )
            )
        self._lock = lock


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes where our reader would take it for something else: YAML 1.1 lets `1e3`
    stand as text.
    """


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        reads_as_text = isinstance(parse_scalar(text, name=""), str)
    except ConfigError:
        reads_as_text = False
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if reads_as_text else '"'
    )


_Dumper.add_representer(str, _represent_text)


def _move_aside(path: Path) -> Path:
    """Rename a finished or broken run so that its files are never mixed with the next one's."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    names = (f"{path.name}.{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(1, 1000))))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    return path.rename(target)
