"""``generate CHECKPOINT``: samples of text from a checkpoint of a GPT, of any layout.

The checkpoint's manifest names the model, and the run has kept the tokenizer. After as many tokens
as the model was trained to see at once its window moves, and each further token costs a forward
pass over the window.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.utils.rnn import pad_sequence

from framework.checkpoint.manifest import SavedCheckpoint
from framework.commands.inputs import Chat
from framework.config.load import load_config
from framework.config.run_config import RunConfig
from framework.data.token_files import KEPT_TOKENIZER, META_FILE, TOKENIZER_FILE, read_meta
from framework.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from framework.errors import EXIT_OK, ConfigError
from framework.recipes.language_models.gpt import Past
from framework.recipes.language_models.kinds import GPT
from framework.recipes.text.chat import Answers, open_tokenizer
from framework.recipes.text.kinds import Conversations, Text, TextPairs
from framework.setup.trained import find_source, module_to_ask, saved_config
from framework.system.arguments import add_step, whole
from framework.system.command_parser import CommandParser
from framework.system.output import visible

_NO_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"


def main(words: Sequence[str]) -> int:
    """Draw samples of text from a checkpoint and print them; returns the exit code.

    Raises:
        ConfigError: there is no checkpoint of a GPT, or its tokenizer is gone.
        StorageError: the checkpoint is damaged.
    """
    arguments = _parse(words)
    checkpoint = find_gpt(
        arguments.checkpoint, step=arguments.step, allow_unverified=arguments.allow_unverified
    )
    config = _config_of(checkpoint, arguments.config)
    assert isinstance(config.model, GPT)
    tokenizer = tokenizer_of(config, checkpoint, option=arguments.tokenizer)
    texts = arguments.prompt or [""]
    prompts = [tokens_of(os.fsencode(text), tokenizer, "--prompt") for text in texts]
    model = module_to_ask(checkpoint, config, average=arguments.weights == "ema")
    steps = sample(model, prompts, **terms_of(arguments, config, tokenizer))
    # The first sample is printed as it is drawn; the tokens of the others are kept meanwhile.
    for row, steps_again in enumerate(tee(steps, len(prompts))):
        if row:
            print("\n")
        _print_text(texts[row])
        if isinstance(tokenizer, Answers):
            _print_text("\n")
        tokens = _tokens_of_row(steps_again, row)
        for text in as_text(tokens, tokenizer.decode, after=prompts[row]):
            _print_text(text)
    print()
    return EXIT_OK


def _tokens_of_row(steps: Iterator[list[int | None]], row: int) -> Iterator[int]:
    """Yield the tokens of one sample until it ends; `steps` have a token for every sample."""
    for tokens in steps:
        token = tokens[row]
        if token is None:
            return
        yield token


def _print_text(text: str) -> None:
    """Print a part of a sample at once on a terminal, without the codes that move its cursor or do
    worse: a model may draw them.
    """
    if sys.stdout.isatty():
        print(visible(text), end="", flush=True)
    else:
        print(text, end="")


def tokens_of(prompt: bytes, tokenizer: Tokenizer | Answers, key: str) -> list[int]:
    """Return the tokens of the prompt. For an empty one it is the token that ends a document, after
    which the next document begins.

    Raises:
        ConfigError: the tokenizer takes UTF-8 only, and the prompt is not.
    """
    try:
        if tokenizer.needs_utf8:
            prompt.decode()
    except UnicodeDecodeError as error:
        shown = ascii(os.fsdecode(prompt))
        reason = "this tokenizer takes UTF-8 only"
        raise ConfigError.of("prompt-not-utf8", reason, "write it in UTF-8", key, shown) from error
    return tokenizer.encode([prompt])[0].tolist() or [tokenizer.special.end]


def prompt_of(sample: Any, tokenizer: Tokenizer | Answers, key: str) -> list[int]:
    """Return the tokens of a prompt of ``predict``, a text or a `Chat`; ConfigError as
    `tokens_of`.
    """
    if isinstance(sample, Chat):
        assert isinstance(tokenizer, Answers)
        return tokenizer.prompt_of(sample.messages, sample.tools)
    if isinstance(sample, str):
        sample = sample.encode()
    return tokens_of(sample, tokenizer, key)


def terms_of(
    arguments: argparse.Namespace, config: RunConfig, tokenizer: Tokenizer | Answers
) -> dict[str, Any]:
    """Return the options of `sample`."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "seed": arguments.seed,
        "window": _trained_window(config),
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.special.end,
    }


