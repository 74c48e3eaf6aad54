"""Windows of text for causal language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from framework.data.batches import BatchDataset, WholeBatch
from framework.data.splits import Splits
from framework.data.token_files import SpecialTokens, num_windows, too_short
from framework.data.tokenizer import python_sources
from framework.data.tokens import Corpus, Tokens, open_token_folder
from framework.errors import ConfigError, Problem


class TextSamples(BatchDataset):
    """Samples of `tokens_per_sample` tokens, S, out of a text; numbers lie in [0, vocab_size)."""

    def __init__(
        self, tokens: Tokens, *, sequence_length: int, vocab_size: int, special: SpecialTokens
    ) -> None:
        """Describe the samples; nothing is read yet."""
        self.tokens = tokens
        self.tokens_per_sample = sequence_length
        self.vocab_size = vocab_size
        self.special = special


class TextWindows(TextSamples):
    """Windows of a fixed length over documents packed back to back; nothing is random.

    Sample i is (ids (S,) int64, targets (S,) int64): the tokens from i x S on, and the successor of
    each. A window may span several documents, with the end token between them. The last,
    incomplete window is left out.
    """

    def __len__(self) -> int:
        return num_windows(len(self.tokens.numbers), self.tokens_per_sample)

    def __getitems__(self, indices: Sequence[int]) -> WholeBatch:
        """Read a batch: ids (B, S) and targets (B, S), both int64."""
        length = self.tokens_per_sample
        numbers = self.tokens.numbers
        windows = np.empty((2, len(indices), length), dtype=np.int64)
        for row, index in enumerate(indices):
            start = index * length
            windows[0, row] = numbers[start : start + length]
            windows[1, row] = numbers[start + 1 : start + length + 1]
        ids, targets = torch.from_numpy(windows)
        return WholeBatch((ids, targets))


def build(path: str | None = None, *, sequence_length: int = 256) -> Splits:
    """Build windows over a token folder.

    Arguments are the keys of `config.data.Text`.

    Raises:
        ConfigError: the folder is damaged, or a part of it is shorter than one window
            (``text-too-short``).
    """
    corpus = open_corpus(path)
    problems: list[Problem] = []
    for name, tokens in corpus.parts():
        num_tokens = len(tokens.numbers)
        problems += too_short(name, num_tokens=num_tokens, sequence_length=sequence_length)
    if problems:
        raise ConfigError(problems)
    return text_splits(corpus, partial(TextWindows, sequence_length=sequence_length))


def text_splits(corpus: Corpus, samples: Callable[..., TextSamples]) -> Splits:
    """Build the samples of both parts of a text, by calling `samples` with their tokens."""
    make = partial(samples, vocab_size=corpus.vocab_size, special=corpus.special)
    training = make(corpus.train)
    if corpus.evaluation is None:
        return Splits(training, None)
    return Splits(training, make(corpus.evaluation))


def open_corpus(path: str | None) -> Corpus:
    """Open a token folder, or without one the sources of Python's standard library."""
    if path is None:
        return python_sources()
    return open_token_folder(path)
