"""``predict CHECKPOINT INPUT... --out FILE``: what a trained model makes of images, rows of numbers
or lines of text.

FILE gets a line of JSON for each input, in order; a command that was broken off goes on behind
those that it has. On several ranks each takes every n-th batch, and rank 0 writes.
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
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from framework.commands.generate import add_sampling, sample, terms_of, tokenizer_of, tokens_of
from framework.config.data import ImageFolder, LabelledText
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, Classification
from framework.data.chat import Answers, open_tokenizer
from framework.data.labelled_text import inputs_of
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
from framework.setup.components import load_task
from framework.setup.trained import find_source, module_to_ask, saved_config
from framework.system.arguments import CommandParser, whole
from framework.system.files import open_own
from framework.tasks.task import as_task

_LONGEST_ROW: Final = 64 << 20
_SHORTEST_BEGIN: Final = len('{"input": "')


def main(words: Sequence[str]) -> int:
    """Run the command on this rank; returns the exit code."""
    arguments = _parse(words)
    checkpoint = find_source(arguments.checkpoint)
    out = Path(arguments.out)
    size = arguments.batch_size
    config = saved_config(checkpoint, "model", "task", trust=arguments.trust)
    inputs = find_inputs(arguments.inputs, config)
    names = list(inputs)
    label = f"{config.run.name}/{checkpoint.tag} {arguments.weights}"
    with process_group(config.run.backend):
        if rank() == 0:
            found = _attempt(str(out), find_rows, out, names, label)
        else:
            found = None
        rows = from_rank0(found)
        start = rows.count
        model = module_to_ask(checkpoint, config, average=arguments.weights == "ema")
        kept = checkpoint.folder.absolute().parent / KEPT_TOKENIZER
        if isinstance(config.data, LabelledText):
            reads = open_tokenizer(str(kept))
        else:
            reads = None
        ask = partial(_outputs, model, config, reads)
        if isinstance(config.task, CausalLM):
            tokenizer = tokenizer_of(config, checkpoint, asked=arguments.tokenizer)
            ask = partial(_texts, model, tokenizer, terms_of(arguments, config, tokenizer))
        for first in range(start, len(names), size * len(gather(0))):
            place = first + rank() * size
            own = {name: inputs[name] for name in names[place : place + size]}
            parts = gather(
                _attempt(f"{next(iter(own))} and its batch", ask, place, own) if own else []
            )
            written = None
            if rank() == 0:
                written = _attempt(str(out), rows.append, names[first:], parts)
            from_rank0(written)
        if rank() == 0:
            print(f"{out}: {len(names)} rows, {len(names) - start} of them new")
    return EXIT_OK


def _attempt(place: str, work: Callable[..., Any], *args: Any) -> Any:
    """The result, or the error, which the other ranks have to know."""
    try:
        return work(*args)
    except FrameworkError as error:
        return error
    except OSError as error:
        return StorageError(f"{place}: {error} [predictions-not-written]")
    except Exception as error:
        return TrainingError(f"{place}: {in_one_line(error, longest=300)} [prediction-failed]")


def find_inputs(paths: Sequence[str], config: RunConfig) -> dict[str, Any]:
    """Samples by ``path:number``, from 1: lines of text for a causal language model, rows of
    ``.csv``, float32, or of all arrays of ``.npz``; and images, as paths. A ConfigError of kind
    ``input-not-read`` where that fails.
    """
    found: dict[str, Any] = {}
    for path in map(Path, paths):
        inside = (
            file
            for file in path.rglob("*")
            if (guess_type(file.name)[0] or "").startswith("image/")
        )
        try:
            for file in sorted(inside) if path.is_dir() else [path]:
                found |= _samples(file, config)
        except Exception as error:  # a damaged archive fails in a dozen ways
            reason = in_one_line(error, longest=200)
            raise ConfigError.of(
                "input-not-read", reason, "name another file", "INPUT", str(path)
            ) from error
    return found


def _samples(file: Path, config: RunConfig) -> dict[str, Any]:
    rows: Any
    if isinstance(config.task, CausalLM):
        rows = file.read_bytes().splitlines()
    elif isinstance(config.data, LabelledText):
        rows = file.read_text(encoding="utf-8").splitlines()
    elif file.suffix == ".csv":
        rows = np.loadtxt(file, np.float32, delimiter=",", ndmin=2)
    elif file.suffix == ".npz":
        arrays = dict(np.load(file))
        rows = [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
        if len(arrays) > 1:
            rows = rows
        else:
            rows = arrays.popitem()[1]
    elif isinstance(config.data, ImageFolder):
        return {str(file): file}
    else:
        raise ValueError(
            "it is no table of numbers, and how an image is read only data.kind: image_folder says"
        )
    return {f"{file}:{number}": row for number, row in enumerate(rows, start=1)}


def read_sample(sample: Any, config: RunConfig) -> Any:
    """Read what is the path of an image as the evaluation of the run reads it."""
    if not isinstance(sample, Path):
        return sample
    from framework.data.image_sets import read_image, transform  # which take torchvision

    return transform(config.data.image_size, augment=False)(read_image(str(sample)))  # type: ignore[union-attr]


@dataclass
class Rows:
    """A file of predictions: the rows that it has, and their bytes; what is behind them was cut
    off.
    """

    file: Path
    label: str
    count: int = 0
    num_bytes: int = 0

    def append(self, names: Sequence[str], parts: Sequence[Any]) -> None:
        """Write the rows of all ranks, up to the first error, and raise that; a disk that takes
        only a part of them leaves whole rows.
        """
        left = iter(names)
        lines = []
        failure = None
        for part in parts:
            if isinstance(part, FrameworkError):
                failure = part
                break
            for row in part:
                lines.append(json.dumps({"input": next(left), "checkpoint": self.label, **row}))
        if lines:
            self._write("".join(f"{line}\n" for line in lines).encode())
        if failure is not None:
            raise failure

    def _write(self, text: bytes) -> None:
        is_new = not os.path.lexists(self.file)
        with open_own(self.file, "ab" if is_new else "r+b") as file:
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
    """Read the rows that `out` has, and leave it as it is.

    Raises:
        ConfigError: it is no file, or has something else than rows of these inputs by this
            checkpoint.
    """
    rows = Rows(out, label)
    if not os.path.lexists(out):
        if not os.access(out.parent, os.W_OK):
            raise OSError(errno.EACCES, f"{out.parent} is no folder that can be written to")
        return rows
    try:
        with open_own(out, "r+b") as file:
            while line := file.readline(_LONGEST_ROW):
                if rows.count < len(names):
                    name = names[rows.count]
                else:
                    name = None
                if not _is_row(line, name, label, is_first=not rows.count):
                    raise _of_others(out, f"it holds something else than these inputs by {label}")
                if line.endswith(b"\n"):
                    rows.count += 1
                    rows.num_bytes += len(line)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a link or no regular file, through which nothing is written"
            raise _of_others(out, reason) from None
        raise
    return rows


def _is_row(line: bytes, name: str | None, label: str, *, is_first: bool) -> bool:
    """Check whether a line is the row of an input, or how such a row begins where the line was cut
    off.
    """
    if name is None:
        return False
    if line.endswith(b"\n"):
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            row = json.loads(line)
            return bool((row["input"], row["checkpoint"]) == (name, label))
        return False
    begin = json.dumps({"input": name, "checkpoint": label})[:-1].encode()
    if line.startswith(begin):
        return True
    # A file that has nothing but a brace may be anybody's.
    return begin.startswith(line) and not (is_first and len(line) < _SHORTEST_BEGIN)


def _of_others(out: Path, reason: str) -> ConfigError:
    return ConfigError.of("predictions-of-others", reason, "name another file", "--out", str(out))


@torch.inference_mode()
def _outputs(
    model: torch.nn.Module, config: RunConfig, tokenizer: Any, place: int, inputs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Classes and their probabilities; otherwise the outputs as they are."""
    like = next(model.parameters())
    names = getattr(tokenizer, "init_kwargs", {}).get("classes")
    if tokenizer is None:
        batch = default_collate([read_sample(one, config) for one in inputs.values()])
    else:
        batch = inputs_of(list(inputs.values()), tokenizer, config.data.sequence_length)  # type: ignore[union-attr]
    batch = tree_map_only(
        Tensor,
        lambda one: one.to(like.device, like.dtype if one.is_floating_point() else None),
        batch,
    )
    outputs = as_task(load_task(config)).forward(model, batch)
    outputs = getattr(outputs, "logits", outputs)
    if isinstance(config.task, Classification):
        rows = [
            {"class": row.index(max(row)), "probabilities": row}
            for row in outputs.float().softmax(1).tolist()
        ]
        if names:
            return [{**row, "name": names[row["class"]]} for row in rows]
        return rows
    if isinstance(outputs, Mapping):
        named = outputs
    else:
        named = {"output": outputs}
    columns = {name: value.float().tolist() for name, value in named.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _texts(
    model: torch.nn.Module,
    tokenizer: Tokenizer | Answers,
    terms: Mapping[str, Any],
    place: int,
    inputs: Mapping[str, Any],
) -> list[dict[str, Any]]:
    prompts = [tokens_of(line, tokenizer, name) for name, line in inputs.items()]
    drawn = zip(*sample(model, prompts, **{**terms, "seed": terms["seed"] + place}), strict=True)
    columns = list(drawn) or [()] * len(prompts)
    return [
        {"generated": tokenizer.decode([one for one in column if one is not None])}
        for column in columns
    ]


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
