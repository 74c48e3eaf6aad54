"""Names of checkpoints and of their files: the only place that knows them, and all that is known of
a checkpoint that DeepSpeed wrote by itself, without a manifest, before its files are read
(`framework.checkpoint.state.deepspeed_format`).

<run>/checkpoints/latest                     the newest tag
<run>/checkpoints/global_step10/             a checkpoint: DeepSpeed's files, and manifest.json
<run>/checkpoints/global_step10.replaced/    one that a resume from an earlier step has set aside
<run>/checkpoints/.saving/                   one that is being written
<run>/checkpoints/.leaving-global_step10/    one that is being replaced or deleted
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.system.files import read_regular

CALLBACKS: Final = "callbacks"
STREAM: Final = "stream"
BAD_STEPS: Final = "bad_steps"
"""Keys of what callbacks keep, of the places of streamed data, and of the last good steps, in the
saved state alone.
"""
CHECKPOINTS: Final = "checkpoints"
MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
SAVING: Final = ".saving"
LEAVING: Final = ".leaving-"
TAG: Final = re.compile(r"global_step(?P<step>[0-9]{1,18})\Z")
# Set aside by a resume from an earlier step (`framework.checkpoint.resume_point.set_aside_later`).
REPLACED: Final = re.compile(r"(?P<tag>global_step(?P<step>[0-9]{1,18}))\.replaced(-[0-9]{1,3})?\Z")
MODEL_FILE: Final = re.compile(
    r"(?:zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<model_rank>[0-9]{1,4})_model_states\.pt"
)
OPTIMIZER_FILE: Final = re.compile(
    r"(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_mp_rank_(?P<model_rank>[0-9]{1,4})_optim_states\.pt"
)
LAYER_FILE: Final = re.compile(r"layer_[0-9]{1,6}-.*model_states\.pt")
SWAPPED: Final = "offloaded_tensors"
"""Folder of what DeepSpeed's swapper kept on NVMe."""
_LONGEST_TAG: Final = 256
_RAW_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def tag_of(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"global_step{step}"


def replaced_names(tag: str) -> list[str]:
    """List the names that a checkpoint may get when it is set aside: the first of these that is
    free is taken.
    """
    return [
        f"{tag}.replaced{suffix}" for suffix in ("", *(f"-{number}" for number in range(1, 1000)))
    ]


def layer_file(number: int, tensor_rank: int | None = None) -> str:
    """Return the file that holds the weights of a pipeline's layer, or a tensor rank's part of
    them.
    """
    return f"layer_{number:02d}{'' if tensor_rank is None else f'-model_{tensor_rank:02d}'}-model_states.pt"


def model_file_of(rank: int, *, tensor_size: int = 1) -> str:
    """Return the file of a rank's model states at stage 3."""
    return f"zero_pp_rank_{rank // tensor_size}_mp_rank_{rank % tensor_size:02d}_model_states.pt"


def own_names(path: Path) -> tuple[Path, Path]:
    """A path that may name a checkpoint, and where it leads: a link, or ``.``, may stand for
    one.
    """
    try:
        return path, path.resolve()
    except (OSError, RuntimeError):  # a loop of links, in Python 3.12 and older
        return path, path.absolute()


def holders(path: Path) -> tuple[Path, Path]:
    """Folders that may hold checkpoints, where a path names none: it is a ``checkpoints`` folder,
    or a run folder.
    """
    return path, path / CHECKPOINTS


def latest_tag(folder: Path) -> str:
    """Read the tag in the file `latest` of a ``checkpoints`` folder; empty where it cannot be
    read.
    """
    try:
        return (
            (read_regular(folder / LATEST, num_bytes=_LONGEST_TAG) or b"")
            .decode("utf-8", errors="replace")
            .strip()
        )
    except OSError:
        return ""


def named_folders(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders with the name of a checkpoint, whatever is in them, the oldest first.

    Raises:
        OSError: the folder is there and does not answer.
    """
    try:
        with os.scandir(folder) as entries:
            found = [
                (TAG.match(entry.name), Path(entry.path))
                for entry in entries
                if entry.is_dir() or entry.is_symlink()
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(tag["step"]), path) for tag, path in found if tag)


def replaced_folders(folder: Path) -> list[Path]:
    """List the folders that were set aside in a ``checkpoints`` folder, by name.

    Raises:
        OSError: the folder is there and does not answer.
    """
    if folder.is_dir():
        return sorted(path for path in folder.iterdir() if REPLACED.match(path.name))
    return []


def size_of(folder: Path) -> int:
    """Bytes in the files of a folder; what cannot be seen counts as nothing."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += Path(place, name).lstat().st_size
    return found


@dataclass(frozen=True)
class RawNames:
    """Facts in the names of DeepSpeed's files.

    Attributes:
        ranks: that wrote optimizer state or spread weights; None at stage 0, where one file serves
            any number.
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
    """The folder of a checkpoint without a manifest, if there is one: the path itself, or what
    `latest` in it names.
    """
    for named in own_names(path):
        if _is_raw(named):
            return named
    for folder in holders(path):
        tag = latest_tag(folder)
        if _RAW_TAG.fullmatch(tag) and _is_raw(folder / tag):
            return folder / tag
    return None


def _is_raw(folder: Path) -> bool:
    """A damaged manifest is damage: it does not turn a checkpoint into one of DeepSpeed's own."""
    if _RAW_TAG.fullmatch(folder.name) is None:
        return False
    try:
        if folder.is_symlink() or not folder.is_dir():
            return False
        names = {entry.name for entry in folder.iterdir()}
    except OSError:  # who looks for checkpoints has met it before, and told it
        return False
    return MANIFEST not in names and any(map(MODEL_FILE.fullmatch, names))


def read_names(folder: Path) -> RawNames:
    """Read the names of a checkpoint's files."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = [path.name for path in files if path.parent == folder]
    models, optimizers = (
        list(filter(None, map(pattern.fullmatch, names)))
        for pattern in (MODEL_FILE, OPTIMIZER_FILE)
    )
    spread = [match for match in models if match["rank"] is not None]
    step = TAG.match(folder.name)
    return RawNames(
        ranks=len({int(match["rank"]) for match in optimizers or spread}) or None,
        stages=(3,) if spread else (1, 2) if optimizers else (0,),
        model_parallel=len({int(match["model_rank"]) for match in models}),
        has_layers=any(map(LAYER_FILE.fullmatch, names)),
        step=int(step["step"]) if step else None,
        num_bytes=sum(path.stat().st_size for path in files),
        num_files=len(files),
    )


def irregular(folder: Path) -> Iterator[str]:
    """Links, devices and pipes among the files, a line for each: none of them is followed or
    opened.
    """
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                if stat.S_ISLNK(mode):
                    kind = "a symbolic link"
                else:
                    kind = "not a regular file"
                yield f"{path.relative_to(folder).as_posix()}: it is {kind}"


EXPERT: Final = re.compile(r"(\.experts\.)(\d+)\.")
"""In the name of a weight: the number of the expert that it belongs to."""


def shift_expert(name: str, by: int) -> str:
    """The weight's name with another expert's number: `by` more."""
    return EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + by}.", name)
