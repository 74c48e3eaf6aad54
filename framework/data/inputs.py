"""Inputs of a trained model, by number, out of files: images, lines of text, rows of numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from framework.errors import ConfigError, in_one_line

_IMAGES: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_KINDS: Final = dict.fromkeys(_IMAGES, "image") | {".txt": "text", ".jsonl": "text", ".csv": "row", ".npz": "row"}
_refused = partial(ConfigError.of, "input-not-read", key="INPUT")


@dataclass(frozen=True)
class Inputs:
    """Samples in the order in which their files were named, those of a folder by name.

    Attributes:
        kind: ``image``, ``text``, ``row`` or ``file``, of all of them.
        names: where each is from: its path, or ``path:number``, counted from 1 (a line, a row).
        read: sample by number: bytes of a line, a tensor, or a mapping of tensors by name.
    """

    kind: str
    names: Sequence[str]
    read: Callable[[int], Any]


def find_inputs(
    paths: Sequence[str],
    *,
    read_image: Callable[[str], Any] | None = None,
    read_file: Callable[[str], Any] | None = None,
) -> Inputs:
    """List the samples in files and folders.

    Args:
        paths: files, and folders that are searched for images, sub-folders included.
        read_image: from the path of an image to a sample.
        read_file: from any path to a sample: then each file is one, whatever it is.

    Raises:
        ConfigError: kind ``input-not-read``, with file and reason.
    """
    files = [file for path in paths for file in _files(Path(path), any_file=read_file is not None)]
    first_of: dict[str, str] = {}
    for file in files:
        kind = "file" if read_file else _KINDS.get(file.suffix.lower(), "")
        first_of.setdefault(kind, str(file))
    if "" in first_of:
        fix = f"rename it to one of {', '.join(_KINDS)}, or say with --reader how it is read"
        raise _refused("its suffix says nothing of what it holds", fix, value=first_of[""])
    if len(first_of) > 1:
        listed = " and ".join(f"{name} is {kind}" for kind, name in first_of.items())
        raise _refused(f"{listed}", "name inputs of one kind at a time")
    if kind in ("text", "row"):
        pairs = [pair for file in files for pair in (_lines if kind == "text" else _rows)(file)]
        return Inputs(kind, [name for name, _ in pairs], lambda number: pairs[number][1])
    read = read_file or read_image
    if read is None:
        reason, fix = (
            "how an image becomes a sample is known of data.kind: image_folder",
            "name it: --reader module:name",
        )
        raise _refused(reason, fix, value=str(files[0]))
    return Inputs(kind, list(map(str, files)), lambda number: read(str(files[number])))


def _files(path: Path, *, any_file: bool) -> Iterator[Path]:
    found = [path] if path.is_file() else sorted(place for place in path.rglob("*") if place.is_file())
    found = [place for place in found if place == path or any_file or place.suffix.lower() in _IMAGES]
    if not found:
        reason = "the folder holds no images" if path.is_dir() else "there is no such file or folder"
        raise _refused(reason, "name files, or folders of images", value=str(path))
    yield from found


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Lines of a text file, or the field ``text`` of the objects in JSON lines; blank ones are left out."""
    for number, line in enumerate(_reading(file, file.read_bytes).split(b"\n"), start=1):
        name, text = f"{file}:{number}", line.rstrip(b"\r")
        if text.strip() and file.suffix.lower() == ".jsonl":
            try:
                text = json.loads(text)["text"].encode()
            except (ValueError, LookupError, TypeError, AttributeError):
                reason = 'it is no JSON object with the field "text"'
                raise _refused(reason, "mend or remove the line", value=name) from None
        if text.strip():
            yield name, text


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a table of numbers, float32, whose first line may name the columns; or of arrays of one length."""
    if file.suffix.lower() == ".npz":
        arrays = _reading(file, lambda: dict(np.load(file, allow_pickle=False)))
    else:
        has_names = not _reading(file, lambda: _is_numbers(file.open(encoding="utf-8").readline()))
        table = partial(np.loadtxt, file, dtype=np.float32, delimiter=",", skiprows=int(has_names), ndmin=2)
        arrays = {"": _reading(file, table)}
    tensors = {name: _reading(file, partial(torch.from_numpy, array)) for name, array in arrays.items()}
    if len({len(tensor) if tensor.ndim else -1 for tensor in tensors.values()} | {-1}) != 2:
        raise _refused("its arrays have no common number of rows", "write one row per sample", value=str(file))
    for row in range(len(next(iter(tensors.values())))):
        one = {name: tensor[row] for name, tensor in tensors.items()}
        yield f"{file}:{row + 1}", one if len(one) > 1 else next(iter(one.values()))


def _is_numbers(line: str) -> bool:
    try:
        return bool([float(cell) for cell in line.split(",")])
    except ValueError:
        return False


def _reading(file: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise _refused(in_one_line(error, longest=200), "mend it, or name another file", value=str(file)) from error


def stacked(samples: Sequence[Any], names: Sequence[str]) -> Any:
    """One batch of samples: a tensor, or a mapping of tensors.

    Raises:
        ConfigError: kind ``input-not-read``: their shapes differ.
    """
    if isinstance(samples[0], Mapping):
        return {key: stacked([one[key] for one in samples], names) for key in samples[0]}
    tensors = [torch.as_tensor(one) for one in samples]
    for name, one in zip(names, tensors, strict=True):
        if one.shape != tensors[0].shape:
            reason = f"its shape is {tuple(one.shape)}, and that of {names[0]} is {tuple(tensors[0].shape)}"
            raise _refused(reason, "give all of them one shape, or --batch-size 1", value=name)
    return torch.stack(tensors)
