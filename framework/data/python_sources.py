"""The sources of Python's standard library as text: real documents that are on every machine that can train.

They are read into memory at each start (under 5 MB in some ten milliseconds): no cache that could be stale or
half-written, and nothing for the ranks of a host to agree on. Another version of Python has other sources.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import numpy as np

from framework.data.tokenizer import ByteTokenizer
from framework.data.tokens import Corpus, EvaluationShare, Tokens
from framework.errors import ConfigError, Problem

_EVAL_FRACTION: Final = 0.1
_MOST_BYTES: Final = 8 << 20


def python_sources(folder: Path | None = None) -> Corpus:
    """The modules directly in the library's folder, in alphabetical order, a document each, byte by byte.

    Args:
        folder: the library; left out: this Python's.

    Returns:
        Every tenth module for evaluation (see `EvaluationShare`), the others for training.

    Raises:
        ConfigError: kind ``text-not-found``, where Python came without its sources.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    texts = _texts(folder)
    if len(texts) < 20:  # too few to deal between training and evaluation
        raise ConfigError(
            Problem(
                "text-not-found",
                f"this Python has no sources in {folder}",
                "name a folder made by python -m framework prepare",
                "data.path",
                None,
            )
        )
    share = EvaluationShare(_EVAL_FRACTION)
    dealt: dict[bool, list[bytes]] = {False: [], True: []}
    for text in texts:
        dealt[share.takes(len(text))].append(text)
    return Corpus(_tokens(dealt[False]), _tokens(dealt[True]), ByteTokenizer.vocab_size, ByteTokenizer.special)


def _texts(folder: Path) -> list[bytes]:
    texts: list[bytes] = []
    room = _MOST_BYTES
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_sysconfigdata"):  # says how this one Python was compiled
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        room -= len(text)
        if room < 0:
            break
        if text:
            texts.append(text)
    return texts


def _tokens(texts: list[bytes]) -> Tokens:
    lengths = [len(text) + 1 for text in texts]
    numbers = np.empty(sum(lengths), dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for text, start, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
        numbers[start : end - 1] = np.frombuffer(text, dtype=np.uint8)
        numbers[end - 1] = ByteTokenizer.special.end
    return Tokens(numbers, offsets)
