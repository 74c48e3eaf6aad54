"""Names of checkpoints and of their files; and the facts that names alone show of a checkpoint that
DeepSpeed wrote by itself, without a manifest (`framework.checkpoint.state.deepspeed_format` reads
the files).

<run>/checkpoints/latest                     the newest tag
<run>/checkpoints/global_step10/             a checkpoint: DeepSpeed's files, and manifest.json
<run>/checkpoints/global_step10.replaced/    one that a resume from an earlier step has set aside
<run>/checkpoints/.saving/                   one that is being written
<run>/checkpoints/.leaving-global_step10/    one that is being replaced or deleted
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.system.files import read_regular

CALLBACKS: Final = "callbacks"
STREAM: Final = "stream"
BAD_STEPS: Final = "bad_steps"
"""Keys that are in the saved state, and not in the manifest: state of callbacks, positions in
streamed data, and the last good steps.
"""
STATE_KEY: Final = "dsframework"
"""Key of the run's own state in DeepSpeed's files: the project's former name, as releases before
and after the change of name share the format.
"""
CHECKPOINTS: Final = "checkpoints"
MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
BEST: Final = "best"
"""Name that stands for the checkpoint with the best value of `checkpoint.keep_best`."""
SAVING: Final = ".saving"
LEAVING: Final = ".leaving-"
TAG: Final = re.compile(r"global_step(?P<step>[0-9]{1,18})\Z")
# Set aside by a resume from an earlier step (`framework.checkpoint.resume_point.set_aside_later`).
REPLACED: Final = re.compile(r"(?P<tag>global_step(?P<step>[0-9]{1,18}))\.replaced(-[0-9]{1,9})?\Z")
_RANK: Final = r"zero_pp_rank_(?P<rank>[0-9]{1,6})"
_MODEL_RANK: Final = r"mp_rank_(?P<model_rank>[0-9]{1,4})"
MODEL_FILE: Final = re.compile(rf"(?:{_RANK}_)?{_MODEL_RANK}_model_states\.pt")
OPTIMIZER_FILE: Final = re.compile(rf"(?:bf16_)?{_RANK}_{_MODEL_RANK}_optim_states\.pt")
LAYER_FILE: Final = re.compile(r"layer_[0-9]{1,6}-.*model_states\.pt")
SWAPPED: Final = "offloaded_tensors"
"""Folder of the state that DeepSpeed's swapper kept on NVMe."""
_LONGEST_TAG: Final = 256
_RAW_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def tag_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"global_step{step}"


def replaced_names(tag: str) -> Iterator[str]:
    """Yield the names that a checkpoint may get when it is set aside, without end: it gets the
    first free one.
    """
    first = f"{tag}.replaced"
    yield first
    for number in itertools.count(1):
        yield f"{first}-{number}"


def layer_file(number: int, tensor_rank: int | None = None) -> str:
    """Return the file that holds the weights of a pipeline's layer, or a tensor rank's part of
    them.
    """
    if tensor_rank is None:
        return f"layer_{number:02d}-model_states.pt"
    return f"layer_{number:02d}-model_{tensor_rank:02d}-model_states.pt"


def model_file_of(rank: int, *, tensor_size: int = 1) -> str:
    """Return the file of a rank's model states at stage 3."""
    return f"zero_pp_rank_{rank // tensor_size}_mp_rank_{rank % tensor_size:02d}_model_states.pt"


def own_names(path: Path) -> tuple[Path, Path]:
    """Return a path that may be a checkpoint's, as it is and resolved: a link, or ``.``, may stand
    for a checkpoint.
    """
    try:
        return path, path.resolve()
    except (OSError, RuntimeError):  # a loop of links, in Python 3.12 and older
        return path, path.absolute()


def holders(path: Path) -> tuple[Path, Path]:
    """Return the folders that may hold checkpoints if a path is not a checkpoint itself: it is a
    ``checkpoints`` folder, or a run folder.
    """
    return path, path / CHECKPOINTS


def latest_tag(folder: Path) -> str:
    """Read the tag in the file `latest` of a ``checkpoints`` folder; empty if it cannot be read."""
    try:
        content = read_regular(folder / LATEST, num_bytes=_LONGEST_TAG)
    except OSError:
        return ""
    if content is None:
        return ""
    return content.decode("utf-8", errors="replace").strip()


