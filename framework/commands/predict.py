"""``predict CHECKPOINT INPUT... --out FILE``: the outputs of a trained model for files that its run
would read as data, images, rows of numbers or lines of text; and `framework.predict`.

FILE gets a line of JSON for each input, in order; a command that was interrupted continues after
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
from pathlib import Path
from typing import IO, Any, Final, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from framework.checkpoint.manifest import SavedCheckpoint
from framework.commands.generate import add_sampling, prompt_of, sample, terms_of, tokenizer_of
from framework.commands.inputs import batch_of, find_inputs, inputs_in_memory, rows_of
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
from framework.recipes.text.chat import Answers, open_tokenizer
from framework.recipes.text.kinds import LabelledText
from framework.recipes.text.labelled_text import inputs_of
from framework.setup.components import load_task
from framework.setup.trained import (
    find_source,
    is_average,
    module_to_ask,
    saved_config,
    step_name,
)
from framework.system.arguments import add_step, whole
from framework.system.command_parser import CommandParser
from framework.system.files import open_own
from framework.tasks.from_callable import as_task
from framework.tasks.task import Task

_LONGEST_ROW: Final = 64 << 20
_SHORTEST_BEGIN: Final = len('{"input": "')


def main(words: Sequence[str]) -> int:
    """Predict this rank's batches, and on rank 0 write the rows of all; returns the exit code.
    Collective.
    """
    arguments = _parse(words)
    checkpoint = find_source(arguments.checkpoint, step=arguments.step)
    out = Path(arguments.out)
    size = arguments.batch_size
    config = saved_config(checkpoint, "model", "task", trust=arguments.trust)
    inputs = find_inputs(arguments.inputs, config, lines=arguments.lines)
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
    task: Any = None,
) -> Callable[[int, Mapping[str, Any]], list[dict[str, Any]]]:
    """Return the function from the place of a batch among the inputs, and the batch by name, to the
    batch's rows. `task` is as `fit` takes it; None: that of the config.
    """
    if isinstance(config.task, CausalLM):
        tokenizer = tokenizer_of(config, checkpoint, option=arguments.tokenizer)
        return partial(_texts, model, tokenizer, terms_of(arguments, config, tokenizer))
    text_tokenizer = None
    if isinstance(config.data, LabelledText):
        kept = checkpoint.folder.absolute().parent / KEPT_TOKENIZER
        text_tokenizer = open_tokenizer(str(kept))
    if task is None:
        task = load_task(config)
    return partial(_outputs, model, config, as_task(task), text_tokenizer)


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
        """Write text after the complete rows; on an OSError the file gets its earlier length."""
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
    model: torch.nn.Module,
    config: RunConfig,
    task: Task,
    tokenizer: Any,
    place: int,
    inputs: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return a row for each input: class and probabilities, or the outputs of another task."""
    samples = list(inputs.values())
    if isinstance(config.data, LabelledText):
        texts = [sample.decode() if isinstance(sample, bytes) else sample for sample in samples]
        batch: Any = inputs_of(texts, tokenizer, config.data.sequence_length)
    else:
        batch = batch_of(samples, config, task)
    batch = _on_device_of(next(model.parameters()), batch)
    outputs = task.forward(model, batch)
    outputs = getattr(outputs, "logits", outputs)
    if isinstance(config.task, Classification):
        class_names = getattr(tokenizer, "init_kwargs", {}).get("classes")
        return _rows_of_classes(outputs.float().softmax(1).tolist(), class_names)
    if not isinstance(outputs, Mapping):
        outputs = {"output": outputs}
    return rows_of({name: value.float().tolist() for name, value in outputs.items()})


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
    """Return a row for each text or chat: the text that the model writes after it."""
    prompts = [prompt_of(sample, tokenizer, name) for name, sample in inputs.items()]
    seed = terms["seed"] + place  # an input has one seed, however the inputs are batched
    generated: list[list[int]] = [[] for _ in prompts]
    for step in sample(model, prompts, **{**terms, "seed": seed}):
        for tokens, token in zip(generated, step, strict=True):
            if token is not None:
                tokens.append(token)
    return [{"generated": tokenizer.decode(tokens)} for tokens in generated]


