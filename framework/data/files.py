"""Data in files that others write: rows for Hugging Face's ``datasets``, and WebDataset's shards."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor  # type: ignore[import-untyped]

from framework.data.batches import collate
from framework.data.handed import TakenSet, TakenStream, as_tensors
from framework.data.splits import Splits
from framework.errors import ConfigError, StorageError, missing_package

_READERS: Final = {"json": "json", "jsonl": "json", "csv": "csv", "txt": "text", "parquet": "parquet"}
_IMAGES: Final = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")
_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")


def _files(pattern: str, key: str) -> list[str]:
    """The files of a pattern, in order; a range ``{000..009}`` asks for all of its numbers."""
    if found := _RANGE.search(pattern):
        first, last = found.groups()
        numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [name for number in numbers for name in _files(_RANGE.sub(number, pattern, count=1), key)]
    names = sorted(glob(str(Path(pattern).expanduser())))  # noqa: PTH207  # which may be absolute
    if not names:
        raise ConfigError.of("dataset-not-found", "there is no such file", "check the path", key, pattern)
    return names


def hugging_face(
    path: str,
    *,
    eval_path: str | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    streaming: bool = False,
) -> Splits:
    """Rows of files; arguments are the keys of `config.data.HuggingFace`.

    Raises:
        ConfigError: kinds ``package-missing``, ``dataset-not-found``, ``dataset-not-read``, ``dataset-columns``.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", what="data.kind: huggingface", extra="data") from error

    def read(place: str, key: str) -> Any:
        try:
            if (Path(place) / "dataset_dict.json").is_file() or (Path(place) / "state.json").is_file():
                return datasets.load_from_disk(place)
            names = _files(place, key)
            reader = _READERS.get(Path(names[0]).suffix[1:], "")
            return datasets.load_dataset(reader or "json", data_files=names, split="train", streaming=streaming)
        except ConfigError:
            raise
        except Exception as error:
            known = ", ".join(f".{suffix}" for suffix in _READERS)
            fix = f"name a folder of save_to_disk, or files of {known}"
            raise ConfigError.of("dataset-not-read", f"datasets cannot read it: {error}", fix, key, place) from error

    train = read(path, "data.path")
    evaluation = None if eval_path is None else read(eval_path, "data.eval_path")
    if isinstance(train, dict):
        evaluation = train if evaluation is None else evaluation
        train = _split(train, path, "train")
    if isinstance(evaluation, dict):
        evaluation = _split(evaluation, path, "validation", "test", *["train"] * (eval_path is not None))
    sets = [None if rows is None else _with_columns(rows, columns, streaming) for rows in (train, evaluation)]
    return Splits(sets[0], sets[1])


def _split(splits: Mapping[str, Any], path: str, *names: str) -> Any:
    """The first of these splits; None where none is there, but for training."""
    found = next((splits[name] for name in names if name in splits), None)
    if found is None and names[0] == "train":
        fix = f"hand over one of {', '.join(splits)} as train_data"
        raise ConfigError.of("dataset-not-read", "it has no split train", fix, "data.path", path)
    return found


def _with_columns(rows: Any, columns: Sequence[str] | Mapping[str, str] | None, streaming: bool) -> Any:
    asked = [*(columns or ())]
    if missing := sorted({*asked} - {*(rows.column_names or asked)}):
        reason, fix = f"there is no column {missing[0]}", f"there are {', '.join(rows.column_names)}"
        raise ConfigError.of("dataset-columns", reason, fix, "data.columns", asked)
    if columns is not None:
        rows = rows.select_columns(asked)
    if isinstance(columns, Mapping):
        rows = rows.rename_columns({old: new for old, new in columns.items() if old != new})
    if streaming and hasattr(rows, "to_iterable_dataset"):
        rows = rows.to_iterable_dataset(num_shards=min(len(rows), 64))
    rows = as_tensors(rows)
    if columns is None or isinstance(columns, Mapping):
        return rows
    collate_fn = partial(_collated, names=asked)
    return TakenStream(rows, collate_fn) if streaming else TakenSet(rows, collate_fn, None)


def _collated(rows: Sequence[Mapping[str, Any]], *, names: Sequence[str]) -> tuple[Any, ...]:
    batch = collate(rows)
    return tuple(batch[name] for name in names)


def shards(path: str, *, eval_path: str | None = None, fields: Sequence[str] | None = None) -> Splits:
    """Samples of tar files; arguments are the keys of `config.data.WebDataset`.

    Raises:
        ConfigError: kind ``dataset-not-found``.
    """
    train = Shards(_files(path, "data.path"), fields)
    return Splits(train, None if eval_path is None else Shards(_files(eval_path, "data.eval_path"), fields))


class Shards:
    """A stream of the samples of tar files; its state is a file and the byte in it where the next sample begins."""

    def __init__(self, names: Sequence[str], fields: Sequence[str] | None) -> None:
        self._names, self._fields, self.num_shards = names, fields, len(names)
        self._at = (0, 0)

    def shard(self, num_shards: int, index: int) -> Shards:
        """Every `num_shards`-th file."""
        return Shards(self._names[index::num_shards], self._fields)

    def state_dict(self) -> dict[str, int]:
        return dict(zip(("file", "byte"), self._at, strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._at = (state["file"], state["byte"])

    def __iter__(self) -> Iterator[Any]:
        first, start = self._at
        for number, name in enumerate(self._names[first:], start=first):
            for sample, after in self._samples(name, start, number):
                self._at = after
                yield self._decoded(sample, name)
            start = 0
        self._at = (0, 0)

    def _samples(self, name: str, start: int, number: int) -> Iterator[tuple[dict[str, bytes], tuple[int, int]]]:
        """Samples of a file from a byte on, each with the place of the next one."""
        sample, stem = dict[str, bytes](), None
        try:
            with Path(name).open("rb") as file:
                file.seek(start)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in tar:
                        own, _, extension = Path(member.name).name.partition(".")
                        own = str(Path(member.name).parent / own)
                        if sample and own != stem:
                            yield sample, (number, member.offset)
                            sample = {}
                        if member.isfile() and (found := tar.extractfile(member)) is not None:
                            stem, sample[extension.lower()] = own, found.read()
        except (tarfile.TarError, OSError) as error:
            raise StorageError(f"{name}: the shard cannot be read: {error} [shard-not-read]") from error
        if sample:
            yield sample, (number + 1, 0)

    def _decoded(self, sample: Mapping[str, bytes], name: str) -> Any:
        names = list(sample) if self._fields is None else self._fields
        if missing := [each for each in names if each not in sample]:
            reason = f"a sample of {name} has no .{missing[0]}, but {', '.join(sample)}"
            raise ConfigError.of("shard-fields", reason, "name fields that every sample has", "data.fields", [*names])
        values = [_value(each.rpartition(".")[2], sample[each]) for each in names]
        return dict(zip(names, values, strict=True)) if self._fields is None else tuple(values)


def _value(extension: str, data: bytes) -> Any:
    """What a file of a sample holds, by its extension."""
    if extension in _IMAGES:
        return pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB")).float() / 255
    if extension in ("cls", "index"):
        return int(data)
    if extension in ("txt", "text"):
        return data.decode()
    if extension == "json":
        return json.loads(data)
    if extension == "npy":
        return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
    return data
