"""``predict CHECKPOINT INPUT... --out FILE``: the outputs of a trained model for images, rows of
numbers or lines of text.

FILE gets a line of JSON for each input, in order; a command that was interrupted continues behind
the lines that FILE has. Each of n ranks takes every n-th batch, and rank 0 writes.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mimetypes import guess_type
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from framework.checkpoint.manifest import SavedCheckpoint
from framework.commands.generate import add_sampling, sample, terms_of, tokenizer_of, tokens_of
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, Classification
from framework.data.token_files import KEPT_TOKENIZER
from framework.data.tokenizer import Tokenizer
from framework.engine.distributed import from_rank0, gather, process_group, rank
from framework.errors import (
    EXIT_OK,
    ConfigError,
    FrameworkError,
    StorageError,
    TrainingError,
    in_one_line,
)
from framework.recipes.image_sets.kinds import ImageFolder
from framework.recipes.text.chat import Answers, open_tokenizer
from framework.recipes.text.kinds import LabelledText
from framework.recipes.text.labelled_text import inputs_of
from framework.setup.components import load_task
from framework.setup.trained import find_source, module_to_ask, saved_config
from framework.system.arguments import CommandParser, whole
from framework.system.files import open_own
from framework.tasks.task import as_task

_LONGEST_ROW: Final = 64 << 20
_SHORTEST_BEGIN: Final = len('{"input": "')


def main(words: Sequence[str]) -> int:
    """Predict this rank's batches, and on rank 0 write the rows of all; returns the exit code.
    Collective.
    """
    arguments = _parse(words)
    checkpoint = find_source(arguments.checkpoint)
    out = Path(arguments.out)
    size = arguments.batch_size
    config = saved_config(checkpoint, "model", "task", trust=arguments.trust)
    inputs = find_inputs(arguments.inputs, config)
    names = list(inputs)
    label = f"{config.run.name}/{checkpoint.tag} {arguments.weights}"
    with process_group(config.run.backend):
        rows_or_error = None
        if rank() == 0:
            rows_or_error = _attempt(str(out), lambda: find_rows(out, names, label))
        rows = from_rank0(rows_or_error)
        start = rows.count
        model = module_to_ask(checkpoint, config, average=arguments.weights == "ema")
        predict = _make_predict(arguments, checkpoint, config, model)
        for first in range(start, len(names), size * len(gather(0))):
            place = first + rank() * size
            batch = {name: inputs[name] for name in names[place : place + size]}
            predictions = []
            if batch:
                about = f"{next(iter(batch))} and its batch"
                predictions = _attempt(about, partial(predict, place, batch))
            of_all_ranks = gather(predictions)
            error = None
            if rank() == 0:
                error = _attempt(str(out), partial(rows.append, names[first:], of_all_ranks))
            from_rank0(error)
        if rank() == 0:
            print(f"{out}: {len(names)} rows, {len(names) - start} of them new")
    return EXIT_OK


def _make_predict(
    arguments: argparse.Namespace,
    checkpoint: SavedCheckpoint,
    config: RunConfig,
    model: torch.nn.Module,
) -> Callable[[int, Mapping[str, Any]], list[dict[str, Any]]]:
    """Return the function from the place of a batch among the inputs, and the batch by name, to the
    batch's rows.
    """
    if isinstance(config.task, CausalLM):
        tokenizer = tokenizer_of(config, checkpoint, option=arguments.tokenizer)
        return partial(_texts, model, tokenizer, terms_of(arguments, config, tokenizer))
    text_tokenizer = None
    if isinstance(config.data, LabelledText):
        kept = checkpoint.folder.absolute().parent / KEPT_TOKENIZER
        text_tokenizer = open_tokenizer(str(kept))
    return partial(_outputs, model, config, text_tokenizer)


def _attempt(place: str, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or its exception as a FrameworkError, which the other ranks have
    to get instead of waiting. `place` begins the message of other exceptions.
    """
    try:
        return work()
    except FrameworkError as error:
        return error
    except OSError as error:
        return StorageError(f"{place}: {error} [predictions-not-written]")
    except Exception as error:
        return TrainingError(f"{place}: {in_one_line(error, longest=300)} [prediction-failed]")


def find_inputs(paths: Sequence[str], config: RunConfig) -> dict[str, Any]:
    """Return ``path:number`` -> sample, numbered from 1; of images path -> path.

    Samples are lines of text for a causal language model, rows of ``.csv``, float32, or rows of all
    arrays of ``.npz``.

    Raises:
        ConfigError: one cannot be read; kind ``input-not-read``.
    """
    samples: dict[str, Any] = {}
    for path in map(Path, paths):
        try:
            for file in _files_of(path):
                samples |= _samples(file, config)
        except Exception as error:  # a damaged archive fails in a dozen ways
            reason = in_one_line(error, longest=200)
            raise ConfigError.of(
                "input-not-read", reason, "name another file", "INPUT", str(path)
            ) from error
    return samples


