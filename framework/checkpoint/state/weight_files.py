"""Weights in files of other programs: safetensors, one or several with Hugging Face's index,
written and read back; under the names of transformers' models.

Reading maps files of any origin by the library, so that the ranks of a host share one copy
(`LazyWeights`). Writing appends a length, a JSON header and the numbers, tensor by tensor: the
library's own function needs all tensors of a file in memory at once, and one file may be the whole
model.
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
from framework.checkpoint.state.stored import Stored
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
_BLOCK: Final = 1 << 24  # bytes
_ALIGNMENT: Final = 8  # bytes, of the first tensor


Read = Callable[[], torch.Tensor]


class LazyWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor on the CPU, in the order given; each access reads it anew, from mapped files.

    Attributes:
        shapes: of all weights, without reading them.
        lacks: names for which a model keeps its own numbers.
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
    """Return the shape of every weight; lazy ones are not read for it."""
    if isinstance(weights, LazyWeights):
        return weights.shapes
    return {name: tensor.shape for name, tensor in weights.items()}


def is_exported(path: Path) -> bool:
    """Check whether a path is a safetensors file, or a folder of an export."""
    if path.suffix == SUFFIX and path.is_file():
        return True
    return (path / WHOLE).is_file() or (path / INDEX).is_file()


def read_exported(path: Path) -> LazyWeights:
    """Return every tensor by name; a tied one under all its names, if the export noted them.

    Raises:
        StorageError: kind ``weights-not-read``.
    """
    index = path / INDEX
    shard_of: dict[str, str] = {}
    ties: dict[str, str] = {}
    if index.is_file():
        shard_of, ties = _read_index(index)
        files = [index.with_name(name) for name in sorted(set(shard_of.values()))]
    elif path.is_dir():
        files = [path / WHOLE]
    else:
        files = [path]
    shapes: dict[str, torch.Size] = {}
    read: dict[str, Read] = {}
    for file in files:
        file_shapes, file_read, file_ties = _open(file)
        shapes |= file_shapes
        read |= file_read
        ties |= file_ties
    missing = sorted(shard_of.keys() - shapes.keys())
    if missing:
        raise _not_read(index, f"{missing[0]} is in none of its shards")
    tied_shapes = {}
    tied_read = {}
    for name, first in ties.items():
        # A tie to a weight of another file is that file's to give.
        if first in shapes:
            tied_shapes[name] = shapes[first]
            tied_read[name] = read[first]
    return LazyWeights(shapes | tied_shapes, read | tied_read)


def _open(file: Path) -> tuple[dict[str, torch.Size], dict[str, Read], dict[str, str]]:
    """Return the shapes of a file's tensors, the functions that read them, and further names."""
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
        shapes = {}
        for name in opened.keys():  # noqa: SIM118  # it is no dict
            shapes[name] = torch.Size(opened.get_slice(name).get_shape())
        ties = _ties_in(opened.metadata() or {})
    # The library has an error type of its own, and raises the system's for files that are cut off.
    except Exception as error:
        raise _not_read(file, in_one_line(error)) from error
    read: dict[str, Read] = {name: partial(opened.get_tensor, name) for name in shapes}
    return shapes, read, ties


