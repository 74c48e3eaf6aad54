"""INPUT of ``predict``: files, or samples from Python, read by the `data` section of the run."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mimetypes import guess_type
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch.utils.data import default_collate

from framework.config.data import HuggingFace, Mixture
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, ModelLoss
from framework.errors import ConfigError, in_one_line
from framework.recipes.image_sets.kinds import ImageFolder
from framework.recipes.text.chat import Message
from framework.recipes.text.conversations import messages_of
from framework.recipes.text.kinds import Conversations, LabelledText
from framework.recipes.text.rows import read_rows
from framework.tasks.task import Task, targets_in

_LINES: Final = "give --lines (in Python lines=True) if every line is a sample as it stands"
_NO_LINES: Final = "leave --lines out (in Python lines=False)"
_PROMPTS: Final = ("prompt", "text")
_TABLES: Final = (".csv", ".npz")
_JSON_LINES: Final = (".jsonl", ".ndjson")
_OTHER_ROWS: Final = (".json", ".parquet", ".tsv", ".arrow")


@dataclass(frozen=True)
class Chat:
    """Messages to be answered, and the tools that the answer may call."""

    messages: Sequence[Message]
    tools: Any = None


@dataclass(frozen=True)
class RowOf:
    """A row of a dataset, which is read when its batch is due.

    Attributes:
        has_targets: whether the row has the targets of training, which the model does not read.
    """

    dataset: Any
    index: int
    has_targets: bool | None = None


class _RefusedError(ValueError):
    """A file that cannot be meant so, with what to do instead."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def find_inputs(paths: Sequence[str], config: RunConfig, *, lines: bool = False) -> dict[str, Any]:
    """Return ``path:number`` -> sample, numbered by line or row from 1; of images path -> path.

    Args:
        paths: files, and folders of images.
        config: of the run; its `data` decides how a file is read.
        lines: every line of a file is a text as it stands.

    Raises:
        ConfigError: one cannot be read, or cannot be meant; kind ``input-not-read``.
    """
    samples: dict[str, Any] = {}
    for path in map(Path, paths):
        try:
            for file in _files_of(path, config):
                samples |= _samples_in(file, config, lines=lines)
        except ConfigError:
            raise
        except _RefusedError as error:
            raise ConfigError.of(
                "input-not-read", str(error), error.fix, "INPUT", str(path)
            ) from error
        except Exception as error:  # a damaged archive fails in a dozen ways
            reason = in_one_line(error, longest=200)
            fix = "name another file"
            raise ConfigError.of("input-not-read", reason, fix, "INPUT", str(path)) from error
    return samples


def inputs_in_memory(data: Any, config: RunConfig) -> dict[str, Any]:
    """Return number, from 1 -> sample of samples that were handed over from Python.

    Args:
        data: rows as the files of the run hold them, texts, or a dataset as `fit` takes it.
        config: of the run.

    Raises:
        ConfigError: a row lacks what the run reads; kind ``input-not-read``.
    """
    make = _row_reader(config)
    samples: dict[str, Any] = {}
    for number in range(len(data)):
        sample: Any = RowOf(data, number)
        if make is not None:
            sample = data[number]
        try:
            if isinstance(sample, Mapping) and make is not None:
                sample = make(sample)
            elif isinstance(sample, list) and isinstance(config.data, Conversations):
                sample = Chat(sample)
        except ValueError as error:
            fix = "hand over rows as data.path holds them, or texts"
            key = f"sample {number + 1}"
            raise ConfigError.of("input-not-read", str(error), fix, key) from error
        samples[str(number + 1)] = sample
    return samples


def _data_of(config: RunConfig) -> Any:
    """Return the section by which a sample is read: of a mixture the first part's, as for
    evaluation.
    """
    if isinstance(config.data, Mixture):
        return config.data.parts[0].data
    return config.data


