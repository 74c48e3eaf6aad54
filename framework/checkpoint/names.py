"""Names of checkpoints and of their files, in a run folder's ``checkpoints`` and in each of them; the only place that
knows them.

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
from pathlib import Path
from typing import Final

from framework.system.files import read_regular

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


def tag_of(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"global_step{step}"


def replaced_names(tag: str) -> list[str]:
    """List the names that a checkpoint may get when it is set aside: the first of these that is free is taken."""
    return [f"{tag}.replaced{suffix}" for suffix in ("", *(f"-{number}" for number in range(1, 1000)))]


def layer_file(number: int) -> str:
    """Return the file that holds the weights of a pipeline's layer."""
    return f"layer_{number:02d}-model_states.pt"


def model_file_of(rank: int) -> str:
    """Return the file of a rank's model states at stage 3."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def own_names(path: Path) -> tuple[Path, Path]:
    """A path that may name a checkpoint, and where it leads: a link, or ``.``, may stand for one."""
    return path, path.resolve()


def holders(path: Path) -> tuple[Path, Path]:
    """Folders that may hold checkpoints, where a path names none: it is a ``checkpoints`` folder, or a run folder."""
    return path, path / CHECKPOINTS


def latest_tag(folder: Path) -> str:
    """Read the tag in the file `latest` of a ``checkpoints`` folder; empty where there is none, or it cannot be
    read.
    """
    try:
        return (read_regular(folder / LATEST, num_bytes=_LONGEST_TAG) or b"").decode("utf-8", errors="replace").strip()
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
                (TAG.match(entry.name), Path(entry.path)) for entry in entries if entry.is_dir() or entry.is_symlink()
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(tag["step"]), path) for tag, path in found if tag)


def replaced_folders(folder: Path) -> list[Path]:
    """List the folders that were set aside in a ``checkpoints`` folder, by name.

    Raises:
        OSError: the folder is there and does not answer.
    """
    return sorted(path for path in folder.iterdir() if REPLACED.match(path.name)) if folder.is_dir() else []


def size_of(folder: Path) -> int:
    """Bytes in the files of a folder; what cannot be seen counts as nothing."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += Path(place, name).lstat().st_size
    return found