def _files_of(path: Path) -> list[Path]:
    """Return a file, or the images of a folder."""
    if path.is_dir():
        return sorted(filter(_is_image, path.rglob("*")))
    return [path]


def _is_image(file: Path) -> bool:
    media_type = guess_type(file.name)[0]
    return media_type is not None and media_type.startswith("image/")


def _samples(file: Path, config: RunConfig) -> dict[str, Any]:
    """Return ``path:number`` -> sample of one file, by the task and the data of the run; of an
    image its path alone.
    """
    if isinstance(config.task, CausalLM):
        rows: Any = file.read_bytes().splitlines()
    elif isinstance(config.data, LabelledText):
        rows = file.read_text(encoding="utf-8").splitlines()
    elif file.suffix in (".csv", ".npz"):
        rows = _read_table(file)
    elif isinstance(config.data, ImageFolder):
        return {str(file): file}
    else:
        raise ValueError(
            "it is no table of numbers, and how an image is read only data.kind: image_folder says"
        )
    return {f"{file}:{number}": row for number, row in enumerate(rows, start=1)}


def _read_table(file: Path) -> Any:
    """Return the rows of a table of numbers."""
    if file.suffix == ".csv":
        return np.loadtxt(file, np.float32, delimiter=",", ndmin=2)
    arrays = dict(np.load(file))
    if len(arrays) > 1:
        return _rows_of(arrays)
    return arrays.popitem()[1]


def _rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn name -> column into a list of name -> value; the columns have one length."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def read_sample(sample: Any, config: RunConfig) -> Any:
    """Read an image from its path, as the evaluation of the run reads it; other samples pass."""
    if not isinstance(sample, Path):
        return sample
    from framework.recipes.image_sets.image_folder import (  # which import torchvision
        read_image,
        transform,
    )

    assert isinstance(config.data, ImageFolder)
    to_tensor = transform(config.data.image_size, augment=False)
    return to_tensor(read_image(str(sample)))


@dataclass
class Rows:
    """A file of predictions: number and bytes of its complete rows. Further bytes are a row that
    was cut off.
    """

    file: Path
    label: str
    count: int = 0
    num_bytes: int = 0

    def append(self, names: Sequence[str], of_all_ranks: Sequence[Any]) -> None:
        """Write the rows of all ranks, up to the first error, and raise that. If the disk takes
        only a part of them, they are cut off again.

        Args:
            names: of the inputs, in the order of ranks.
            of_all_ranks: rows of each rank, or its error.

        Raises:
            FrameworkError: the first error of a rank.
            OSError: the rows cannot be written.
        """
        input_names = iter(names)
        lines = []
        failure = None
        for predictions in of_all_ranks:
            if isinstance(predictions, FrameworkError):
                failure = predictions
                break
            for row in predictions:
                row = {"input": next(input_names), "checkpoint": self.label, **row}
                lines.append(json.dumps(row))
        if lines:
            self._write("".join(f"{line}\n" for line in lines).encode())
        if failure is not None:
            raise failure

    def _write(self, text: bytes) -> None:
        """Write text behind the complete rows; on an OSError the file gets its earlier length."""
        if os.path.lexists(self.file):
            mode = "r+b"
        else:
            mode = "ab"
        with open_own(self.file, mode) as file:
            try:
                file.truncate(self.num_bytes)
                file.seek(self.num_bytes)
                file.write(text)
                file.flush()
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), self.num_bytes)
                raise
        self.num_bytes += len(text)


def find_rows(out: Path, names: Sequence[str], label: str) -> Rows:
    """Read the rows that `out` has, without changing it.

    Raises:
        ConfigError: it is no file, or has other contents than rows of these inputs by this
            checkpoint.
        OSError: it cannot be read, or its folder cannot be written to.
    """
    rows = Rows(out, label)
    if not os.path.lexists(out):
        if not os.access(out.parent, os.W_OK):
            raise OSError(errno.EACCES, f"{out.parent} is no folder that can be written to")
        return rows
    try:
        with open_own(out, "r+b") as file:
            _count_rows(file, rows, names)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a link or no regular file, through which nothing is written"
            raise _refused_file(out, reason) from None
        raise
    return rows


