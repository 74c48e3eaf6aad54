"""The files of one checkpoint, mapped into memory, and places in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.state.checkpoint_engine import read_file


@dataclass(frozen=True)
class Place:
    """A value in a checkpoint: the name of a file, and the way to the value through the dicts and lists in it."""

    file: str
    keys: tuple[str | int, ...]

    def then(self, *keys: str | int) -> Place:
        """A place further in."""
        return Place(self.file, (*self.keys, *keys))


@dataclass(frozen=True)
class Piece:
    """A stretch of one stored tensor, seen as flat.

    Attributes:
        place: the tensor.
        start: where the stretch begins in it.
        num: how many numbers it has.
        state: the optimizer's state of that tensor, a dict whose tensors are laid out alike; None where there is none.
    """

    place: Place
    start: int
    num: int
    state: Place | None = None


@dataclass(frozen=True)
class Stored:
    """One weight or buffer.

    Attributes:
        shape: of the whole tensor.
        dtype: of what lies in `pieces`.
        pieces: in order; together they are the flattened tensor. The fp32 copies where the optimizer keeps any.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


class CheckpointFiles:
    """The files of one checkpoint, each mapped when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the content of a file. Raises whatever `read_file` raises."""
        if name not in self._open:
            self._open[name] = read_file(self.folder / name, mmap=True)
        return self._open[name]

    def value(self, place: Place) -> Any:
        """Return the value at a place."""
        found = self[place.file]
        for key in place.keys:
            found = found[key]
        return found

    def numbers(self, piece: Piece, *, state: str = "") -> torch.Tensor:
        """A stretch, one-dimensional, still in the file; of the optimizer's `state` of that name, if one is given."""
        assert not state or piece.state is not None
        place = piece.state.then(state) if state and piece.state else piece.place
        flat: torch.Tensor = self.value(place)
        return flat.reshape(-1).narrow(0, piece.start, piece.num)

    def whole(self, stored: Stored) -> torch.Tensor:
        """A weight or buffer put together, in its shape; still in the file where it lies in one piece."""
        pieces = [self.numbers(piece) for piece in stored.pieces]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).detach().view(stored.shape)

    def named(self, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
        """Files of one kind: (data-parallel rank, model-parallel rank, which counts pipeline stages) -> name.

        Args:
            pattern: with groups `rank` and `model_rank` (`framework.checkpoint.names`).
        """
        matches = filter(None, map(pattern.fullmatch, (path.name for path in self.folder.iterdir())))
        return dict(sorted(((int(match["rank"] or 0), int(match["model_rank"])), match[0]) for match in matches))
