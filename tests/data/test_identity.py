"""Texts of the same length are told apart, wherever they lie; a copy is the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from framework.data.splits import tokens_sha256
from framework.data.token_files import SpecialTokens
from framework.data.tokens import Tokens
from framework.errors import ConfigError
from framework.recipes.text.prepare import prepare
from framework.recipes.text.windows import TextWindows, build


def prepared(folder: Path, text: str) -> str:
    """The identity of a text that was written to files."""
    folder.mkdir()
    (folder / "a.txt").write_text(text, encoding="utf-8")
    prepare([str(folder / "a.txt")], str(folder / "tokens"), eval_fraction=0.0)
    return str(tokens_sha256(build(str(folder / "tokens"), sequence_length=8).train))


def in_memory(numbers: list[int], offsets: list[int]) -> str | None:
    tokens = Tokens(np.array(numbers, dtype=np.uint16), np.array(offsets, dtype=np.int64))
    return tokens_sha256(
        TextWindows(tokens, sequence_length=2, vocab_size=9, special=SpecialTokens(end=8))
    )


def test_in_files(tmp_path: Path) -> None:
    first = prepared(tmp_path / "a", "one text of some length")
    assert prepared(tmp_path / "b", "one text of some length") == first, "a copy"
    assert prepared(tmp_path / "c", "two text of some length") != first


def test_in_memory() -> None:
    first = in_memory([1, 2, 8, 3, 8], [0, 3, 5])
    assert in_memory([1, 2, 8, 3, 8], [0, 3, 5]) == first
    assert in_memory([1, 2, 8, 4, 8], [0, 3, 5]) != first
    assert in_memory([1, 2, 8, 3, 8], [0, 2, 5]) != first
    assert tokens_sha256(build(sequence_length=64).train) == tokens_sha256(
        build(sequence_length=32).train
    )


def test_what_is_no_text_has_none() -> None:
    assert tokens_sha256([1, 2, 3]) is None


def test_a_description_that_is_gone_is_named(tmp_path: Path) -> None:
    prepared(tmp_path / "a", "one text of some length")
    train = build(str(tmp_path / "a/tokens"), sequence_length=8).train
    (tmp_path / "a/tokens/meta.json").unlink()
    with pytest.raises(ConfigError, match="text-not-prepared"):
        tokens_sha256(train)
