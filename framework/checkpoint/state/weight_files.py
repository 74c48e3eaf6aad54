"""Weights written for other programs: one safetensors file, or several with the index that Hugging Face's loaders read.

safetensors is a length, a JSON header and the numbers, so a file is written here tensor by tensor: the library's own
function wants all tensors of a file in memory at once, and one file may be the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from framework.checkpoint.state.exported_weights import INDEX, SUFFIX, WHOLE
from framework.checkpoint.state.merged_weights import MergedWeights
from framework.errors import ConfigError, Problem
from framework.system.files import NewFile, replace_text

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


def entries(weights: MergedWeights, *, dtype: torch.dtype, names: Mapping[str, str]) -> list[Entry]:
    """List the tensors to write: numbers with a point in `dtype`, others (counters) as they are; under other names, if
    there are `names`.

    Raises:
        ConfigError: a tensor is of a type that safetensors has not.
    """
    found = []
    for name, stored in weights.stored.items():
        if stored.dtype not in _NAMES:
            raise ConfigError(
                Problem(
                    kind="export-dtype",
                    key=name,
                    value=str(stored.dtype),
                    reason="safetensors has no such type",
                    fix="export with --format pt",
                )
            )
        found.append(
            Entry(name, names.get(name, name), stored.shape, dtype if stored.dtype.is_floating_point else stored.dtype)
        )
    return found


def split(found: list[Entry], *, shard_bytes: int) -> list[list[Entry]]:
    """Files of at most so many bytes, in the order of the module; a tensor that is larger by itself has its own
    file.
    """
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
    folder: Path, weights: MergedWeights, shards: list[list[Entry]], *, metadata: Mapping[str, str]
) -> dict[str, int]:
    """Write ``model.safetensors``, or shards and their index; returns file -> bytes.

    Raises:
        ConfigError: a number is too large for the type.
        OSError: the file system refused.
    """
    one = len(shards) == 1
    count = len(shards)
    names = [WHOLE] if one else [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    written = {
        name: _write_file(folder / name, weights, shard, metadata=metadata)
        for name, shard in zip(names, shards, strict=True)
    }
    if not one:
        total = sum(entry.num_bytes for shard in shards for entry in shard)
        placed = {entry.written: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        text = json.dumps({"metadata": {"total_size": total} | dict(metadata), "weight_map": placed}, indent=2) + "\n"
        replace_text(folder / INDEX, text)
        written[INDEX] = len(text.encode())
    return written


def write_pt(path: Path, weights: MergedWeights, shard: list[Entry], *, ties: Mapping[str, str]) -> int:
    """Write what `torch.save` makes of a state dict, `ties` (name -> the first one's) included. It holds the whole
    model in memory.

    Raises:
        ConfigError: a number is too large for the type.
        OSError: the file system refused.
    """
    state = {entry.written: converted(weights[entry.name], entry) for entry in shard}
    stream = NewFile(path)
    try:
        torch.save(state | {name: state[first] for name, first in ties.items()}, stream)  # type: ignore[arg-type]
    except BaseException:
        stream.abandon()
        raise
    return stream.close().num_bytes


def converted(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor as it is written, contiguous.

    Raises:
        ConfigError: a number is too large for the type: it would become infinite in silence.
    """
    result = tensor.to(entry.dtype)
    if entry.dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        largest = float(tensor.abs()[tensor.isfinite()].max())
        raise ConfigError(
            Problem(
                kind="export-overflow",
                key=entry.name,
                value=largest,
                reason="fp16 ends at 65504",
                fix="export with --dtype bf16 or fp32",
            )
        )
    return result.contiguous()


def _write_file(path: Path, weights: MergedWeights, shard: list[Entry], *, metadata: Mapping[str, str]) -> int:
    # The library orders by size of the type as well: every tensor then begins at a multiple of its own.
    ordered = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    stream = NewFile(path)
    try:
        stream.write(_header(ordered, metadata))
        for entry in ordered:
            for block in _blocks(converted(weights[entry.name], entry)):
                stream.write(block)
    except BaseException:
        stream.abandon()
        raise
    return stream.close().num_bytes


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
