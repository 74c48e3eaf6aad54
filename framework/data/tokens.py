"""Text as numbers, in token folders or in memory, for every text dataset. No torch here.

A token folder is made by `prepare` and holds

    train.bin, eval.bin    token numbers, little-endian uint16 or uint32: documents back to back,
                           each ended by the end token
    train.idx, eval.idx    little-endian int64: the start of each document, then the number of
                           tokens
    tokenizer.json         of a library tokenizer
    meta.json              facts about the other files, with sizes and checksums; written last, so
                           that a folder without it is known to be unfinished
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from framework.data.token_files import (
    Meta,
    PartName,
    SpecialTokens,
    damaged,
    read_meta,
    size_problems,
)
from framework.errors import ConfigError
from framework.system.files import hash_file

Numbers = npt.NDArray[np.unsignedinteger[Any]]
Offsets = npt.NDArray[np.int64]
_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class MappedFrom:
    """Files that tokens are mapped from: another process maps them itself, and is sent no copy."""

    numbers: Path
    offsets: Path
    dtype: str


@dataclass(frozen=True)
class Tokens:
    """Documents back to back, each ended by the end token.

    Attributes:
        numbers: (N,) uint16 or uint32.
        offsets: (D + 1,) int64; document d is ``numbers[offsets[d]:offsets[d + 1]]``, its end token
            included.
        source: the files behind both; None if they lie in memory.
    """

    numbers: Numbers
    offsets: Offsets
    source: MappedFrom | None = None

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map is a copy of the whole file, one for every worker that is spawned.
        if self.source:
            return (map_tokens, (self.source,))
        return (Tokens, (self.numbers, self.offsets))


@dataclass(frozen=True)
class Corpus:
    """Text for training and for evaluation, and its vocabulary: numbers lie in [0, vocab_size)."""

    train: Tokens
    evaluation: Tokens | None
    vocab_size: int
    special: SpecialTokens

    def parts(self) -> Iterator[tuple[PartName, Tokens]]:
        """Yield the parts with their names."""
        yield "train", self.train
        if self.evaluation is not None:
            yield "eval", self.evaluation


def map_tokens(source: MappedFrom) -> Tokens:
    """Map both files into memory; pages are read when they are touched, and shared by all processes
    of a host.
    """
    numbers = np.memmap(source.numbers, dtype=np.dtype(source.dtype).newbyteorder("<"), mode="r")
    offsets = np.memmap(source.offsets, dtype="<i8", mode="r")
    # Plain arrays over the same pages: indexing a np.memmap costs a subclass view each time.
    return Tokens(np.asarray(numbers), np.asarray(offsets), source)


class EvaluationShare:
    """Division of documents, as they come, into training and evaluation; always the same for the
    same documents.

    Evaluation gets its fraction of the documents so far: with 0.1 every tenth. One that would give
    it more than twice its fraction of the bytes is passed over, and the next one taken. Few or very
    unequal documents may leave it with little: `tokens_to_move` counts the tokens at the end of
    training that complete its share.
    """

    def __init__(self, fraction: float) -> None:
        """Take the fraction of the text for evaluation, from 0 up to below 1."""
        self._fraction = Fraction(str(fraction))  # 0.1 exactly: every tenth of any number
        self._num_taken = 0
        self._num_seen = 0
        self._bytes_taken = 0
        self._bytes_seen = 0

    def takes(self, num_bytes: int) -> bool:
        """Decide whether the next document, of this size, is for evaluation, and count it: to be
        called once for each document, in order. An empty document is not, and does not count.
        """
        if num_bytes == 0:
            return False
        self._num_seen += 1
        self._bytes_seen += num_bytes
        if self._num_taken + 1 > self._fraction * self._num_seen:
            return False
        if self._bytes_taken + num_bytes > 2 * self._fraction * self._bytes_seen:
            return False
        self._num_taken += 1
        self._bytes_taken += num_bytes
        return True

    def tokens_to_move(self, num_train: int, num_evaluation: int) -> int:
        """Count the tokens that evaluation lacks; 0 if it has at least half of its share."""
        share = round(self._fraction * (num_train + num_evaluation))
        if 2 * num_evaluation >= share:
            return 0
        return share - num_evaluation


def open_token_folder(path: str, *, key: str = "data.path") -> Corpus:
    """Map the tokens of a folder; sizes are compared, checksums are not (`verify_token_folder`
    does).

    Raises:
        ConfigError: as `read_meta`, and every file that is missing or has another size than in
            ``meta.json``.
    """
    folder, meta = read_meta(path, key)
    problems = size_problems(folder, meta, path, key)
    if problems:
        raise ConfigError(problems)
    parts: dict[str, Tokens] = {}
    for name in meta.parts:
        source = MappedFrom(folder / f"{name}.bin", folder / f"{name}.idx", meta.dtype)
        tokens = map_tokens(source)
        parts[name] = tokens
        if tokens.offsets[-1] != len(tokens.numbers):
            raise ConfigError(
                damaged(source.offsets, "it does not end at the number of tokens", path, key)
            )
    return Corpus(parts["train"], parts.get("eval"), meta.vocab_size, meta.special_tokens)


def verify_token_folder(path: str) -> Meta:
    """Read everything: checksums, document starts in order, token numbers within the vocabulary.

    Raises:
        ConfigError: as `open_token_folder`, and every file that has changed since `prepare` wrote
            it.
    """
    key = "--verify"
    corpus = open_token_folder(path, key=key)
    folder, meta = read_meta(path, key)
    problems = []
    for name, facts in meta.files.items():
        if hash_file(folder / name).sha256 != facts.sha256:
            reason = "its checksum differs: the content has changed"
            problems.append(damaged(folder / name, reason, path, key))
    for part, tokens in corpus.parts():
        # A document has at least one token and its end.
        if tokens.offsets[0] != 0 or (np.diff(tokens.offsets) < 2).any():
            problems.append(
                damaged(folder / f"{part}.idx", "its documents do not follow each other", path, key)
            )
        blocks = range(0, len(tokens.numbers), _BLOCK)
        if any(tokens.numbers[start : start + _BLOCK].max() >= meta.vocab_size for start in blocks):
            reason = f"it holds a token beyond the vocabulary of {meta.vocab_size}"
            problems.append(damaged(folder / f"{part}.bin", reason, path, key))
    if problems:
        raise ConfigError(problems)
    return meta


def sha256_of(tokens: Tokens) -> str:
    """Hash tokens, and the beginnings of their documents; of files, the checksums in ``meta.json``
    are hashed.

    Raises:
        ConfigError: ``meta.json`` is gone or damaged.
    """
    if tokens.source is None:
        digest = hashlib.sha256(tokens.numbers.tobytes())
        digest.update(tokens.offsets.tobytes())
        return digest.hexdigest()
    source = tokens.source
    _, meta = read_meta(str(source.numbers.parent), "data.path")
    numbers = meta.files[source.numbers.name].sha256
    offsets = meta.files[source.offsets.name].sha256
    return hashlib.sha256(f"{meta.dtype} {numbers} {offsets}".encode()).hexdigest()
