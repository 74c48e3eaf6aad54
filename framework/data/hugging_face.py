"""Rows in files, by Hugging Face's ``datasets``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, Final

import torch

from framework.data.batches import collate
from framework.data.from_dataloader import TakenSet, TakenStream, as_tensors
from framework.data.splits import Splits
from framework.errors import ConfigError, missing_package

_READERS: Final = {f".{name}": name for name in ("json", "csv", "parquet")} | {
    ".jsonl": "json",
    ".txt": "text",
    ".tar": "webdataset",
}
_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
_IMAGES: Final = 4  # dimensions of a batch of them


def build(
    path: str,
    *,
    eval_path: str | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    streaming: bool = False,
) -> Splits:
    """Arguments are the keys of `config.data.HuggingFace`.

    Raises:
        ConfigError: kinds ``package-missing``, ``dataset-not-found``, ``dataset-not-read``,
            ``dataset-columns``.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", what="data.kind: huggingface", extra="data") from error

    def read(place: str, key: str, *splits: str) -> Any:
        try:
            if {"dataset_dict.json", "state.json"} & {
                file.name for file in Path(place).glob("*.json")
            }:
                found = datasets.load_from_disk(place)
            else:
                names = _files(place, key)
                reader = _READERS[Path(names[0]).suffix]
                found = datasets.load_dataset(
                    reader, data_files=names, split="train", streaming=streaming
                )
            if not isinstance(found, dict):
                return found if "train" in splits else None
            name = next(filter(found.__contains__, splits), None)
            return found[name or "train"] if name or "train" in splits else None
        except ConfigError:
            raise
        except Exception as error:
            reason = f"datasets cannot read it: {type(error).__name__}: {error}"
            fix = (
                f"name a folder of save_to_disk with a split train, or {', '.join(_READERS)} files"
            )
            raise ConfigError.of("dataset-not-read", reason, fix, key, place) from error

    train = read(path, "data.path", "train")
    evaluation = read(
        eval_path or path, "data.eval_path", "validation", "test", *["train"] * bool(eval_path)
    )
    sets = [
        None if rows is None else _with_columns(rows, columns, streaming)
        for rows in (train, evaluation)
    ]
    return Splits(sets[0], sets[1])


def _files(pattern: str, key: str) -> list[str]:
    """The files of a pattern, in order; a range ``{000..009}`` asks for all of its numbers."""
    found = _RANGE.search(pattern)
    if found:
        first, last = found.groups()
        numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [
            name for number in numbers for name in _files(_RANGE.sub(number, pattern, count=1), key)
        ]
    names = sorted(glob(str(Path(pattern).expanduser())))  # noqa: PTH207  # which may be absolute
    if not names:
        raise ConfigError.of(
            "dataset-not-found", "there is no such file", "check the path", key, pattern
        )
    return names


def _with_columns(
    rows: Any, columns: Sequence[str] | Mapping[str, str] | None, streaming: bool
) -> Any:
    asked = [*(columns or ())]
    missing = sorted({*asked} - {*(rows.column_names or asked)})
    if missing:
        reason = f"there is no column {missing[0]}"
        fix = f"there are {', '.join(rows.column_names)}"
        raise ConfigError.of("dataset-columns", reason, fix, "data.columns", asked)
    if asked:
        rows = rows.select_columns(asked)
    if isinstance(columns, Mapping):
        rows = rows.rename_columns({old: new for old, new in columns.items() if old != new})
    if streaming and hasattr(rows, "to_iterable_dataset"):
        rows = rows.to_iterable_dataset(num_shards=min(len(rows), 64))
    rows = as_tensors(rows)
    names = None if isinstance(columns, Mapping) else columns
    collate_fn = partial(_collated, names=names)
    if streaming:
        return TakenStream(rows, collate_fn)
    return TakenSet(rows, collate_fn, None)


def _collated(rows: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None) -> Any:
    """Images, bytes of (batch, channels, height, width), become numbers in [0, 1]."""
    batch = {
        name: value / 255
        if getattr(value, "dtype", None) == torch.uint8 and value.ndim == _IMAGES
        else value
        for name, value in collate(rows).items()
    }
    if names is None:
        return batch
    return tuple(batch[name] for name in names)
