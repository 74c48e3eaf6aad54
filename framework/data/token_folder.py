"""The folder that `prepare` makes and text datasets read.

train.bin, eval.bin    token numbers, little-endian uint16 or uint32: documents back to back, each ended by the end
token train.idx, eval.idx    little-endian int64: where each document starts, then the number of tokens
tokenizer.json         of a library tokenizer
meta.json              what the others hold, with their sizes and checksums; written last, so that a folder without
                       it is known to be unfinished
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from framework.data.token_files import Meta, damaged, read_meta, size_problems
from framework.data.tokens import Corpus, MappedFrom, Tokens, map_tokens
from framework.errors import ConfigError
from framework.system.files import hash_file

_BLOCK: Final = 1 << 20


def open_token_folder(path: str, *, key: str = "data.path") -> Corpus:
    """Map the tokens of a folder; sizes are compared, checksums are not (`verify_token_folder` does).

    Args:
        path: the folder; ``~`` is the home folder.
        key: what to call it in an error.

    Raises:
        ConfigError: every file that is missing or has another size than ``meta.json`` says: kinds ``text-not-found``,
            ``text-not-prepared``, ``text-damaged``.
    """
    folder, meta = read_meta(path, key)
    problems = size_problems(folder, meta, path, key)
    if problems:
        raise ConfigError(problems)
    parts = {name: _map_part(folder, name, meta, path, key) for name in meta.parts}
    return Corpus(parts["train"], parts.get("eval"), meta.vocab_size, meta.special_tokens)


def verify_token_folder(path: str, *, key: str = "--verify") -> Meta:
    """Read everything: checksums, document starts in order, token numbers within the vocabulary.

    Raises:
        ConfigError: as `open_token_folder`, and every file whose content is not what `prepare` wrote.
    """
    corpus = open_token_folder(path, key=key)
    folder, meta = read_meta(path, key)
    problems = [
        damaged(folder / name, "its checksum differs: the content has changed", path, key)
        for name, facts in meta.files.items()
        if hash_file(folder / name).sha256 != facts.sha256
    ]
    for name, tokens in (("train", corpus.train), ("eval", corpus.evaluation)):
        if tokens is not None:
            problems += [
                damaged(folder / f"{name}.{end}", reason, path, key) for end, reason in _wrong_content(tokens, meta)
            ]
    if problems:
        raise ConfigError(problems)
    return meta


def _wrong_content(tokens: Tokens, meta: Meta) -> Iterator[tuple[str, str]]:
    if tokens.offsets[0] != 0 or (np.diff(tokens.offsets) < 2).any():
        yield "idx", "its documents do not follow each other"
    blocks = range(0, len(tokens.numbers), _BLOCK)
    if any(tokens.numbers[start : start + _BLOCK].max() >= meta.vocab_size for start in blocks):
        yield "bin", f"it holds a token beyond the vocabulary of {meta.vocab_size}"


def _map_part(folder: Path, name: str, meta: Meta, path: str, key: str) -> Tokens:
    tokens = map_tokens(MappedFrom(folder / f"{name}.bin", folder / f"{name}.idx", meta.dtype))
    if tokens.offsets[-1] != len(tokens.numbers):
        raise ConfigError(damaged(folder / f"{name}.idx", "it does not end at the number of tokens", path, key))
    return tokens
