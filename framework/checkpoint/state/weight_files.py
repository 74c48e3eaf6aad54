"""Weights in files of other programs: safetensors, one or several with Hugging Face's index,
written and read back; under the names of transformers' models.

Read: ours or anybody's, mapped by the library, so that the ranks of a host share one copy
(`LazyWeights`). Written: a length, a JSON header and the numbers, tensor by tensor: the library's
own function wants all tensors of a file in memory at once, and one file may be the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from framework.checkpoint.huggingface import Form, Joined
from framework.checkpoint.state.shard_map import Stored
from framework.errors import ConfigError, StorageError, in_one_line
from framework.system.files import NewFile, replace_text

SUFFIX: Final = ".safetensors"
WHOLE: Final = f"model{SUFFIX}"
INDEX: Final = f"{WHOLE}.index.json"
PICKLED: Final = "model.pt"
# Further names of a weight -> the name under which it is stored, in a file's metadata.
TIES: Final = "dsf_ties"
_FORMER_TIES: Final = "dsframework_ties"  # in exports made before the project changed its name
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK: Final = 1 << 24
_ALIGNMENT: Final = 8


Read = Callable[[], torch.Tensor]


class LazyWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor on the CPU, in the order given; each access reads it anew, from mapped files.

    `shapes` tells what there is without reading it; of what it `lacks` a model keeps its own.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        read: Mapping[str, Read],
        lacks: Collection[str] = (),
    ) -> None:
        assert shapes.keys() == read.keys()
        self.shapes = dict(shapes)
        self._read = dict(read)
        self.lacks = lacks

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def let_go(self) -> None:
        """Close the files; nothing can be read any more."""
        self.shapes = {}
        self._read = {}


def shapes_of(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Size]:
    """The shape of every weight; lazy ones are not read for it."""
    if isinstance(weights, LazyWeights):
        return weights.shapes
    return {name: tensor.shape for name, tensor in weights.items()}


def is_exported(path: Path) -> bool:
    """Check whether there is a safetensors file, or a folder of an export."""
    return (path.suffix == SUFFIX and path.is_file()) or any(
        (path / name).is_file() for name in (WHOLE, INDEX)
    )


def read_exported(path: Path) -> LazyWeights:
    """Every tensor by name; a tied one under all its names, where the export noted them.

    Raises:
        StorageError: kind ``weights-not-read``.
    """
    index = path / INDEX
    placed: dict[str, str] = {}
    ties: dict[str, str] = {}
    files = [path / WHOLE if path.is_dir() else path]
    if index.is_file():
        placed, ties = _read_index(index)
        files = [index.with_name(name) for name in sorted({*placed.values()})]
    shapes: dict[str, torch.Size] = {}
    read: dict[str, Read] = {}
    for file in files:
        more_shapes, more_read, more_ties = _open(file)
        shapes |= more_shapes
        read |= more_read
        ties |= more_ties
    missing = sorted(placed.keys() - shapes.keys())
    if missing:
        raise _not_read(index, f"{missing[0]} is in none of its shards")
    # other ties are another file's to give
    own = {name: first for name, first in ties.items() if first in shapes}
    return LazyWeights(
        shapes | {name: shapes[first] for name, first in own.items()},
        read | {name: read[first] for name, first in own.items()},
    )


def _open(file: Path) -> tuple[dict[str, torch.Size], dict[str, Read], dict[str, str]]:
    """Shapes and ways to read the tensors of a file, and further names for some of them."""
    try:
        from safetensors import safe_open  # here: no other run needs it
    except ModuleNotFoundError as error:
        key = "checkpoint.init_weights"
        reason = "safetensors is not installed"
        fix = "pip install safetensors"
        raise ConfigError.of(
            kind="package-missing", key=key, value=str(file), reason=reason, fix=fix
        ) from error
    try:
        # checks the header against the size of the file
        opened: Any = safe_open(file, framework="pt")
        shapes = {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # it is no dict
        ties = _ties_in(opened.metadata() or {})
    except Exception as error:  # the library has an error of its own, and of the system's for files that are cut off
        raise _not_read(file, in_one_line(error)) from error
    return shapes, {name: partial(opened.get_tensor, name) for name in shapes}, ties


def _ties_in(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return further names of weights, as the metadata of a file note them."""
    return dict(json.loads(metadata.get(TIES) or metadata.get(_FORMER_TIES, "{}")))