def named_folders(folder: Path) -> list[tuple[int, Path]]:
    """List the folders with the name of a checkpoint, with any content, and their steps, the oldest
    first.

    Raises:
        OSError: the folder is there and does not answer.
    """
    checkpoints = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                tag = TAG.match(entry.name)
                if (entry.is_dir() or entry.is_symlink()) and tag:
                    checkpoints.append((int(tag["step"]), Path(entry.path)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(checkpoints)


def replaced_folders(folder: Path) -> list[Path]:
    """List the folders that were set aside in a ``checkpoints`` folder, by name.

    Raises:
        OSError: the folder is there and does not answer.
    """
    if folder.is_dir():
        return sorted(path for path in folder.iterdir() if REPLACED.match(path.name))
    return []


def size_of(folder: Path) -> int:
    """Return the bytes in the files of a folder; files that cannot be seen count as nothing."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += Path(parent, name).lstat().st_size
    return num_bytes


@dataclass(frozen=True)
class RawNames:
    """Facts in the names of DeepSpeed's files.

    Attributes:
        ranks: number of ranks that wrote optimizer state or spread weights; None at stage 0, which
            has one file for any number of ranks.
        stages: the ZeRO stages that it may be of.
        model_parallel: pipeline stages times tensor-parallel ranks.
        has_layers: it is a pipeline's.
        step: in the folder's name; None if the name has none.
        num_bytes: of all files.
        num_files: number of files.
    """

    ranks: int | None
    stages: tuple[int, ...]
    model_parallel: int
    has_layers: bool
    step: int | None
    num_bytes: int
    num_files: int


def find_raw(path: Path) -> Path | None:
    """Return the folder of a checkpoint without a manifest, or None: the path itself, or the folder
    that `latest` in it names.
    """
    for candidate in own_names(path):
        if _is_raw(candidate):
            return candidate
    for folder in holders(path):
        tag = latest_tag(folder)
        if _RAW_TAG.fullmatch(tag) and _is_raw(folder / tag):
            return folder / tag
    return None


def _is_raw(folder: Path) -> bool:
    """Check whether a folder is a checkpoint without a manifest; one with a damaged manifest is
    not.
    """
    if _RAW_TAG.fullmatch(folder.name) is None:
        return False
    try:
        if folder.is_symlink() or not folder.is_dir():
            return False
        names = {entry.name for entry in folder.iterdir()}
    except OSError:  # the search for checkpoints with manifests has reported it before
        return False
    return MANIFEST not in names and any(map(MODEL_FILE.fullmatch, names))


def read_names(folder: Path) -> RawNames:
    """Read the names of a checkpoint's files."""
    files = list(filter(_is_own_file, folder.rglob("*")))
    names = [path.name for path in files if path.parent == folder]
    models = _matches(MODEL_FILE, names)
    optimizers = _matches(OPTIMIZER_FILE, names)
    spread = [match for match in models if match["rank"] is not None]
    tag = TAG.match(folder.name)
    return RawNames(
        ranks=_num_ranks(optimizers or spread, "rank") or None,
        stages=_stages_of(spread, optimizers),
        model_parallel=_num_ranks(models, "model_rank"),
        has_layers=bool(_matches(LAYER_FILE, names)),
        step=int(tag["step"]) if tag else None,
        num_bytes=sum(path.stat().st_size for path in files),
        num_files=len(files),
    )


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _matches(pattern: re.Pattern[str], names: Iterable[str]) -> list[re.Match[str]]:
    matches = []
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            matches.append(match)
    return matches


def _stages_of(spread: list[re.Match[str]], optimizers: list[re.Match[str]]) -> tuple[int, ...]:
    """Return the ZeRO stages that write such files: `spread` are model files of single ranks, which
    only stage 3 writes.
    """
    if spread:
        return (3,)
    if optimizers:
        return (1, 2)
    return (0,)


def _num_ranks(matches: Iterable[re.Match[str]], group: str) -> int:
    """Count the different ranks in a named group of the pattern that the file names match."""
    return len({int(match[group]) for match in matches})


def irregular(folder: Path) -> Iterator[str]:
    """Yield a line for each link, device and pipe among the files; none is followed or opened."""
    for parent, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(parent, name)
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
    """Return the weight's name with `by` added to the expert's number."""
    return EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + by}.", name)
