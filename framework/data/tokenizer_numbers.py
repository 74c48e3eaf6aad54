"""The numbers of the tokens in a ``tokenizer.json``, without the library that reads it, and without
numpy: for `check` and `plan` on a laptop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from framework.errors import ConfigError, counted

_LARGEST_TOKENIZER: Final = 1 << 30
# Published tokenizers leave some hundreds of numbers out.
_MOST_GAPS: Final = 4
_FEW_GAPS: Final = 1 << 16
_BEYOND_ALL: Final = 1 << 62


def read_numbers(file: Path, *, key: str, value: str | None) -> list[int]:
    """List the numbers of a ``tokenizer.json``; none where it cannot be read, or is too large to be
    looked at.

    They are near the count of its tokens: the library takes memory for each number in between, and
    a model has weights for them.

    Raises:
        ConfigError: kind ``tokenizer-unreadable``: they are not.
    """
    try:
        if file.stat().st_size > _LARGEST_TOKENIZER:
            return []
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # the library will report it
        return []
    numbers = list(_numbers_of(content))
    largest = max(numbers, default=0)
    if largest < _MOST_GAPS * len(numbers) + _FEW_GAPS:
        return numbers
    reason = (
        f"it has {counted(len(numbers), 'token')}, and one of them has the number {largest:.6g}"
    )
    fix = "name a tokenizer.json with numbers that follow each other"
    raise ConfigError.of("tokenizer-unreadable", reason, fix, key, value)


def _numbers_of(tokenizer: Any) -> Iterator[int]:
    """Yield the token numbers in the content of a ``tokenizer.json``, which may be of any type."""
    vocabulary = _item(_item(tokenizer, "model"), "vocab")
    values: list[Any] = []
    if isinstance(vocabulary, list):
        values += range(len(vocabulary))  # a token's number is its index
    if isinstance(vocabulary, dict):
        values += vocabulary.values()
    added = _item(tokenizer, "added_tokens")
    if isinstance(added, list):
        values += [_item(token, "id") for token in added]
    for value in values:
        if isinstance(value, int):
            yield min(value, _BEYOND_ALL)


def _item(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    return None
