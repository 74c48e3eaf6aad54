"""Texts and their classes, which become tokens batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from framework.data.splits import Splits
from framework.errors import ConfigError
from framework.recipes.text.chat import open_tokenizer, vocab_size_of
from framework.recipes.text.rows import Row, dealt, sentences

# 12 bytes each: 400 MB in each process that reads samples.
_MOST_KNOWN_TOKENS: Final = 1 << 25
_INPUTS = ("input_ids", "token_type_ids", "attention_mask")


class LabelledText(torch.utils.data.Dataset[Any]):
    """Samples (text, class).

    A batch is a pair: a dict of ``input_ids``, ``token_type_ids`` (if the tokenizer has them) and
    ``attention_mask`` (0 for padding), (batch, length) int64 each, as long as the longest text; and
    classes (batch,) int64.
    """

    def __init__(
        self, rows: Sequence[tuple[str, int]], classes: Sequence[str], tokenizer: Any, length: int
    ) -> None:
        self.rows = rows
        self.classes = classes
        self.tokenizer = tokenizer
        self._length = length
        # Saved with the tokenizer, beside the checkpoints.
        tokenizer.init_kwargs["classes"] = list(classes)
        self.vocab_size = vocab_size_of(tokenizer)
        # Tokens of each text that was read, as a tokenizer takes longer than a small model's step.
        self._known: dict[str, npt.NDArray[np.int32]] = {}  # (inputs, tokens)
        self._names: list[str] = []  # of the inputs
        self._num_known_tokens = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.rows[index]

    def collate_fn(self, samples: Sequence[tuple[str, int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Make a batch; texts are cut at the length."""
        texts, labels = zip(*samples, strict=True)
        return self._inputs_of(texts), torch.tensor(labels)

    def _inputs_of(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return what `inputs_of` does, from tokens that are kept, up to `_MOST_KNOWN_TOKENS`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        room = _MOST_KNOWN_TOKENS - self._num_known_tokens - self._length * len(new)
        if room < 0 or self.tokenizer.pad_token is None:  # which transformers refuses
            return inputs_of(list(texts), self.tokenizer, self._length)
        if new:
            self._know(new)
        rows = [self._known[text] for text in texts]
        longest = max(row.shape[1] for row in rows)
        batch = np.empty((len(self._names), len(rows), longest), np.int64)
        for name, inputs in zip(self._names, batch, strict=True):
            inputs.fill(self._padding_of(name))
        is_left = self.tokenizer.padding_side == "left"
        for number, row in enumerate(rows):
            length = row.shape[1]
            first = longest - length if is_left else 0
            batch[:, number, first : first + length] = row
        return dict(zip(self._names, torch.from_numpy(batch), strict=True))

    def _know(self, texts: list[str]) -> None:
        """Tokenize texts, and keep their tokens."""
        found = self.tokenizer(texts, truncation=True, max_length=self._length)
        self._names = [name for name in _INPUTS if name in found]
        for number, text in enumerate(texts):
            row = np.array([found[name][number] for name in self._names], np.int32)
            self._known[text] = row
            self._num_known_tokens += row.shape[1]

    def _padding_of(self, name: str) -> int:
        """Return what fills up an input, as transformers' `pad` does."""
        paddings: dict[str, int] = {
            "input_ids": self.tokenizer.pad_token_id,
            "token_type_ids": self.tokenizer.pad_token_type_id,
        }
        return paddings.get(name, 0)


def inputs_of(texts: list[str], tokenizer: Any, length: int) -> dict[str, Tensor]:
    """Tokenize texts, each cut at `length` tokens, into the inputs of a model."""
    inputs = tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
    return {name: inputs[name] for name in _INPUTS if name in inputs}


def build(
    path: str | None = None,
    *,
    eval_path: str | None = None,
    eval_fraction: float = 0.1,
    tokenizer: str | None = None,
    sequence_length: int = 512,
    text: str = "text",
    label: str = "label",
) -> Splits:
    """Build the labelled texts of training and evaluation.

    Arguments are the keys of `config.data.LabelledText`.

    Raises:
        ConfigError: a file or the tokenizer cannot be used, or there is no row for training
            (``nothing-to-learn``).
    """

    def make(place: str, row: Row) -> tuple[str, str]:
        if not isinstance(row.get(text), str) or row.get(label) in (None, ""):
            raise ValueError(f"it lacks a text {text!r} or a class {label!r}")
        return row[text], str(row[label])

    parts = dealt((path, eval_path), eval_fraction, make, sentences)
    if not parts[0]:
        raise ConfigError.of(
            "nothing-to-learn", "it has no rows", "name another file", "data.path", path
        )
    training, evaluation = parts
    names = sorted({name for _, name in training + evaluation})
    opened = open_tokenizer(tokenizer)
    if all(name.isdecimal() for name in names):
        numbers = {name: int(name) for name in names}
        names = [str(number) for number in range(max(numbers.values()) + 1)]
    else:
        numbers = {name: number for number, name in enumerate(names)}

    def dataset(rows: list[tuple[str, str]]) -> LabelledText:
        samples = [(text, numbers[name]) for text, name in rows]
        return LabelledText(samples, names, opened, sequence_length)

    if not evaluation:
        return Splits(dataset(training), None)
    return Splits(dataset(training), dataset(evaluation))