def _trained_window(config: RunConfig) -> int:
    """Return the number of tokens that the model saw at once in training."""
    # The model may have more positions than it was trained with, and has learned nothing of those.
    window = sys.maxsize
    for size in (
        getattr(config.model, "max_positions", None),
        getattr(config.data, "sequence_length", None),
    ):
        if size is not None:
            window = min(window, size)
    return window


@torch.no_grad()
def sample(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    window: int,
    vocab_size: int,
    end: int,
    remembers: bool = True,
) -> Iterator[list[int | None]]:
    """Draw the next token of every prompt at once, each by the logits of the tokens before it.

    Args:
        model: tokens (rows, sequence) to logits (rows, sequence, vocabulary), in evaluation mode.
        prompts: tokens to go on from, at least one each.
        max_new_tokens: for each prompt.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: draw from this many of the most likely tokens only.
        seed: of the first row; the next one draws with the next.
        window: of more tokens the model sees the last ones only.
        vocab_size: of the tokenizer: the model may have more, which stand for nothing.
        end: the token that ends a document, and with it the sample; it is not yielded.
        remembers: keep keys and values between tokens, where the model is a `GPT`.

    Yields:
        A token for each prompt; None for one that has ended.
    """
    # On the CPU, so that a sample does not depend on the device.
    generators = [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))]
    rows = [list(prompt) for prompt in prompts]
    ended: set[int] = set()  # numbers of rows
    past = None
    if remembers:
        past = Past(min(window, max(map(len, rows)) + max_new_tokens))
    for _ in range(max_new_tokens):
        logits = _next_logits(model, rows, past, window=window)[:, :vocab_size].float().cpu()
        tokens: list[int | None] = []
        for number, row in enumerate(rows):
            token = _draw(logits[number], generators[number], temperature=temperature, top_k=top_k)
            if token == end:
                ended.add(number)
            if number in ended:
                tokens.append(None)
            else:
                tokens.append(token)
                row.append(token)
        if len(ended) == len(rows):
            return
        yield tokens


def _next_logits(
    model: torch.nn.Module, rows: Sequence[Sequence[int]], past: Past | None, *, window: int
) -> torch.Tensor:
    """Return the logits (rows, vocabulary) of each row's next token. The model gets only the last
    token of each row if `past` remembers the others.
    """
    device = next(model.parameters()).device
    ends = torch.tensor([len(row) - 1 for row in rows])
    if int(ends.max()) >= window:
        past = None
    if past is not None and past.held:
        last_tokens = torch.tensor([[row[-1]] for row in rows], device=device)
        with past.read(ends[:, None].to(device)):
            logits: torch.Tensor = model(last_tokens)
            return logits[:, 0]
    outputs = _outputs_of_windows(model, rows, past, window=window)
    logits = getattr(outputs, "logits", outputs)
    return logits[torch.arange(len(rows)), ends.clamp(max=window - 1)]


def _outputs_of_windows(
    model: torch.nn.Module, rows: Sequence[Sequence[int]], past: Past | None, *, window: int
) -> Any:
    """Return the model's outputs for the last tokens of each row; `past` remembers them."""
    device = next(model.parameters()).device
    windows = [torch.tensor(row[-window:]) for row in rows]
    padded = pad_sequence(windows, batch_first=True).to(device)
    if past is None:
        return model(padded)
    with past.read():
        return model(padded)


