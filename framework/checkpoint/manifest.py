"""`SavedCheckpoint`: a checkpoint on disk, read through its manifest.

It is DeepSpeed's layout, ``checkpoints/global_step<N>/`` and ``checkpoints/latest``, plus
``manifest.json`` in each checkpoint: files, sizes and SHA-256, step, topology, versions and the
resolved config. The manifest's seal shows chance changes. A change on purpose comes with a new seal
and may write anything: so a manifest is accepted only if every value that a reader relies on has
the type in `framework.checkpoint.manifest_schema`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.names import MANIFEST, REPLACED, TAG, irregular, named_folders
from framework.system.files import FileRecord, read_regular

FORMAT: Final = 2
SEAL: Final = "sha256"
# A line for each file and one for each metric: a checkpoint of a thousand ranks needs about 300 KB.
LONGEST_BYTES: Final = 8 << 20
_LONGEST_NUMBER: Final = 40  # digits of an integer
_FORMER_NAME: Final = "dsframework"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A finished checkpoint: ``folder/tag``, and its manifest.

    One without a manifest, which DeepSpeed wrote by itself, is not `verified`; `describe_raw` makes
    a manifest from its files.
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
    def tensor_size(self) -> int:
        """Ranks that shared the weights listed under ``tensor``."""
        return int(self.manifest.get("layout", {}).get("tensor_size", 1))

    @property
    def path(self) -> Path:
        """The checkpoint's own folder."""
        return self.folder / self.tag

    @property
    def versions(self) -> Mapping[str, Any]:
        """Releases that wrote it, by package; older ones noted the project under its former
        name.
        """
        versions = {}
        for name, version in self.manifest.get("versions", {}).items():
            if name == _FORMER_NAME:
                versions["dsf-trainer"] = version
            else:
                versions[name] = version
        return versions

    @property
    def records(self) -> dict[str, FileRecord]:
        """Records of its files, as they were written."""
        return {name: FileRecord(**record) for name, record in self.manifest["files"].items()}

    @property
    def has_adapters(self) -> bool:
        """Check whether it holds adapters, and not the weights that they belong to."""
        return bool((self.manifest.get("config", {}).get("training") or {}).get("lora"))

    def damage(self) -> list[str]:
        """Find files that are not as they were written, a line for each; reads every byte.

        Nothing of a checkpoint is deserialised before this has found nothing: a flipped bit would
        load silently, and a file put in another's place could run code. Without a manifest only
        links and the like are found.
        """
        if not self.verified:
            return sorted(irregular(self.path))
        from framework.checkpoint.verification import Verification

        with contextlib.closing(Verification(self.path, self.records)) as work:
            return sorted(self.unexpected_files() + work.damage())

    def unexpected_files(self) -> list[str]:
        """List the files that the manifest does not name, a line for each: DeepSpeed, which finds
        files by pattern, would read them as well.
        """
        expected = {*self.manifest["files"], MANIFEST}
        unexpected = []
        for folder, folders, files in os.walk(self.path):
            for name in folders + files:
                path = Path(folder, name)
                relative = path.relative_to(self.path).as_posix()
                if path.is_symlink():
                    unexpected.append(f"{relative}: it is a symbolic link")
                elif not path.is_dir() and relative not in expected:
                    unexpected.append(
                        f"{relative}: it was not there when the checkpoint was written"
                    )
        return sorted(unexpected)


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """List the finished checkpoints in a ``checkpoints`` folder, oldest first; without those that
    cannot be read now.

    Raises:
        OSError: the folder is there and does not answer.
    """
    return list(newest_first(folder))[::-1]


def best_of(
    checkpoints: Iterable[SavedCheckpoint], metric: str | None, *, best_is: str
) -> SavedCheckpoint | None:
    """Return the checkpoint with the best value of a metric at its own step, the last of equals;
    None if none has a value. `best_is` is ``max`` or ``min``.
    """
    sign = 1 if best_is == "max" else -1
    best = None
    best_rank = None
    for checkpoint in checkpoints:
        value = checkpoint.manifest.get("metrics", {}).get(metric)
        if not isinstance(value, (int, float)) or math.isnan(value):
            continue
        rank = (sign * value, checkpoint.step)
        if best_rank is None or rank > best_rank:
            best = checkpoint
            best_rank = rank
    return best


def newest_first(folder: Path) -> Iterator[SavedCheckpoint]:
    """Yield what `list_checkpoints` lists, the newest first, each read when it is its turn."""
    for _, path in reversed(named_folders(folder)):
        with contextlib.suppress(OSError):  # `diagnose` reports it
            checkpoint = read_checkpoint(path)
            if checkpoint is not None:
                yield checkpoint


def read_checkpoint(path: Path) -> SavedCheckpoint | None:
    """Read the checkpoint in a folder; None if it is not of this format, or its manifest has
    changed since it was written.

    Raises:
        OSError: the file system does not give it out now: it may next time.
    """
    name = TAG.match(path.name) or REPLACED.match(path.name)
    if name is None or path.is_symlink():
        return None
    try:
        text = read_regular(path / MANIFEST, num_bytes=LONGEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text is None:
        return None
    manifest = _parse(text, step=int(name["step"]))
    if manifest is None:
        return None
    return SavedCheckpoint(path.parent, path.name, manifest)


def zenflow_of(manifest: Mapping[str, Any]) -> Any:
    """Return the section of ZenFlow of a manifest, or None."""
    zero = manifest["config"].get("zero") or {}
    return (zero.get("offload_optimizer") or {}).get("zenflow")


def diagnose(path: Path) -> str:
    """Explain why a folder with the name of a checkpoint cannot be read as one: ``manifest.json:
    reason``, or that it is a link.
    """
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


def seal(manifest: Mapping[str, Any]) -> str:
    """Format a manifest as text, with a hash over itself."""
    return json.dumps({**manifest, SEAL: _hash_of(manifest)}, indent=2) + "\n"


def _hash_of(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(text: bytes, *, step: int) -> dict[str, Any] | None:
    """Parse the manifest of a step's checkpoint; None if the text is cut off, was changed, or holds
    other types.
    """
    if len(text) > LONGEST_BYTES or not text.endswith(b"\n"):
        return None
    # Imported here, because a background writer that publishes nothing reads no manifest.
    from framework.checkpoint.manifest_schema import Manifest

    try:
        manifest: dict[str, Any] = json.loads(
            text, parse_constant=_refuse, parse_int=_parse_int, parse_float=_parse_float
        )
        if manifest[SEAL] != _hash_of(manifest):
            return None
        Manifest.model_validate(manifest)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    if manifest["format"] != FORMAT or manifest["step"] != step:
        return None
    return manifest


def _refuse(text: str) -> float:
    """Raise ValueError in the place of a number; never return."""
    raise ValueError(f"{text} is no number of JSON")


def _parse_int(text: str) -> int:
    if len(text) <= _LONGEST_NUMBER:
        return int(text)
    return int(_refuse(text))


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    return _refuse(text)