def _read_index(index: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Name of a tensor -> its shard, and further names."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        placed = {name: str(shard) for name, shard in dict(content["weight_map"]).items()}
        ties = _ties_in(content.get("metadata", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _not_read(index, "it is not an index of shards") from error
    for name in sorted({*placed.values()}):
        if Path(name).name != name or not name.endswith(SUFFIX):
            raise _not_read(index, f"its shard {name!r} is not a file beside it")
    return placed, ties


def as_ours(found: LazyWeights, form: Form) -> LazyWeights:
    """Weights under their names, under ours; names that are neither's stay, to be refused, further
    ones of a weight go. Tokens that theirs lacks get the mean of all rows, as in transformers; of
    more positions the first are taken.
    """
    held = form.names_in(found)
    shapes = dict[str, torch.Size]()
    read = {}
    for plain, name in held.items():
        first = held.get(form.table["ties"].get(name, ""))
        if plain not in form.weights and (
            first is None or not torch.equal(found[name], found[first])
        ):
            shapes[name], read[name] = found.shapes[name], partial(found.__getitem__, name)
    lacks = set[str]()
    for theirs, one in form.weights.items():
        if theirs not in held:
            lacks |= set(one.ours) if one.may_lack else set()
            continue
        whole = found.shapes[held[theirs]]
        num_rows, *others = reversed(whole) if one.transposed else whole
        num_rows //= len(one.ours)
        # A token that ours has not, and a position that theirs has not, are left to be refused.
        if one.rows:
            num_rows = (max if one.rows == "vocab_size" else min)(
                num_rows, getattr(form.model, one.rows)
            )
        for number, ours in enumerate(one.ours):
            shapes[ours] = torch.Size((num_rows, *others))
            read[ours] = partial(_part_of, found, held[theirs], one, number, num_rows)
    return LazyWeights(shapes, read, lacks)


def as_theirs(
    held: Mapping[str, torch.Tensor], stored: Mapping[str, Stored | torch.Tensor], form: Form
) -> tuple[LazyWeights, dict[str, torch.Tensor]]:
    """Ours under their names; and the same without numbers."""
    empty = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()
    }
    described = {theirs: _whole(empty, one) for theirs, one in form.weights.items()}
    shapes = {theirs: tensor.shape for theirs, tensor in described.items()}
    return LazyWeights(
        shapes, {theirs: partial(_whole, held, one) for theirs, one in form.weights.items()}
    ), described


def _part_of(found: LazyWeights, name: str, one: Joined, number: int, rows: int) -> torch.Tensor:
    whole = found[name].T if one.transposed else found[name]
    more = rows - len(whole)
    if more > 0:
        mean = whole.float().mean(0, keepdim=True).to(whole.dtype)
        return torch.cat((whole, mean.expand(more, *whole.shape[1:])))
    return whole.narrow(0, number * rows, rows).contiguous()


def _whole(held: Mapping[str, torch.Tensor], one: Joined) -> torch.Tensor:
    joined = torch.cat([held[name] for name in one.ours])
    return joined.T if one.transposed else joined


def _not_read(file: Path, reason: str) -> StorageError:
    return StorageError(
        f"{file}: not a file of weights: {reason}; write it again, or name another one "
        "[weights-not-read]"
    )


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name in the checkpoint, and its name and type in the file."""

    name: str
    written: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.shape.numel() * self.dtype.itemsize


def entries(
    held: Mapping[str, Stored | torch.Tensor], *, dtype: torch.dtype, names: Mapping[str, str]
) -> list[Entry]:
    """List the tensors to write: numbers with a point in `dtype`, others (counters) as they are;
    `names` win.

    Raises:
        ConfigError: a tensor is of a type that safetensors has not.
    """
    found = []
    for name, stored in held.items():
        if stored.dtype not in _NAMES:
            reason = "safetensors has no such type"
            fix = "export with --format pt"
            raise ConfigError.of("export-dtype", reason, fix, key=name, value=str(stored.dtype))
        written_as = dtype if stored.dtype.is_floating_point else stored.dtype
        found.append(Entry(name, names.get(name, name), stored.shape, written_as))
    return found


def split(found: list[Entry], *, shard_bytes: int) -> list[list[Entry]]:
    """Files of at most so many bytes, in the order of the module; a larger tensor has its own."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in found:
        if shards[-1] and size + entry.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def write_safetensors(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    shards: list[list[Entry]],
    *,
    metadata: Mapping[str, str],
) -> dict[str, int]:
    """Write ``model.safetensors``, or shards and their index; returns file -> bytes.

    Raises:
        ConfigError: a number is too large for the type.
        OSError: the file system refused.
    """
    count = len(shards)
    if count > 1:
        names = [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    else:
        names = [WHOLE]
    placed = dict(zip(names, shards, strict=True))
    written = {
        name: write_one(folder / name, weights, shard, metadata=metadata)
        for name, shard in placed.items()
    }
    if count > 1:
        total = sum(entry.num_bytes for shard in shards for entry in shard)
        files = {entry.written: name for name, shard in placed.items() for entry in shard}
        text = (
            json.dumps(
                {"metadata": {"total_size": total} | dict(metadata), "weight_map": files}, indent=2
            )
            + "\n"
        )
        replace_text(folder / INDEX, text)
        written[INDEX] = len(text.encode())
    return written


def write_one(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    shard: list[Entry],
    *,
    metadata: Mapping[str, str],
) -> int:
    """Write one file of safetensors; returns its bytes. Errors as of `write_safetensors`."""
    return _write(path, partial(_fill, weights=weights, shard=shard, metadata=metadata))


def write_pt(
    path: Path, weights: Mapping[str, torch.Tensor], shard: list[Entry], *, ties: Mapping[str, str]
) -> int:
    """Write a state dict with `torch.save`, `ties` (name -> the first one's) included; the whole
    model is in memory.

    Raises:
        ConfigError: a number is too large for the type.
        OSError: the file system refused.
    """
    state = {entry.written: converted(weights[entry.name], entry) for entry in shard}
    state |= {name: state[first] for name, first in ties.items()}
    return _write(path, lambda stream: torch.save(state, stream))  # type: ignore[arg-type]


def converted(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor as it is written, contiguous.

    Raises:
        ConfigError: a number is too large for the type: it would become infinite in silence.
    """
    result = tensor.to(entry.dtype)
    if entry.dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        largest = float(tensor.abs()[tensor.isfinite()].max())
        reason = "fp16 ends at 65504"
        fix = "export with --dtype bf16 or fp32"
        raise ConfigError.of("export-overflow", reason, fix, key=entry.name, value=largest)
    return result.contiguous()


def _write(path: Path, fill: Callable[[NewFile], None]) -> int:
    stream = NewFile(path)
    try:
        fill(stream)
    except BaseException:
        stream.abandon()
        raise
    return stream.close().num_bytes


def _fill(
    stream: NewFile,
    *,
    weights: Mapping[str, torch.Tensor],
    shard: list[Entry],
    metadata: Mapping[str, str],
) -> None:
    # The library orders by size of the type as well: every tensor then begins at a multiple of its
    # own.
    ordered = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    stream.write(_header(ordered, metadata))
    for entry in ordered:
        for block in _blocks(converted(weights[entry.name], entry)):
            stream.write(block)


def _header(ordered: list[Entry], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata)}
    start = 0
    for entry in ordered:
        end = start + entry.num_bytes
        described[entry.written] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: torch.Tensor) -> Iterator[bytes]:
    numbers = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, numbers.numel(), _BLOCK):
        yield numbers[start : start + _BLOCK].numpy().tobytes()
