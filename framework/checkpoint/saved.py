"""Checkpoints on disk: which there are, and whether the bytes of one are those that were written.

It is DeepSpeed's layout, ``checkpoints/global_step<N>/`` and ``checkpoints/latest``, plus ``manifest.json`` in each
checkpoint, which says what is in it: files, sizes and SHA-256, step, topology, versions and the resolved config.
A checkpoint gets its name only when it is complete and on disk (`checkpointer`), so that one with a name is finished.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import LONGEST_BYTES, SEAL, hash_of, read_manifest
from framework.checkpoint.names import MANIFEST, REPLACED, TAG, named_folders
from framework.checkpoint.unverified import irregular
from framework.checkpoint.verification import Verification
from framework.system.files import FileRecord, read_regular

_FORMER_NAME: Final = "dsframework"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A finished checkpoint: ``folder/tag``, and what its manifest says.

    One without a manifest, which DeepSpeed wrote by itself, is not `verified`; what its manifest would say has still to
    be read out of its files.
    """

    folder: Path
    tag: str
    manifest: Mapping[str, Any]
    verified: bool = True

    @property
    def step(self) -> int:
        """Optimizer steps taken when it was written."""
        return int(self.manifest["step"])

    @property
    def path(self) -> Path:
        """The checkpoint's own folder."""
        return self.folder / self.tag

    @property
    def versions(self) -> Mapping[str, Any]:
        """Which releases wrote it, by package; empty where nobody knows. Older ones noted the project under its former
        name.
        """
        found = self.manifest.get("versions")
        if not isinstance(found, Mapping):
            return {}
        return {"dsf-trainer" if name == _FORMER_NAME else name: version for name, version in found.items()}

    def damage(self) -> list[str]:
        """What is not as it was written, a line for each file; reads every byte.

        Nothing of a checkpoint is deserialised before this has found nothing: a flipped bit would load silently, and a
        file that somebody put in its place could run code. Without a manifest only links and the like can be told.
        """
        if not self.verified:
            return sorted(irregular(self.path))
        work = Verification(self.path, self.records)
        try:
            return sorted([*self.unexpected_files(), *work.damage()])
        finally:
            work.close()

    @property
    def records(self) -> dict[str, FileRecord]:
        """Its files, as they were written."""
        return {name: FileRecord(**record) for name, record in self.manifest["files"].items()}

    def unexpected_files(self) -> list[str]:
        """A line for each file too many: DeepSpeed finds some of its files by pattern, so that it would be read as
        well.
        """
        return sorted(self._unexpected_files())

    def _unexpected_files(self) -> Iterator[str]:
        expected = {*self.manifest["files"], MANIFEST}
        for place, folders, names in os.walk(self.path):
            for name in (*folders, *names):
                path = Path(place, name)
                relative = path.relative_to(self.path).as_posix()
                if path.is_symlink():
                    yield f"{relative}: it is a symbolic link"
                elif not path.is_dir() and relative not in expected:
                    yield f"{relative}: it was not there when the checkpoint was written"


def seal(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, with a hash over itself."""
    return json.dumps({**manifest, SEAL: hash_of(manifest)}, indent=2) + "\n"


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Finished checkpoints in a ``checkpoints`` folder, oldest first; without those that the file system does not give
    out.

    Raises:
        OSError: the folder is there and does not answer.
    """
    found = []
    for _, path in named_folders(folder):
        with contextlib.suppress(OSError):  # `diagnose` tells it
            found.append(read_checkpoint(path))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def read_checkpoint(path: Path) -> SavedCheckpoint | None:
    """The checkpoint in a folder; None where there is none of this format, or its manifest is not as it was written.

    Raises:
        OSError: the file system does not give it out now: it may next time, and this is not a checkpoint to start
        without.
    """
    name = TAG.match(path.name) or REPLACED.match(path.name)
    if name is None or path.is_symlink():
        return None
    try:
        text = read_regular(path / MANIFEST, num_bytes=LONGEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = read_manifest(text, step=int(name["step"])) if text is not None else None
    return SavedCheckpoint(path.parent, path.name, manifest) if manifest is not None else None


def diagnose(path: Path) -> str:
    """Why a folder with the name of a checkpoint is none that can be read: what of it, and the reason."""
    try:
        if path.is_symlink():
            return "it is a symbolic link"
        text = read_regular(path / MANIFEST, num_bytes=LONGEST_BYTES + 1)
    except FileNotFoundError:
        return f"{MANIFEST}: it is missing"
    except OSError as error:
        return f"{MANIFEST}: it cannot be read: {error.strerror or error}"
    if text is None:
        return f"{MANIFEST}: it is not a regular file"
    if len(text) > LONGEST_BYTES:
        return f"{MANIFEST}: it is larger than {LONGEST_BYTES >> 20} MiB, which no checkpoint needs"
    return f"{MANIFEST}: it has changed since it was written, or is of another release"