def _draw(
    logits: torch.Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None
) -> int:
    """Draw the number of a token by its logits (vocabulary,)."""
    best, numbers = torch.topk(logits, min(top_k or len(logits), len(logits)))
    if temperature == 0.0:
        return int(logits.argmax())
    # The largest is subtracted first: logits divided by a small temperature would overflow.
    shares = torch.softmax((best - best[0]).double() / temperature, dim=0)
    return int(numbers[torch.multinomial(shares, 1, generator=generator)])


def as_text(
    tokens: Iterator[int], decode: Callable[[Sequence[int]], str], *, after: Sequence[int]
) -> Iterator[str]:
    """Yield text in whole characters: a token may be a part of a character, and its text may depend
    on the token before.
    """
    all_tokens = list(after)
    start = 0  # of the tokens that are decoded together
    shown = len(after)  # number of tokens with text that has been yielded
    for token in tokens:
        all_tokens.append(token)
        shown_text = decode(all_tokens[start:shown])
        text = decode(all_tokens[start:])
        if len(text) > len(shown_text) and not text.endswith(_NO_CHARACTER):
            yield text[len(shown_text) :]
            start = shown
            shown = len(all_tokens)
    yield decode(all_tokens[start:])[len(decode(all_tokens[start:shown])) :]


def find_gpt(
    path: str, *, step: str | None = None, allow_unverified: bool = False
) -> SavedCheckpoint:
    """Find the checkpoint of a GPT that a path names; other models have no text to go on with.

    Raises:
        ConfigError: kind ``checkpoint-not-found``, ``checkpoint-unverified`` or ``not-a-gpt``.
    """
    checkpoint = find_source(path, step=step, allow_unverified=allow_unverified)
    if checkpoint.verified:
        _refuse_other_models(checkpoint.manifest["config"]["model"], file=str(checkpoint.path))
    return checkpoint


def _config_of(checkpoint: SavedCheckpoint, file: str | None) -> RunConfig:
    """Return the config that names model and tokenizer: the manifest's, or without a manifest the
    user's.
    """
    if checkpoint.verified:
        config = saved_config(checkpoint, kind="not-a-gpt")
    elif file is None:
        config = saved_config(
            checkpoint, otherwise="give --config FILE, a run config with its model and its data"
        )
    else:
        config = load_config(file)
    # of the models that a manifest may name, only this one is built
    if not isinstance(config.model, GPT):
        _refuse_other_models(config.to_dict()["model"], file=file or str(checkpoint.path))
    return config


def _refuse_other_models(model: Mapping[str, Any], *, file: str) -> None:
    """Raise ConfigError unless a model's section is that of a GPT."""
    kind = model.get("target") or model.get("object") or model.get("kind")
    if kind != "gpt":
        reason = "only a GPT writes text, and this is another model"
        fix = "name a checkpoint of model.kind: gpt"
        raise ConfigError.of("not-a-gpt", reason, fix, key="model.kind", value=kind, file=file)


def tokenizer_of(
    config: RunConfig, checkpoint: SavedCheckpoint, *, option: str | None
) -> Tokenizer | Answers:
    """Return the tokenizer that the command line names, or that the run has kept beside its
    checkpoints, or that of the folder it was trained on.

    Args:
        config: of the run.
        checkpoint: of the run.
        option: value of --tokenizer: a path, ``bytes``, or None.

    Raises:
        ConfigError: there is none, it cannot be read, or the model has fewer tokens.
    """
    # absolute: a relative path may end at the folder
    kept = checkpoint.folder.absolute().parent / KEPT_TOKENIZER
    if option is not None:
        key = "--tokenizer"
        path = None if option == "bytes" else option
    elif isinstance(config.data, Conversations):
        return Answers(open_tokenizer(str(kept)))
    else:
        key = "data.path"
        path = _token_folder(config, checkpoint, kept)
    tokenizer = _read_tokenizer(path, key)
    most = getattr(config.model, "vocab_size", tokenizer.vocab_size)
    if tokenizer.vocab_size > most:
        reason = f"its tokenizer has {tokenizer.vocab_size} tokens and the model {most}"
        fix = "name the tokenizer that the model was trained with"
        file = str(checkpoint.path)
        raise ConfigError.of("model-data-vocab-size", reason, fix, key=key, value=path, file=file)
    return tokenizer


