"""Likeness of words: guesses for messages, and a stricter measure for changes to people's files.

Typo measure for names in configs and arguments. A module of its own, because it needs nothing that is slow to
import.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Final


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    words = {name.lower().replace("_", ""): name for name in known}
    matches = difflib.get_close_matches(word[:100].lower().replace("_", ""), words, n=1, cutoff=0.6)
    return words[matches[0]] if matches else None


# Likeness of two words: `likeness` for guesses, and the stricter `means` for changes to people's files.


ALIKE: Final = 0.74  # a guess below this likeness confuses more than it helps
_LONG_ENOUGH: Final = 6
_BEGINNING: Final = 4
_SHORTEST: Final = 4  # "io" is one letter from "aio", and means something else
_LONG: Final = 7  # from here on two letters may be wrong
_LONGEST: Final = 80
# Names from other tools, each with the names that DeepSpeed gives the same thing; which of them, the section tells.
OTHER_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "learning_rate": ("lr",),
    "max_grad_norm": ("gradient_clipping",),
    "grad_clip": ("gradient_clipping",),
    "clip_grad_norm": ("gradient_clipping",),
    "entity": ("team",),
    "max_lr": ("warmup_max_lr", "cycle_max_lr"),
    "min_lr": ("warmup_min_lr", "cycle_min_lr", "lr_range_test_min_lr"),
    "warmup_steps": ("warmup_num_steps",),
    "total_steps": ("total_num_steps",),
    **dict.fromkeys(
        ("per_device_train_batch_size", "train_micro_batch_size", "micro_batch_size"),
        ("train_micro_batch_size_per_gpu",),
    ),
}
# The same, where the section around them has such a key; elsewhere they may be anything.
WORDS_INSIDE: Final[Mapping[str, tuple[str, ...]]] = {"name": ("type",), "size": ("autotp_size", "autoep_size")}


def means(written: str, known: str) -> bool:
    """Check whether the written name can only be a slip for the known one, or is a word of another tool for it."""
    if known in (*OTHER_WORDS.get(written, ()), *WORDS_INSIDE.get(written, ())):
        return True
    one, two = _plain(written), _plain(known)
    if one == two:
        return True
    if min(len(one), len(two)) < _SHORTEST or max(len(one), len(two)) > _LONGEST or _digits(one) != _digits(two):
        return False
    return distance(one, two) <= (2 if min(len(one), len(two)) >= _LONG else 1)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def _digits(name: str) -> str:
    """Another number is another thing: fp8 is no slip for fp16."""
    return "".join(sorted(letter for letter in name if letter.isdigit()))


@cache
def distance(one: str, two: str) -> int:
    """Letters to add, take away, change or swap with their neighbour to get from one word to the other."""
    before: list[int] = []
    row = list(range(len(two) + 1))
    for i, letter in enumerate(one, start=1):
        row, before, older = [i], row, before
        for j, other in enumerate(two, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == two[j - 2] and one[i - 2] == other:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]


@cache
def likeness(word: str, other: str) -> float:
    """From 0 to 1; a name that holds the other one whole is a good guess as well."""
    one, two = (text[:100].lower().replace("_", "").replace("-", "") for text in (word, other))
    if (len(one) >= _LONG_ENOUGH and one in two) or (len(one) >= _BEGINNING and one == other.partition("_")[0]):
        return 0.8
    matcher = SequenceMatcher(None, one, two)
    return matcher.ratio() if matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE else 0.0