def _row_reader(config: RunConfig) -> Callable[[Mapping[str, Any]], Any] | None:
    """Return the function from a row of text to its sample; None for a run that reads no rows of
    text. The function raises ValueError for a row that lacks it.
    """
    data = _data_of(config)
    if isinstance(data, LabelledText):
        return lambda row: _text_in(row, (data.text,))
    if isinstance(data, Conversations):
        return _chat_in
    if isinstance(config.task, CausalLM):
        return lambda row: _text_in(row, _PROMPTS)
    return None


def _files_of(path: Path, config: RunConfig) -> list[Path]:
    """Return a file, or the images of a folder; what `datasets` reads is left as it is."""
    if isinstance(_data_of(config), HuggingFace):
        return [path]
    if not path.exists():
        raise _RefusedError("there is no such file or folder", "check the path")
    if path.is_dir():
        return sorted(filter(_is_image, path.rglob("*")))
    return [path]


def _is_image(file: Path) -> bool:
    media_type = guess_type(file.name)[0]
    return media_type is not None and media_type.startswith("image/")


def _samples_in(file: Path, config: RunConfig, *, lines: bool) -> dict[str, Any]:
    """Return name -> sample of one file, by the data and the task of the run."""
    data = _data_of(config)
    make = _row_reader(config)
    if make is not None:
        if lines or _is_plain_text(file, data):
            rows = _lines_of(file, make, lines=lines)
        else:
            rows = _rows_of_text(file, make)
        return dict(rows)
    if lines:
        raise _RefusedError("this run does not read texts", _NO_LINES)
    if isinstance(data, HuggingFace):
        return dict(_rows_by_datasets(file, data, config))
    if isinstance(data, ImageFolder) and file.suffix == ".csv":
        raise _RefusedError("a row of numbers is no image", "name images, or arrays in an .npz")
    if isinstance(data, ImageFolder) and file.suffix != ".npz":
        return {str(file): file}
    return _rows_of_table(file)


def _rows_of_table(file: Path) -> dict[str, Any]:
    """Return name -> row of a file with a table of numbers."""
    if file.suffix not in _TABLES:
        raise ValueError(
            "it is no table of numbers, and how an image is read only data.kind: image_folder says"
        )
    return {f"{file}:{number}": row for number, row in enumerate(_read_table(file), start=1)}


def _is_plain_text(file: Path, data: Any) -> bool:
    """Check whether a file holds prompts by the line without being asked: the run has read windows
    of text, which no file holds as rows, and its name is of no file of rows.
    """
    if isinstance(data, LabelledText | Conversations):
        return False
    return file.suffix not in (".csv", *_JSON_LINES, *_OTHER_ROWS)


def _lines_of(
    file: Path, make: Callable[[Mapping[str, Any]], Any], *, lines: bool
) -> Iterator[tuple[str, bytes | str]]:
    """Yield the lines of a file with their names.

    Raises:
        _RefusedError: a line is a row that the run would read otherwise.
    """
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            line = line.rstrip(b"\r\n")
            if _is_row(line, make) or (number == 1 and _is_header(file, line, make)):
                reason = f"line {number} is a row as the run's own data has them, and no text"
                fix = _NO_LINES if lines else f"name the file .jsonl, or {_LINES}"
                raise _RefusedError(reason, fix)
            yield f"{file}:{number}", line


def _is_row(line: bytes, make: Callable[[Mapping[str, Any]], Any]) -> bool:
    """Check whether a line is a JSON object that the run reads as a row."""
    if not line.lstrip().startswith(b"{"):
        return False
    with suppress(ValueError, RecursionError):
        make(json.loads(line))
        return True
    return False


def _is_header(file: Path, line: bytes, make: Callable[[Mapping[str, Any]], Any]) -> bool:
    """Check whether the first line of a ``.csv`` names the column that the run reads."""
    if file.suffix != ".csv":
        return False
    with suppress(ValueError, csv.Error):
        make(dict.fromkeys(next(csv.reader([line.decode()]), []), "text"))
        return True
    return False