def _token_folder(config: RunConfig, checkpoint: SavedCheckpoint, kept: Path) -> str | None:
    """Return the token folder of a run, or its copy beside the checkpoints if that is there; None
    for data without a path. ConfigError for data that is no token folder.
    """
    if not isinstance(config.data, (Text, TextPairs)):
        reason = "it is not a token folder, so that the meaning of its numbers is not known"
        fix = "name a tokenizer with --tokenizer"
        raise ConfigError.of(
            "tokenizer-unknown", reason, fix, key="data", file=str(checkpoint.path)
        )
    if config.data.path is not None and (kept / META_FILE).is_file():
        return str(kept)
    return config.data.path


def _read_tokenizer(path: str | None, key: str) -> Tokenizer:
    """Read the tokenizer of a file or folder, or that of bytes for None; `key` is the option or
    setting that names the path. ConfigError if it cannot be read.
    """
    if path is None:
        return ByteTokenizer()
    if Path(path).is_file():
        return load_tokenizer(path)
    file = Path(path, TOKENIZER_FILE)
    if file.is_file() and not file.with_name(META_FILE).exists():
        return load_tokenizer(str(file))
    if key == "--tokenizer" and not Path(path).exists():
        reason = "there is no such file or folder"
        fix = "name a tokenizer.json, a folder with one, or bytes"
        raise ConfigError.of("tokenizer-not-found", reason, fix, key=key, value=path)
    return _tokenizer_of_folder(path, key)


def _tokenizer_of_folder(path: str, key: str) -> Tokenizer:
    """Read the tokenizer of a token folder."""
    try:
        folder, meta = read_meta(path, key)
    except ConfigError as error:
        if key == "--tokenizer":
            raise
        problems = [
            replace(problem, fix=f"{problem.fix}, or say --tokenizer") for problem in error.problems
        ]
        raise ConfigError(problems) from error
    if meta.tokenizer == "bytes":
        return ByteTokenizer()
    return load_tokenizer(str(folder / TOKENIZER_FILE))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="dsf generate",
        description="Print a sample of text from a checkpoint of a GPT.",
    )
    option = parser.add_argument
    option(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder (its newest checkpoint) or .../global_step<N>",
    )
    add_step(parser)
    several = (
        "what to go on from, or of conversations what to answer, given several times for as "
        "many samples; left out: "
    )
    several += "a new document"
    option("--prompt", action="append", metavar="TEXT", help=several)
    add_sampling(parser)
    option(
        "--allow-unverified",
        action="store_true",
        help="read what DeepSpeed wrote without a manifest",
    )
    option(
        "--config",
        metavar="FILE",
        help="run config with the model and the data of such a checkpoint",
    )
    return parser.parse_args(words)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of text that a model writes."""
    count = whole(1, 10**9, "'{}' is not a number from 1 to 999999999")
    from_0 = whole(0, 10**18, "'{}' is not a whole number from 0 up")
    option = parser.add_argument
    option("--max-new-tokens", type=count, default=200, metavar="N", help="tokens at most (200)")
    likelier = "below 1: likelier tokens still likelier; 0: always the likeliest (0.8)"
    option("--temperature", type=_temperature, default=0.8, metavar="T", help=likelier)
    option("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens only")
    option("--seed", type=from_0, default=0, metavar="S", help="another seed, another sample (0)")
    as_trained = "as trained, or their moving average (trained)"
    option("--weights", choices=("trained", "ema"), default="trained", help=as_trained)
    option(
        "--tokenizer",
        metavar="PATH|bytes",
        help="a tokenizer.json or a folder with one; left out: the run's own",
    )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a temperature from 0 up")
    return value