def _ties_in(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the further names of weights that a file's metadata note."""
    return dict(json.loads(metadata.get(TIES) or metadata.get(_FORMER_TIES, "{}")))


def _read_index(index: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read an index: name of a tensor -> its shard, and further names."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        shard_of = {name: str(shard) for name, shard in dict(content["weight_map"]).items()}
        ties = _ties_in(content.get("metadata", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _not_read(index, "it is not an index of shards") from error
    for name in sorted(set(shard_of.values())):
        if Path(name).name != name or not name.endswith(SUFFIX):
            raise _not_read(index, f"its shard {name!r} is not a file beside it")
    return shard_of, ties


def as_ours(weights: LazyWeights, form: Form) -> LazyWeights:
    """Rename weights of transformers to our names. Names that neither has stay, to be refused;
    further names of a weight go. Tokens that theirs lacks get the mean of all rows, as in
    transformers; of more positions the first are taken.
    """
    name_of = form.names_in(weights)  # their plain name -> the name in the file
    shapes: dict[str, torch.Size] = {}
    read: dict[str, Read] = {}
    for plain, name in name_of.items():
        if plain not in form.weights and not _is_further_name(weights, form, name_of, name):
            shapes[name] = weights.shapes[name]
            read[name] = partial(weights.__getitem__, name)
    lacks: set[str] = set()
    for theirs, joined in form.weights.items():
        if theirs not in name_of:
            if joined.may_lack:
                lacks.update(joined.ours)
            continue
        name = name_of[theirs]
        part_shape = _part_shape(weights.shapes[name], joined, form)
        for number, ours in enumerate(joined.ours):
            shapes[ours] = part_shape
            read[ours] = partial(_part_of, weights, name, joined, number, part_shape[0])
    return LazyWeights(shapes, read, lacks)


def _is_further_name(
    weights: LazyWeights, form: Form, name_of: Mapping[str, str], name: str
) -> bool:
    """Check whether a tensor equals the weight that the form's table ties its name to."""
    first = name_of.get(form.table["ties"].get(name, ""))
    return first is not None and torch.equal(weights[name], weights[first])


def _part_shape(shape: torch.Size, joined: Joined, form: Form) -> torch.Size:
    """Return the shape of each of our weights in one of theirs, which has this shape."""
    if joined.transposed:
        shape = torch.Size(reversed(shape))
    num_rows, *others = shape
    num_rows //= len(joined.ours)
    if joined.rows:
        our_rows = getattr(form.model, joined.rows)
        # A token that ours has not, and a position that theirs has not, are left to be refused.
        if joined.rows == "vocab_size":
            num_rows = max(num_rows, our_rows)
        else:
            num_rows = min(num_rows, our_rows)
    return torch.Size((num_rows, *others))


def as_theirs(
    weights: Mapping[str, torch.Tensor], stored: Mapping[str, Stored | torch.Tensor], form: Form
) -> tuple[LazyWeights, dict[str, torch.Tensor]]:
    """Rename our weights to the names in transformers. Also returns them without numbers, on the
    meta device.
    """
    empty = {}
    for name, weight in stored.items():
        empty[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    described: dict[str, torch.Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    read: dict[str, Read] = {}
    for theirs, joined in form.weights.items():
        described[theirs] = _join(empty, joined)
        shapes[theirs] = described[theirs].shape
        read[theirs] = partial(_join, weights, joined)
    return LazyWeights(shapes, read), described


def _part_of(
    weights: LazyWeights, name: str, joined: Joined, number: int, num_rows: int
) -> torch.Tensor:
    """Return our weight of this number in one of theirs; rows that are missing are the mean."""
    tensor = weights[name]
    if joined.transposed:
        tensor = tensor.T
    num_missing = num_rows - len(tensor)
    if num_missing > 0:
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat((tensor, mean.expand(num_missing, *tensor.shape[1:])))
    return tensor.narrow(0, number * num_rows, num_rows).contiguous()


def _join(weights: Mapping[str, torch.Tensor], joined: Joined) -> torch.Tensor:
    tensor = torch.cat([weights[name] for name in joined.ours])
    if joined.transposed:
        return tensor.T
    return tensor


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
    stored: Mapping[str, Stored | torch.Tensor], *, dtype: torch.dtype, names: Mapping[str, str]
) -> list[Entry]:
    """List the tensors to write: numbers with a point in `dtype`, others (counters) as they are.
    `names` maps a name to another one in the file.

    Raises:
        ConfigError: a tensor is of a type that safetensors has not.
    """
    result = []
    for name, weight in stored.items():
        if weight.dtype not in _NAMES:
            reason = "safetensors has no such type"
            fix = "export with --format pt"
            raise ConfigError.of("export-dtype", reason, fix, key=name, value=str(weight.dtype))
        written_as = dtype if weight.dtype.is_floating_point else weight.dtype
        result.append(Entry(name, names.get(name, name), weight.shape, written_as))
    return result


def split(entries: list[Entry], *, shard_bytes: int) -> list[list[Entry]]:
    """Divide entries into files of at most `shard_bytes`, in the order of the module; a larger
    tensor has a file of its own.
    """
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
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
    written = {}
    total_bytes = 0
    file_of = {}
    for name, shard in zip(names, shards, strict=True):
        written[name] = write_one(folder / name, weights, shard, metadata=metadata)
        for entry in shard:
            total_bytes += entry.num_bytes
            file_of[entry.written] = name
    if count > 1:
        index = {"metadata": {"total_size": total_bytes, **metadata}, "weight_map": file_of}
        text = json.dumps(index, indent=2) + "\n"
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
    """Write one file of safetensors; returns its size in bytes. Raises as `write_safetensors`."""
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
    """Convert a tensor to the type of its entry, contiguous.

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
    """Write the header and all tensors of a safetensors file."""
    # The library orders by size of the type as well: every tensor then begins at a multiple of the
    # size of its type.
    ordered = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    stream.write(_header(ordered, metadata))
    for entry in ordered:
        for block in _blocks(converted(weights[entry.name], entry)):
            stream.write(block)


def _header(ordered: list[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the length of the JSON text in 8 bytes, and the text, padded with spaces."""
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
