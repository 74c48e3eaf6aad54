"""Checkpoints that DeepSpeed wrote by itself: no manifest, so nothing tells whether their files are whole. Read on
request only.

Here they are found and described by the names of their files; what is in them is read beyond the torch line
(`framework.checkpoint.state.raw`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.checkpoint.names import (
    LAYER_FILE,
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    TAG,
    holders,
    latest_tag,
    own_names,
)
from framework.errors import ConfigError, Problem

KIND: Final = "checkpoint-unverified"
SAFE_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class RawNames:
    """Facts in the names of DeepSpeed's files.

    Attributes:
        ranks: that wrote optimizer state or spread weights; None at stage 0, where one file serves any number.
        stages: the ZeRO stages that it may be of.
        model_parallel: pipeline stages times tensor-parallel ranks.
        has_layers: whether it is a pipeline's.
        step: in the folder's name; None where it says none.
        num_bytes: of all files.
    """

    ranks: int | None
    stages: tuple[int, ...]
    model_parallel: int
    has_layers: bool
    step: int | None
    num_bytes: int
    num_files: int


def find_raw(path: Path) -> Path | None:
    """The folder of a checkpoint without a manifest: the path itself, or what `latest` in it names; None where there is
    none.
    """
    for named in own_names(path):
        if _is_raw(named):
            return named
    for folder in holders(path):
        tag = latest_tag(folder)
        if SAFE_TAG.fullmatch(tag) and _is_raw(folder / tag):
            return folder / tag
    return None


def _is_raw(folder: Path) -> bool:
    """A damaged manifest is damage: it does not turn a checkpoint into one of DeepSpeed's own."""
    if SAFE_TAG.fullmatch(folder.name) is None:
        return False
    try:
        if folder.is_symlink() or not folder.is_dir() or _is_there(folder / MANIFEST):
            return False
        return any(MODEL_FILE.fullmatch(path.name) for path in folder.iterdir())
    except OSError:  # who looks for checkpoints has met it before, and told it
        return False


def _is_there(path: Path) -> bool:
    """Other than `os.path.lexists`, which takes a disk that does not answer for a no."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def refused(path: Path, *, key: str) -> ConfigError:
    """The error for a checkpoint without a manifest that nobody asked for; `key` is what names it."""
    word = "checkpoint.allow_unverified: true" if key.startswith("checkpoint.") else "--allow-unverified"
    return ConfigError(
        Problem(
            kind=KIND,
            key=key,
            value=str(path),
            reason="it has no manifest (DeepSpeed wrote it by itself, or the manifest is lost), so nothing tells "
            "whether its files are whole, or whose they are",
            fix=f"{word} reads it nevertheless, as weights only",
        )
    )


def read_names(folder: Path) -> RawNames:
    """Read the names of a checkpoint's files."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = [path.name for path in files if path.parent == folder]
    models, optimizers = (list(filter(None, map(pattern.fullmatch, names))) for pattern in (MODEL_FILE, OPTIMIZER_FILE))
    spread = [match for match in models if match["rank"] is not None]
    stages = (3,) if spread else (1, 2) if optimizers else (0,)
    ranks = {int(match["rank"]) for match in optimizers} or {int(match["rank"]) for match in spread}
    step = TAG.match(folder.name)
    return RawNames(
        ranks=len(ranks) or None,
        stages=stages,
        model_parallel=len({int(match["model_rank"]) for match in models}),
        has_layers=any(map(LAYER_FILE.fullmatch, names)),
        step=int(step["step"]) if step else None,
        num_bytes=sum(path.stat().st_size for path in files),
        num_files=len(files),
    )


def irregular(folder: Path) -> Iterator[str]:
    """Links, devices and pipes among the files, a line for each: none of them is followed or opened."""
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                yield f"{path.relative_to(folder).as_posix()}: it is a symbolic link"
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                yield f"{path.relative_to(folder).as_posix()}: it is not a regular file"
