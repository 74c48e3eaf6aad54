"""Tensors in the files of a checkpoint: where each lies, and the files, mapped into memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.state.checkpoint_engine import read_file
from framework.checkpoint.state.tensor_split import Split


@dataclass(frozen=True)
class ValuePath:
    """A value in a checkpoint: the name of a file, and the keys that lead to the value through the
    dicts and lists in it.
    """

    file: str
    keys: tuple[str | int, ...]

    def then(self, *keys: str | int) -> ValuePath:
        """Append keys."""
        return ValuePath(self.file, self.keys + keys)


@dataclass(frozen=True)
class ShardPiece:
    """A stretch of one stored tensor, seen as flat.

    Attributes:
        tensor: the tensor.
        start: where the stretch begins in it.
        num: how many numbers it has.
        state: the optimizer's state of that tensor, a dict of tensors that are laid out alike; None
            if the optimizer keeps no state of it.
    """

    tensor: ValuePath
    start: int
    num: int
    state: ValuePath | None = None


@dataclass(frozen=True)
class Stored:
    """One weight or buffer: where its numbers lie is computed, and no file is opened for it.

    Attributes:
        shape: of the whole tensor.
        dtype: of its numbers: of the fp32 copies if the optimizer keeps any.
        files: that hold the numbers, in the order of ranks; each has `size` numbers of a row, in
            which the tensor begins at `offset`.
        keys: that lead to the tensor in each of the files.
        size: numbers in each file; all of them if there is one file.
        offset: of the tensor's first number.
        start: where the row begins in each tensor.
        state: keys that lead to the optimizer's state in each file; None if it keeps none.
        state_file: the one file that has the state, if that is another file.
        number: of the weight among those that are stepped as one tensor.
        split, parts: of a weight that tensor ranks share: how it is split, and each rank's part.
            Files and keys are the first part's.
    """

    shape: torch.Size
    dtype: torch.dtype
    files: Sequence[str]
    keys: tuple[str | int, ...]
    size: int
    offset: int = 0
    start: int = 0
    state: tuple[str | int, ...] | None = None
    state_file: str = ""
    number: int = 0
    split: Split | None = None
    parts: tuple[Stored, ...] = ()

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[ShardPiece]:
        """Yield the stretches that together are numbers `start` to `stop` of the flattened tensor,
        in order.
        """
        if stop is None:
            stop = self.shape.numel()
        else:
            stop = min(stop, self.shape.numel())
        if self.split is not None:
            for rank, first, num in self.split.to_parts(self.shape, len(self.parts), start, stop):
                yield from self.parts[rank].pieces(first, first + num)
            return
        while start < stop:
            rank, within = divmod(self.offset + start, self.size)
            num = min(self.size - within, stop - start)
            file = self.files[rank]
            tensor = ValuePath(file, self.keys)
            yield ShardPiece(tensor, self.start + within, num, self._state_in(file))
            start += num

    @property
    def first_state(self) -> ValuePath | None:
        """The state in the first file, which has the same keys as in the others."""
        return self._state_in(self.files[0])

    def _state_in(self, file: str) -> ValuePath | None:
        if self.state is None:
            return None
        return ValuePath(self.state_file or file, self.state)


class CheckpointFiles:
    """The files of one checkpoint, each mapped into memory when it is first used."""

    def __init__(self, folder: Path, *, complete: Callable[[str, Any], None] | None = None) -> None:
        """Take a checkpoint's folder; `complete` puts into a file's content, by its name, what
        other files hold of it.
        """
        self.folder = folder
        self._complete = complete
        self._open: dict[str, Any] = {}
        self._checks: dict[str, Callable[[Any], None]] = {}

    def expect(self, checks: Mapping[str, Callable[[Any], None]]) -> None:
        """Call a file's check with its content before anything more of the file is used; the check
        raises ValueError.
        """
        self._checks.update(checks)
        for name in checks.keys() & self._open.keys():
            checks[name](self._open[name])

    def __getitem__(self, name: str) -> Any:
        """Return the content of a file. Raises what `read_file` and the file's check raise."""
        if name not in self._open:
            content = read_file(self.folder / name, mmap=True)
            if self._complete is not None:
                self._complete(name, content)
            if name in self._checks:
                self._checks[name](content)
            self._open[name] = content
        return self._open[name]

    def value(self, path: ValuePath) -> Any:
        """Return the value at a path."""
        value = self[path.file]
        for key in path.keys:
            value = value[key]
        return value

    def numbers(self, piece: ShardPiece, *, state: str = "") -> torch.Tensor:
        """Return a stretch, one-dimensional, still in the file; of the optimizer's state with the
        key `state`, if one is given.
        """
        assert not state or piece.state is not None
        if state and piece.state:
            tensor = piece.state.then(state)
        else:
            tensor = piece.tensor
        flat: torch.Tensor = self.value(tensor)
        return flat.reshape(-1).narrow(0, piece.start, piece.num)

    def joined(
        self, pieces: Iterable[ShardPiece], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Join a weight or buffer of this shape; still in the file if it lies in one piece."""
        stretches = [self.numbers(piece) for piece in pieces]
        if not stretches:
            flat = torch.empty(0, dtype=dtype)
        elif len(stretches) == 1:
            flat = stretches[0]
        else:
            flat = torch.cat(stretches)
        return flat.detach().view(shape)

    def named(self, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
        """List the files of one kind: (data-parallel rank, model-parallel rank) -> name.
        Model-parallel ranks count pipeline stages too.
        """
        names = []
        for path in self.folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match:
                ranks = (int(match["rank"] or 0), int(match["model_rank"]))
                names.append((ranks, path.name))
        return dict(sorted(names))
