"""Weights in safetensors, read when they are needed (`LazyWeights`).

Weights read back from safetensors: a file, or a folder of shards with Hugging Face's index, ours or anybody's.

The format holds numbers and text only. The library maps the files, so the ranks of a host share one copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from framework.errors import ConfigError, Problem, StorageError, in_one_line

# Weights that are read when they are asked for: a run that starts from a model holds one of its weights at a time,
# not all.


Read = Callable[[], torch.Tensor]


class LazyWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor on the CPU, in the order given; each access reads it anew, from mapped files.

    `shapes` tells what there is without reading it.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], read: Mapping[str, Read]) -> None:
        assert shapes.keys() == read.keys()
        self.shapes, self._read = dict(shapes), dict(read)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def let_go(self) -> None:
        """Close the files; nothing can be read any more."""
        self.shapes, self._read = {}, {}


def shapes_of(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Size]:
    """The shape of every weight; lazy ones are not read for it."""
    if isinstance(weights, LazyWeights):
        return weights.shapes
    return {name: tensor.shape for name, tensor in weights.items()}


SUFFIX: Final = ".safetensors"
WHOLE: Final = f"model{SUFFIX}"
INDEX: Final = f"{WHOLE}.index.json"
PICKLED: Final = "model.pt"
# Further names of a weight -> the name under which it is stored, in a file's metadata.
TIES: Final = "dsf_ties"
_FORMER_TIES: Final = "dsframework_ties"  # in exports made before the project changed its name


def is_exported(path: Path) -> bool:
    """Check whether there is a safetensors file, or a folder of an export."""
    return (path.suffix == SUFFIX and path.is_file()) or any((path / name).is_file() for name in (WHOLE, INDEX))


def read_exported(path: Path) -> LazyWeights:
    """Every tensor by name; a tied one under all its names, where the export noted them. Each is read when it is asked
    for.

    Raises:
        StorageError: kind ``weights-not-read``.
    """
    if path.is_dir():
        index = path / INDEX
        return _read_shards(index) if index.is_file() else _lazy(_open(path / WHOLE))
    return _lazy(_open(path))


@dataclass(frozen=True)
class _Opened:
    """One file, mapped: shapes and ways to read its tensors, and further names for some of them."""

    shapes: Mapping[str, torch.Size]
    read: Mapping[str, Read]
    ties: Mapping[str, str]


def _lazy(opened: _Opened) -> LazyWeights:
    """A tie into another file is that file's to give."""
    ties = {name: first for name, first in opened.ties.items() if first in opened.shapes}
    shapes = {name: opened.shapes[first] for name, first in ties.items()}
    return LazyWeights(
        {**opened.shapes, **shapes}, {**opened.read, **{name: opened.read[first] for name, first in ties.items()}}
    )


def _open(file: Path) -> _Opened:
    try:
        from safetensors import safe_open  # here: no other run needs it
    except ModuleNotFoundError as error:
        raise ConfigError(
            Problem(
                kind="package-missing",
                key="checkpoint.init_weights",
                value=str(file),
                reason="safetensors is not installed",
                fix="pip install safetensors",
            )
        ) from error
    try:
        opened: Any = safe_open(file, framework="pt")  # checks the header against the size of the file
        shapes = {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # it is no dict
        ties = _ties_in(opened.metadata() or {})
    except Exception as error:  # the library has an error of its own, and of the system's for files that are cut off
        raise _not_read(file, in_one_line(error)) from error
    return _Opened(shapes, {name: partial(opened.get_tensor, name) for name in shapes}, ties)


def _ties_in(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return further names of weights, as the metadata of a file note them."""
    return dict(json.loads(metadata.get(TIES) or metadata.get(_FORMER_TIES, "{}")))


def _read_shards(index: Path) -> LazyWeights:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        placed = dict(content["weight_map"])
        ties = _ties_in(content.get("metadata", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _not_read(index, "it is not an index of shards") from error
    shapes: dict[str, torch.Size] = {}
    read: dict[str, Read] = {}
    for name in sorted({str(shard) for shard in placed.values()}):
        if Path(name).name != name or not name.endswith(SUFFIX):
            raise _not_read(index, f"its shard {name!r} is not a file beside it")
        opened = _open(index.with_name(name))
        shapes |= opened.shapes
        read |= opened.read
        ties |= opened.ties
    if missing := sorted(placed.keys() - shapes.keys()):
        raise _not_read(index, f"{missing[0]} is in none of its shards")
    return _lazy(_Opened(shapes, read, ties))


def _not_read(file: Path, reason: str) -> StorageError:
    return StorageError(
        f"{file}: not a file of weights: {reason}; write it again, or name another one [weights-not-read]"
    )
