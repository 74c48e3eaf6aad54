"""``predict CHECKPOINT INPUT... --out FILE``: what a trained model makes of images, lines of text or rows of numbers.

The rows of FILE are those of the inputs, in order: class and probabilities of a classification; of a causal language
model the log-probability of a text, or how it goes on; otherwise the outputs as they are. A command that was broken off
goes on behind the rows that FILE has. On several ranks each takes every n-th batch, and rank 0 writes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from framework.checkpoint.manifest import SavedCheckpoint
from framework.commands.export import DTYPES
from framework.commands.generate import add_sampling, sample, tokenizer_of, window_of
from framework.commands.results import SUFFIXES, Results, Row
from framework.config.base import Object
from framework.config.data import ImageFolder
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, Classification
from framework.data.inputs import Inputs, find_inputs, stacked
from framework.data.tokenizer import Tokenizer
from framework.engine.distributed import gather, process_group, rank
from framework.errors import EXIT_OK, ConfigError, FrameworkError, TrainingError, UsageError, in_one_line
from framework.setup.objects import load_target
from framework.setup.parts import load_task
from framework.setup.trained import config_to_build, find_source, module_of
from framework.system.arguments import CommandParser, whole
from framework.tasks.task import as_task

Predict = Callable[[range], list[Row]]


def main(words: Sequence[str]) -> int:
    """Run the command on this rank; returns the exit code.

    Raises:
        ConfigError: there is no such checkpoint or input, or what is in FILE is of others.
        StorageError: the checkpoint is damaged, or FILE cannot be written; TrainingError: an input fails in the model.
    """
    arguments = _parse(words)
    if Path(arguments.out).suffix not in SUFFIXES:
        raise UsageError(f"predict: --out {arguments.out}: name a file that ends in {', '.join(SUFFIXES)}")
    checkpoint = find_source(arguments.checkpoint, allow_unverified=False)
    config = config_to_build(checkpoint, arguments.trust, "model", "task")
    own = load_target(arguments.reader, key="--reader") if arguments.reader else None
    inputs = find_inputs(arguments.inputs, read_image=image_reader(config), read_file=own)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _predict(checkpoint, config, inputs, arguments)
    else:
        with process_group(config.run.backend):
            _predict(checkpoint, config, inputs, arguments)
    return EXIT_OK


def image_reader(config: RunConfig) -> Callable[[str], Tensor] | None:
    """Return what reads an image as the run's evaluation did; None where only the data's own code knows."""
    if not isinstance(config.data, ImageFolder):
        return None
    from framework.data.image_sets import read_image, transform  # which take torchvision

    convert = transform(config.data.image_size, augment=False)
    return lambda path: convert(read_image(path))


def _predict(checkpoint: SavedCheckpoint, config: RunConfig, inputs: Inputs, arguments: argparse.Namespace) -> None:
    """Write what is missing in FILE. Collective; all ranks learn of an error, and what precedes it is written."""
    share = gather if torch.distributed.is_initialized() else _of_one
    own, ranks = (rank(), len(share(0))) if share is gather else (0, 1)
    label = f"{config.run.name}/{checkpoint.tag}" + (" ema" if arguments.weights == "ema" else "")
    open_results = partial(Results, Path(arguments.out), inputs=inputs.names, checkpoint=label)
    results = _attempt(open_results, "") if own == 0 else None
    start = share(results.num_rows if isinstance(results, Results) else results)[0]
    if isinstance(start, FrameworkError):
        raise start
    size, total = arguments.batch_size, len(inputs.names)
    batches = [range(first, min(first + size, total)) for first in range(start, total, size)]
    predict = _predictor(checkpoint, config, inputs, arguments) if batches else None
    for number in range(0, len(batches), ranks):
        mine, found = batches[number + own : number + own + 1], []
        if predict is not None and mine:
            found = _attempt(partial(predict, mine[0]), f"{inputs.names[mine[0][0]]} and those of its batch: ")
        for part in share(found):
            if results is not None and not isinstance(part, FrameworkError):
                results.add(part)
            elif isinstance(part, FrameworkError):
                if results is not None:
                    results.flush()
                raise part
    if results is not None:
        results.flush()
        print(f"{arguments.out}: {total} rows, {total - start} of them new")


def _of_one(value: Any) -> list[Any]:
    return [value]


def _attempt(work: Callable[[], Any], place: str) -> Any:
    """The result, or the error, which the other ranks have to know."""
    try:
        return work()
    except FrameworkError as error:
        return error
    except Exception as error:
        return TrainingError(f"{place}the model fails: {in_one_line(error, longest=300)} [prediction-failed]")


def _predictor(
    checkpoint: SavedCheckpoint, config: RunConfig, inputs: Inputs, arguments: argparse.Namespace
) -> Predict:
    """Build the model, and what makes rows of a batch with it."""
    if inputs.kind == "text" and not isinstance(config.task, CausalLM):
        reason, fix = "only a causal language model reads lines of text", "name images, rows, or --reader"
        raise ConfigError.of("input-not-read", reason, fix, "INPUT", inputs.names[0])
    model = module_of(checkpoint, config, average=arguments.weights == "ema").to(DTYPES[arguments.dtype])
    if torch.cuda.is_available():
        model = model.cuda(int(os.environ.get("LOCAL_RANK", "0")))
    if inputs.kind == "text":
        tokenizer = tokenizer_of(config, checkpoint, asked=arguments.tokenizer)
        texts = _Texts(model, config, tokenizer, inputs, arguments)
        return texts.go_on if arguments.max_new_tokens else texts.measure
    task = as_task(torch.nn.functional.mse_loss if isinstance(config.task, Object) else load_task(config))
    place = next(model.parameters())

    def rows(batch: range) -> list[Row]:
        names = [inputs.names[number] for number in batch]
        read = stacked([inputs.read(number) for number in batch], names)
        moved = tree_map_only(
            Tensor, lambda one: one.to(place.device, place.dtype if one.is_floating_point() else None), read
        )
        with torch.inference_mode():
            outputs = task.forward(model, moved)
        return list(_rows(outputs, names, is_classes=isinstance(config.task, Classification)))

    return rows


def _rows(outputs: Any, names: Sequence[str], *, is_classes: bool) -> Iterator[Row]:
    if isinstance(logits := getattr(outputs, "logits", outputs), Tensor):
        outputs = logits
    if is_classes and isinstance(outputs, Tensor) and outputs.ndim == 2:
        probabilities = torch.softmax(outputs.float(), dim=1)
        for name, row, best in zip(names, probabilities.tolist(), probabilities.argmax(dim=1).tolist(), strict=True):
            yield {"input": name, "class": best, "probability": row[best], "probabilities": row}
        return
    parts = (
        outputs.items()
        if isinstance(outputs, Mapping)
        else enumerate(outputs)
        if isinstance(outputs, (tuple, list))
        else [("", outputs)]
    )
    columns = {f"output_{key}".rstrip("_"): value.float().tolist() for key, value in parts if isinstance(value, Tensor)}
    for number, name in enumerate(names):
        yield {"input": name, **{key: value[number] for key, value in columns.items()}}


@dataclass(frozen=True)
class _Texts:
    """What a causal language model makes of lines of text."""

    model: torch.nn.Module
    config: RunConfig
    tokenizer: Tokenizer
    inputs: Inputs
    arguments: argparse.Namespace

    def measure(self, batch: range) -> list[Row]:
        """Natural logarithm of the probability of each line as a document of its own, its end left out. Of a line with
        more tokens than the model sees at once, each window begins behind the last token of the one before.
        """
        device, window = next(self.model.parameters()).device, window_of(self.config)
        ids = [torch.tensor([self.tokenizer.special.end, *tokens]) for tokens in self._tokens(batch)]
        parts = [
            (row, one[at : at + window + 1]) for row, one in enumerate(ids) for at in range(0, len(one) - 1, window)
        ]
        sums = [0.0] * len(ids)
        for first in range(0, len(parts), self.arguments.batch_size):
            some = parts[first : first + self.arguments.batch_size]
            # Padded behind: no position sees what follows it.
            read = pad_sequence([part[:-1] for _, part in some], batch_first=True).to(device)
            targets = pad_sequence([part[1:] for _, part in some], batch_first=True, padding_value=-100).to(device)
            with torch.inference_mode():
                logits = getattr(outputs := self.model(read), "logits", outputs)
            nats = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
            for (row, _), value in zip(some, nats.view(targets.shape).double().sum(dim=1).tolist(), strict=True):
                sums[row] -= value
        return [
            {"input": self.inputs.names[number], "num_tokens": len(one) - 1, "log_probability": total}
            for number, one, total in zip(batch, ids, sums, strict=True)
        ]

    def go_on(self, batch: range) -> list[Row]:
        """How each line goes on."""
        asked = {name: getattr(self.arguments, name) for name in ("max_new_tokens", "temperature", "top_k")}
        prompts = [tokens or [self.tokenizer.special.end] for tokens in self._tokens(batch)]
        drawn = sample(
            self.model,
            prompts,
            **asked,
            seed=self.arguments.seed + batch[0],
            window=window_of(self.config),
            vocab_size=self.tokenizer.vocab_size,
            end=self.tokenizer.special.end,
        )
        columns = list(zip(*drawn, strict=True)) or [()] * len(prompts)
        texts = [self.tokenizer.decode([token for token in column if token is not None]) for column in columns]
        return [
            {"input": self.inputs.names[number], "generated": text} for number, text in zip(batch, texts, strict=True)
        ]

    def _tokens(self, batch: range) -> list[list[int]]:
        for number in batch:
            try:
                _ = self.tokenizer.needs_utf8 and self.inputs.read(number).decode()
            except UnicodeDecodeError as error:
                reason, fix = "this tokenizer takes UTF-8 only", "write the line in UTF-8"
                raise ConfigError.of("input-not-read", reason, fix, "INPUT", self.inputs.names[number]) from error
        return [one.tolist() for one in self.tokenizer.encode([self.inputs.read(number) for number in batch])]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m framework predict",
        allow_abbrev=False,
        description="Write what a trained model makes of inputs.",
    )
    count = whole(1, 10**9, "'{}' is not a number from 1 to 999999999")
    option = parser.add_argument
    option("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or .../global_step<N>")
    about = "images, or folders of them; .txt or .jsonl: lines of text; .csv, .npy, .npz: rows of numbers"
    option("inputs", nargs="+", metavar="INPUT", help=about)
    option("--out", required=True, metavar="FILE", help="a .jsonl, .csv or .npz file; rows that it has are kept")
    option("--weights", choices=("trained", "ema"), default="trained", help="or their moving average (trained)")
    parser.option("--batch_size", type=count, default=32, metavar="N", help="inputs per forward pass (32)")
    option("--dtype", choices=tuple(DTYPES), default="fp32", help="number format of weights and inputs (fp32)")
    option("--reader", metavar="MODULE:NAME", help="a function from the path of a file to a sample")
    option("--trust", metavar="FOLDER", help="the run folder or checkpoint whose targets may be imported and called")
    parser.option("--num_gpus", metavar="N", help="on so many devices of this machine; left out: on one")
    add_sampling(
        parser.add_argument_group("text"), count, max_new_tokens=0, help_of_length="go on for N tokens at most"
    )
    return parser.parse_intermixed_args(list(words))
