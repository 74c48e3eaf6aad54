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

_READERS: Final = {
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".jsonl": "json",
    ".txt": "text",
    ".tar": "webdataset",
}
_TARGETS: Final = ("labels", "label", "targets", "target")  # as `Task.split` knows them
_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
_IMAGE_DIMENSIONS: Final = 4  # of a batch: (batch, channels, height, width)
_MOST_SHARDS: Final = 64  # one for each lane of a run, as `_MOST_LANES` of data/streams.py


def build(
    path: str,
    *,
    eval_path: str | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    streaming: bool = False,
) -> Splits:
    """Build the parts of `config.data.HuggingFace`; the arguments are its keys.

    Raises:
        ConfigError: kinds ``package-missing``, ``dataset-not-found``, ``dataset-not-read``,
            ``dataset-columns``.
    """
    train = _read(path, "data.path", ("train",), streaming=streaming)
    names = ["validation", "test"]
    if eval_path:
        names.append("train")  # of files
    evaluation = _read(eval_path or path, "data.eval_path", names, streaming=streaming)
    if train is not None:
        train = _with_columns(train, columns, streaming)
    if evaluation is not None:
        evaluation = _with_columns(evaluation, columns, streaming)
    return Splits(train, evaluation)


def build_inputs(
    path: str,
    *,
    columns: Sequence[str] | Mapping[str, str] | None,
    labels: str | None = None,
    key: str = "INPUT",
) -> tuple[Any, bool | None]:
    """Build a dataset of rows for a trained model, which may lack the targets.

    Args:
        path: as the key `path` of the data.
        columns: of the run.
        labels: key of the targets in batches, if it is known.
        key: of the problems.

    Returns:
        The dataset, and whether it has targets; None where that shows in its batches.

    Raises:
        ConfigError: as `build`.
    """
    rows = _read(path, key, ("test", "validation", "train"), streaming=False)
    known = rows.column_names
    if isinstance(columns, Mapping):
        targets = [name for name, new in columns.items() if new in (labels, *_TARGETS)]
        left = {name: new for name, new in columns.items() if name in known or name not in targets}
        return _with_columns(rows, left, streaming=False), None
    if columns is None:
        return _with_columns(rows, None, streaming=False), None
    has_targets = columns[-1] in known
    left_columns = columns if has_targets else columns[:-1]
    return _with_columns(rows, left_columns, streaming=False), has_targets


def _read(place: str, key: str, splits: Sequence[str], *, streaming: bool) -> Any:
    """Return the first of these splits at a path, or None; files are a split ``train``."""
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", what="data.kind: huggingface", extra="data") from error
    try:
        names = {file.name for file in Path(place).glob("*.json")}
        if "dataset_dict.json" in names or "state.json" in names:
            rows = datasets.load_from_disk(place)
        else:
            files = _files(place, key)
            reader = _READERS[Path(files[0]).suffix]
            rows = datasets.load_dataset(
                reader, data_files=files, split="train", streaming=streaming
            )
        if not isinstance(rows, dict):
            return rows if "train" in splits else None
        for name in splits:
            if name in rows:
                return rows[name]
        if "train" in splits:
            return rows["train"]  # raises KeyError, which is explained
        return None
    except ConfigError:
        raise
    except Exception as error:
        reason = f"datasets cannot read it: {type(error).__name__}: {error}"
        fix = f"name a folder of save_to_disk with a split train, or {', '.join(_READERS)} files"
        raise ConfigError.of("dataset-not-read", reason, fix, key, place) from error


def _files(pattern: str, key: str) -> list[str]:
    """List the files of a pattern, in order; a range ``{000..009}`` stands for all its numbers.

    Raises:
        ConfigError: kind ``dataset-not-found``: there is none; it names `key`.
    """
    range_match = _RANGE.search(pattern)
    if range_match:
        first, last = range_match.groups()
        files = []
        for number in range(int(first), int(last) + 1):
            text = f"{number:0{len(first)}}"
            files += _files(_RANGE.sub(text, pattern, count=1), key)
        return files
    # Path.glob takes no absolute pattern.
    names = sorted(glob(str(Path(pattern).expanduser())))  # noqa: PTH207
    if not names:
        raise ConfigError.of(
            "dataset-not-found", "there is no such file", "check the path", key, pattern
        )
    return names


def _with_columns(
    rows: Any, columns: Sequence[str] | Mapping[str, str] | None, streaming: bool
) -> Any:
    """Return a dataset of the rows with the chosen columns, or with all if there are none chosen: a
    stream if `streaming`, else samples by number.

    With a list of columns, batches are tuples in its order; otherwise dicts, with the new names of
    a mapping (old -> new).

    Raises:
        ConfigError: kind ``dataset-columns``: there is no such column.
    """
    requested = list(columns or ())
    missing = set(requested) - set(rows.column_names or requested)
    if missing:
        reason = f"there is no column {min(missing)}"
        fix = f"there are {', '.join(rows.column_names)}"
        raise ConfigError.of("dataset-columns", reason, fix, "data.columns", requested)
    if requested:
        rows = rows.select_columns(requested)
    if isinstance(columns, Mapping):
        rows = rows.rename_columns({old: new for old, new in columns.items() if old != new})
    if streaming and hasattr(rows, "to_iterable_dataset"):
        rows = rows.to_iterable_dataset(num_shards=min(len(rows), _MOST_SHARDS))
    rows = as_tensors(rows)
    names = None if isinstance(columns, Mapping) else columns
    collate_fn = partial(_collate, names=names)
    if streaming:
        return TakenStream(rows, collate_fn)
    return TakenSet(rows, collate_fn, None)


def _collate(rows: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None) -> Any:
    """Collate rows to a dict of columns, or to a tuple of the columns `names`; images, bytes of
    (batch, channels, height, width), become numbers in [0, 1].
    """
    batch = {}
    for name, value in collate(rows).items():
        if getattr(value, "dtype", None) == torch.uint8 and value.ndim == _IMAGE_DIMENSIONS:
            batch[name] = value / 255
        else:
            batch[name] = value
    if names is None:
        return batch
    return tuple(batch[name] for name in names)