def _rows_of_text(
    file: Path, make: Callable[[Mapping[str, Any]], Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the samples of a file of rows, ``.csv`` or JSON lines, with their names."""
    if file.suffix in _OTHER_ROWS:
        reason = f"the data of the run is not read from {file.suffix} files"
        raise _RefusedError(reason, "name a .jsonl or a .csv file")
    try:
        for place, row in read_rows(file):
            try:
                yield place, make(row)
            except ValueError as error:
                raise _RefusedError(
                    f"{place}: {error}", f"name another file, or {_LINES}"
                ) from error
    except UnicodeDecodeError:
        raise
    except _RefusedError:
        raise
    except ValueError as error:  # a line that is no JSON object
        raise _RefusedError(str(error), _LINES) from error


def _text_in(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    """Return the text of a row, from the first of the columns that it has."""
    for column in columns:
        if isinstance(row.get(column), str):
            text: str = row[column]
            return text
    known = ", ".join(map(str, row))
    raise ValueError(f"it has no text {' or '.join(map(repr, columns))}; it has {known}")


def _chat_in(row: Mapping[str, Any]) -> Chat:
    """Return the messages of a row up to the last answer of the assistant, which is to be given."""
    if "prompt" in row and "completion" not in row:
        row = {**row, "completion": ""}
    messages = list(messages_of(row))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("it has no message to answer")
    return Chat(messages, row.get("tools"))


def _rows_by_datasets(
    path: Path, data: HuggingFace, config: RunConfig
) -> Iterator[tuple[str, RowOf]]:
    """Yield the rows that Hugging Face's ``datasets`` reads; the targets may be missing in them."""
    from framework.data.hugging_face import build_inputs

    dataset, has_targets = build_inputs(str(path), columns=data.columns, labels=_labels(config))
    for index in range(len(dataset)):
        yield f"{path}:{index + 1}", RowOf(dataset, index, has_targets)


def _labels(config: RunConfig) -> str | None:
    """Return the key of the labels in batches, if the task names it."""
    if isinstance(config.task, ModelLoss):
        return config.task.labels
    return None


def _read_table(file: Path) -> Any:
    """Return the rows of a table of numbers."""
    if file.suffix == ".csv":
        try:
            return np.loadtxt(file, np.float32, delimiter=",", ndmin=2)
        except ValueError as error:
            fix = "write numbers alone; a line that begins with # is left out"
            raise _RefusedError(str(error).rstrip("."), fix) from error
    arrays = dict(np.load(file))
    if len(arrays) > 1:
        return rows_of(arrays)
    return arrays.popitem()[1]


def rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn name -> column into a list of name -> value; the columns have one length."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def batch_of(samples: Sequence[Any], config: RunConfig, task: Task) -> Any:
    """Return the model's inputs for some samples, without targets."""
    first = samples[0]
    if not isinstance(first, RowOf):
        return default_collate([read_sample(sample, config) for sample in samples])
    collate = getattr(first.dataset, "collate_fn", None) or default_collate
    batch = collate([row.dataset[row.index] for row in samples])
    label = _labels(config)
    if label is not None and isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != label}
    return _without_targets(batch, task, has_targets=first.has_targets)


def _without_targets(batch: Any, task: Task, *, has_targets: bool | None) -> Any:
    """Return the inputs of a batch; None: its form shows whether it has targets."""
    if has_targets is None:
        has_targets = targets_in(batch)
    if has_targets:
        return task.split(batch)[0]
    if isinstance(batch, list | tuple):
        return tuple(batch)
    return batch


def read_sample(sample: Any, config: RunConfig) -> Any:
    """Read an image from its path, as the evaluation of the run reads it; other samples pass."""
    if not isinstance(sample, Path):
        return sample
    from framework.recipes.image_sets.image_folder import (  # which import torchvision
        read_image,
        transform,
    )

    data = _data_of(config)
    assert isinstance(data, ImageFolder)
    to_tensor = transform(data.image_size, augment=False)
    return to_tensor(read_image(str(sample)))
