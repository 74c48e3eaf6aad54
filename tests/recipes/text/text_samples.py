"""Small texts as tokens, for the tests of what reads them."""

from __future__ import annotations

import numpy as np

from framework.data.tokenizer import ByteTokenizer
from framework.data.tokens import Tokens

SPECIAL = ByteTokenizer.special
VOCAB_SIZE = ByteTokenizer.vocab_size


def tokens_of(*documents: bytes) -> Tokens:
    """Documents back to back, byte by byte, written out the slow way."""
    numbers: list[int] = []
    offsets = [0]
    for document in documents:
        numbers += [*document, SPECIAL.end]
        offsets.append(len(numbers))
    return Tokens(np.array(numbers, dtype=np.uint16), np.array(offsets, dtype=np.int64))


def many_documents(
    count: int = 40, *, shortest: int = 1, longest: int = 400, seed: int = 0
) -> list[bytes]:
    """Texts of random lengths. Byte p of document d says where it is from: it is (7 d + p) %
    251.
    """
    lengths = np.random.default_rng(seed).integers(shortest, longest + 1, size=count).tolist()
    return [
        bytes((7 * number + place) % 251 for place in range(length))
        for number, length in enumerate(lengths)
    ]
