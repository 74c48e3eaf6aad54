"""Pairs of text segments with hidden tokens, as BERT is trained on (Devlin et al. 2018, section
3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from framework.data.batches import WholeBatch
from framework.data.order import Seeds, mix
from framework.data.splits import Splits
from framework.data.token_files import (
    PART_WORDS,
    PREPARE,
    SpecialTokens,
    no_pair_tokens,
    num_pairs,
    one_document,
)
from framework.data.tokens import Tokens
from framework.errors import ConfigError, Problem
from framework.recipes.text.windows import TextSamples, open_corpus, text_splits

Ints = npt.NDArray[np.int64]

IS_NEXT: Final = 0
IS_RANDOM: Final = 1
NOT_PREDICTED: Final = -100
_NUM_SPECIAL: Final = 3  # [CLS], [SEP], [SEP]
_FIXED_SEED: Final = 0xB127
# Purposes of a sample's draws.
_PURPOSES: Final = np.arange(1, 5)  # place, label, split and other document
_WHICH: Final = 5
_HOW: Final = 6
_REPLACEMENT: Final = 7


class TextPairs(TextSamples):
    """[CLS] A [SEP] B [SEP], drawn anew for every (seed, epoch, sample index); read without a seed,
    always the same.

    A sample is (input_ids (S,), token_type_ids (S,), attention_mask (S,), mlm_labels (S,),
    nsp_label ()), all int64. token_type_ids are 1 for B and its [SEP]; attention_mask is 0 on
    padding; mlm_labels are -100 where nothing is to be predicted; nsp_label is 0 if B follows A in
    their document, 1 if it is from another one.

    There are as many samples as windows of S tokens fit the text. A sample starts at a random place
    near its own, pulled back so that the document fills it; only a document shorter than S - 3
    tokens leaves padding. A has between a quarter and three quarters of the text, or more if the
    document that B is from, or would be, is shorter than the rest. The lengths of A, B and padding
    are distributed alike for both labels, so that they do not reveal the label.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        vocab_size: int,
        special: SpecialTokens,
        mask_fraction: float = 0.15,
    ) -> None:
        """Describe the samples; nothing is read yet.

        Args:
            tokens: at least two documents.
            sequence_length: S, at least 8.
            vocab_size: numbers lie in [0, vocab_size).
            special: numbers of the special tokens, all five of them.
            mask_fraction: share p of a sample's n tokens of text that is predicted: exactly max(1,
                round(p n)).

        Raises:
            ValueError: a special token has no number.
        """
        super().__init__(
            tokens, sequence_length=sequence_length, vocab_size=vocab_size, special=special
        )
        numbers = special.model_dump(exclude_none=True)
        if len(numbers) < len(SpecialTokens.model_fields):
            raise ValueError(
                f"pairs of segments need every special token, and there are only {special}"
            )
        self._specials = sorted(set(numbers.values()))
        self._cls = numbers["cls"]
        self._sep = numbers["sep"]
        self._mask = numbers["mask"]
        self._pad = numbers["pad"]
        self.mask_fraction = mask_fraction

    def __len__(self) -> int:
        return num_pairs(len(self.tokens.numbers), self.tokens_per_sample)

    def __getitems__(self, indices: Sequence[int]) -> WholeBatch:
        """Read a batch that depends on the indices alone, for evaluation: not on the batch size nor
        on the number of ranks.
        """
        return self.items_from_seeds(indices, mix(_FIXED_SEED, np.asarray(indices, dtype=np.int64)))

    def items_from_seeds(self, indices: Sequence[int], seeds: Seeds) -> WholeBatch:
        """Read a batch, with every sample drawn from its own seed (see `batches.DrawsFromSeeds`).

        Returns:
            input_ids, token_type_ids, attention_mask, mlm_labels of shape (B, S), nsp_label (B,).
        """
        starts, lengths, next_label = self._segments(np.asarray(indices, dtype=np.int64), seeds)
        ids, types, is_text = self._lay_out(starts, lengths)
        attention = np.arange(self.tokens_per_sample) < lengths.sum(0)[:, None] + _NUM_SPECIAL
        labels = self._hide(ids, is_text, seeds)
        fields = (ids, types, attention.astype(np.int64), labels, next_label)
        return WholeBatch(tuple(torch.from_numpy(field) for field in fields))

    def _segments(self, indices: Ints, seeds: Seeds) -> tuple[Ints, Ints, Ints]:
        """Draw the segments A and B: their first tokens (2, B), their numbers of tokens (2, B) and
        the label (B,).
        """
        num_tokens = len(self.tokens.numbers)
        num_samples = len(self)
        # indices * num_tokens // num_samples, in two parts: above 34 billion tokens at S = 128 the
        # product has no room in int64.
        spacing, rest = divmod(num_tokens, num_samples)
        # In one: each call takes a tenth of a small model's step.
        for_place, for_label, for_split, for_other = mix(seeds, _PURPOSES[:, None])
        place = indices * spacing + indices * rest // num_samples + _below(spacing, for_place)
        start, length = self._document_at(place)
        total = np.minimum(length, self.tokens_per_sample - _NUM_SPECIAL)
        # A document of one token has no second half.
        label = np.where(total < 2, IS_RANDOM, _below(2, for_label))
        total = np.maximum(total, 2)
        quarter = np.maximum(total // 4, 1)
        first = quarter + _below(total - 2 * quarter + 1, for_split)
        # Any token outside of A's document is as likely, and with it that token's document.
        other = (start + length + 1 + _below(num_tokens - length - 1, for_other)) % num_tokens
        other_start, other_length = self._document_at(other)
        # Also if B follows A and could be longer: a short second segment would otherwise reveal
        # that it is from another document.
        second = np.minimum(total - first, other_length)
        first = np.where(length >= total, total - second, first)
        window = np.where(label == IS_NEXT, total, first)
        first_start = np.minimum(place, start + np.maximum(length - window, 0))
        second_start = np.where(
            label == IS_NEXT,
            first_start + first,
            np.minimum(other, other_start + other_length - second),
        )
        return np.stack([first_start, second_start]), np.stack([first, second]), label

    def _document_at(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the first token and the number of tokens (without the end token) of the documents
        at these places.
        """
        documents = np.searchsorted(self.tokens.offsets, places, side="right") - 1
        start = self.tokens.offsets[documents]
        return start, self.tokens.offsets[documents + 1] - start - 1

    def _lay_out(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Return input_ids, token_type_ids, and a mask of positions that hold text, (B, S) each."""
        column = np.arange(self.tokens_per_sample, dtype=np.int64)
        middle = lengths[0][:, None] + 1  # of the first [SEP]
        end = middle + lengths[1][:, None] + 1  # of the second
        is_first = (column > 0) & (column < middle)
        is_second = (column > middle) & (column < end)
        source = np.where(
            is_first, starts[0][:, None] + column - 1, starts[1][:, None] + column - middle - 1
        )
        is_text = is_first | is_second
        ids = self.tokens.numbers[np.where(is_text, source, 0)].astype(np.int64)
        ids[~is_text] = self._pad
        ids[:, 0] = self._cls
        ids[(column == middle) | (column == end)] = self._sep
        return ids, (is_second | (column == end)).astype(np.int64), is_text

    def _hide(self, ids: Ints, is_text: npt.NDArray[np.bool_], seeds: Seeds) -> Ints:
        """Choose the tokens to predict, replace them in place, and return the labels (B, S)."""
        column = np.arange(self.tokens_per_sample, dtype=np.int64)
        # Of the positions with text, those with the lowest hashes are predicted.
        order = mix(seeds[:, None], _WHICH, column)
        order[~is_text] = np.iinfo(np.uint64).max
        counts = np.maximum(1, np.rint(self.mask_fraction * is_text.sum(axis=1))).astype(np.int64)
        rows, columns = np.nonzero(_lowest(order, counts) & is_text)
        labels = np.full_like(ids, NOT_PREDICTED)
        originals = ids[rows, columns]
        labels[rows, columns] = originals
        # Of ten, eight become [MASK] (0 to 7), one another token (8), one stays (9).
        how = mix(seeds[rows], _HOW, columns) % np.uint64(10)
        others = self._ordinary(mix(seeds[rows], _REPLACEMENT, columns))
        ids[rows, columns] = np.where(how < 8, self._mask, np.where(how == 8, others, originals))
        return labels

    def _ordinary(self, draws: Seeds) -> Ints:
        """Turn draws into token numbers, without special ones, all equally likely."""
        numbers: Ints = (draws % np.uint64(self.vocab_size - len(self._specials))).astype(np.int64)
        for special in self._specials:
            numbers += numbers >= special
        return numbers


def _lowest(order: Seeds, counts: Ints) -> npt.NDArray[np.bool_]:
    """Return a mask (B, S) of the `counts` (B,) lowest numbers of each row; of equal ones the
    first.
    """
    limits = np.take_along_axis(np.sort(order, axis=1), counts[:, None] - 1, axis=1)
    is_lowest: npt.NDArray[np.bool_] = order <= limits
    if (is_lowest.sum(axis=1) == counts).all():
        return is_lowest
    # Equal numbers at the limit, once in 10^17 rows. To sort places takes five times as long.
    rank = order.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return rank < counts[:, None]


def _below(bound: int | Ints, draws: Seeds) -> Ints:
    """Turn draws into numbers in [0, bound)."""
    numbers: Ints = (draws % np.asarray(bound, dtype=np.uint64)).astype(np.int64)
    return numbers


def build(
    path: str | None = None, *, sequence_length: int = 128, mask_fraction: float = 0.15
) -> Splits:
    """Build pairs of segments out of a token folder.

    Arguments are the keys of `config.data.TextPairs`.

    Raises:
        ConfigError: the folder is damaged, or a part of it has one document only
            (``text-one-document``), or its tokenizer lacks a token that pairs need
            (``text-without-special-tokens``).
    """
    corpus = open_corpus(path)
    problems = list(no_pair_tokens(corpus.special, path=path))
    for name, part in corpus.parts():
        problems += one_document(name, num_documents=part.num_documents, path=path)
        if part.offsets[0] != 0 or np.diff(part.offsets).min() < 2:
            reason = f"the documents of the {PART_WORDS[name]} text do not follow each other"
            problems.append(Problem("text-damaged", reason, PREPARE, "data.path", path))
    if problems:
        raise ConfigError(problems)
    samples = partial(TextPairs, sequence_length=sequence_length, mask_fraction=mask_fraction)
    return text_splits(corpus, samples)