def _count_rows(file: IO[bytes], rows: Rows, names: Sequence[str]) -> None:
    """Count the complete rows of a file into `rows`. ConfigError at one that is not of the inputs,
    in their order.
    """
    while line := file.readline(_LONGEST_ROW):
        if rows.count == len(names) or not _is_row(
            line, names[rows.count], rows.label, is_first=not rows.count
        ):
            reason = f"it holds something else than these inputs by {rows.label}"
            raise _refused_file(rows.file, reason)
        if line.endswith(b"\n"):
            rows.count += 1
            rows.num_bytes += len(line)


def _is_row(line: bytes, name: str, label: str, *, is_first: bool) -> bool:
    """Check that a line is the row of an input, or the begin of one that was cut off."""
    if line.endswith(b"\n"):
        try:
            row = json.loads(line)
            return bool(row["input"] == name and row["checkpoint"] == label)
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
    begin = json.dumps({"input": name, "checkpoint": label})[:-1].encode()
    if line.startswith(begin):
        return True
    # A file that has nothing but a brace may be of any program.
    return begin.startswith(line) and not (is_first and len(line) < _SHORTEST_BEGIN)


def _refused_file(out: Path, reason: str) -> ConfigError:
    return ConfigError.of("predictions-of-others", reason, "name another file", "--out", str(out))


@torch.inference_mode()
def _outputs(
    model: torch.nn.Module, config: RunConfig, tokenizer: Any, place: int, inputs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a row for each input: class and probabilities, or the outputs of another task."""
    batch = _on_device_of(
        next(model.parameters()), _batch_of(list(inputs.values()), config, tokenizer)
    )
    outputs = as_task(load_task(config)).forward(model, batch)
    outputs = getattr(outputs, "logits", outputs)
    if isinstance(config.task, Classification):
        class_names = getattr(tokenizer, "init_kwargs", {}).get("classes")
        return _rows_of_classes(outputs.float().softmax(1).tolist(), class_names)
    if not isinstance(outputs, Mapping):
        outputs = {"output": outputs}
    return _rows_of({name: value.float().tolist() for name, value in outputs.items()})


def _batch_of(samples: list[Any], config: RunConfig, tokenizer: Any) -> Any:
    """Return the model's inputs for some samples: text with a tokenizer, or tensors and images."""
    if tokenizer is None:
        return default_collate([read_sample(sample, config) for sample in samples])
    assert isinstance(config.data, LabelledText)
    return inputs_of(samples, tokenizer, config.data.sequence_length)


def _on_device_of(weight: Tensor, batch: Any) -> Any:
    """Return a batch on the device of a weight, floating-point numbers in its type."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(weight.device, weight.dtype)
        return tensor.to(weight.device)

    return tree_map_only(Tensor, move, batch)


def _rows_of_classes(
    probabilities: Sequence[list[float]], class_names: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Return a row for each sample: the likeliest class, its name if there are names, and all
    probabilities.
    """
    rows = []
    for of_sample in probabilities:
        number = of_sample.index(max(of_sample))
        row: dict[str, Any] = {"class": number, "probabilities": of_sample}
        if class_names:
            row["name"] = class_names[number]
        rows.append(row)
    return rows


def _texts(
    model: torch.nn.Module,
    tokenizer: Tokenizer | Answers,
    terms: Mapping[str, Any],
    place: int,
    inputs: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return a row for each line of text: the text that the model writes after it."""
    prompts = [tokens_of(line, tokenizer, name) for name, line in inputs.items()]
    seed = terms["seed"] + place  # an input has one seed, however the inputs are batched
    generated: list[list[int]] = [[] for _ in prompts]
    for step in sample(model, prompts, **{**terms, "seed": seed}):
        for tokens, token in zip(generated, step, strict=True):
            if token is not None:
                tokens.append(token)
    return [{"generated": tokenizer.decode(tokens)} for tokens in generated]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Write what a trained model makes of inputs."
    parser = CommandParser(
        prog="python -m framework predict", allow_abbrev=False, description=about
    )
    option = parser.add_argument
    option(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder (its newest checkpoint) or .../global_step<N>",
    )
    about = "images or folders of them; .csv, .npz: rows of numbers; of models of text lines"
    option("inputs", nargs="+", metavar="INPUT", help=about)
    option("--out", required=True, metavar="FILE", help="JSON lines; those that it has are kept")
    count = whole(1, 10**9, "'{}' is not a number from 1 to 999999999")
    parser.option(
        "--batch_size", type=count, default=32, metavar="N", help="inputs per forward pass (32)"
    )
    option(
        "--trust",
        metavar="FOLDER",
        help="the run folder or checkpoint whose targets may be imported and called",
    )
    add_sampling(parser)
    return parser.parse_intermixed_args(list(words))