def predict(
    source: str | Path,
    data: Any,
    *,
    model: Any = None,
    task: Any = None,
    step: int | Literal["best"] | None = None,
    weights: Literal["trained", "ema"] = "trained",
    trust: bool = False,
    batch_size: int = 32,
    lines: bool = False,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
) -> list[dict[str, Any]]:
    """Return the outputs of a trained model, a row for each sample, as the command ``predict``
    writes them.

    Args:
        source: a run folder (its newest checkpoint) or ``.../global_step<N>``, of any layout.
        data: a file or a folder, or a list of `Path`, read as the run reads its own data; or
            samples in memory: rows as such files hold them, texts, or a dataset as `fit` takes it.
        model: as `fit` takes it; left out: the model that the checkpoint's own config names.
        task: as `fit` takes it; left out: that of the checkpoint's config.
        step: of the run: a number, or ``best``; left out: the newest.
        weights: as trained, or their moving average (``training.ema``).
        trust: call code that the checkpoint names as a target.
        batch_size: samples per forward pass.
        lines: every line of a file is a text as it stands.
        max_new_tokens, temperature, top_k, seed, tokenizer: as the options of ``generate``.

    Raises:
        ConfigError: the checkpoint, the model or the data cannot be used.
        StorageError: the checkpoint is damaged.
    """
    average = is_average(weights, key="predict")
    if batch_size < 1:
        reason = "a forward pass takes one sample at least"
        raise ConfigError.of("wrong-value", reason, "write 1 or more", "batch_size", batch_size)
    checkpoint = find_source(str(source), step=step_name(step), key="predict")
    sections = [name for name, given in (("model", model), ("task", task)) if given is None]
    trusted = str(checkpoint.path) if trust else None
    config = saved_config(checkpoint, *sections, trust=trusted, key="predict")
    paths = _paths_in(data)
    if paths is None:
        inputs = inputs_in_memory(data, config)
    else:
        inputs = find_inputs(paths, config, lines=lines)
    options = argparse.Namespace(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        tokenizer=tokenizer,
    )
    module = module_to_ask(checkpoint, config, model, average=average)
    of_batch = _make_predict(options, checkpoint, config, module, task)
    names = list(inputs)
    rows = []
    for first in range(0, len(names), batch_size):
        batch = {name: inputs[name] for name in names[first : first + batch_size]}
        for name, row in zip(batch, of_batch(first, batch), strict=True):
            rows.append({"input": name, **row})
    return rows


def _paths_in(data: Any) -> list[str] | None:
    """Return the paths that data is; None for samples in memory."""
    if isinstance(data, str | Path):
        return [str(Path(data).expanduser())]
    if isinstance(data, Sequence) and data and all(isinstance(path, Path) for path in data):
        return [str(path) for path in data]
    return None


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Write what a trained model makes of inputs."
    parser = CommandParser(prog="dsf predict", allow_abbrev=False, description=about)
    option = parser.add_argument
    option(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder (its newest checkpoint) or .../global_step<N>",
    )
    add_step(parser)
    about = "files as data.path of the run names them; images or folders of them; .csv, .npz"
    option("inputs", nargs="+", metavar="INPUT", help=about)
    option("--lines", action="store_true", help="every line of INPUT is a text as it stands")
    option("--out", required=True, metavar="FILE", help="JSON lines; those that it has are kept")
    count = whole(1, 10**9, "'{}' is not a number from 1 to 999999999")
    parser.add_argument(
        "--batch_size", type=count, default=32, metavar="N", help="inputs per forward pass (32)"
    )
    option(
        "--trust",
        metavar="FOLDER",
        help="the run folder or checkpoint whose targets may be imported and called",
    )
    add_sampling(parser)
    return parser.parse_intermixed_args(list(words))
