"""Likeness of words: guesses for messages, and stricter measures for changes to people's files.

A module of its own, because it needs nothing that is slow to import.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

ALIKE: Final = 0.74  # a guess below this likeness confuses more than it helps
_LONG_ENOUGH: Final = 6
_BEGINNING: Final = 4
_SHORTEST: Final = 4  # "io" is one letter from "aio", and means something else
_LONG: Final = 7  # from here on two letters may be wrong
_LONGEST: Final = 80
_SECOND: Final = 0.6  # as near as this, another name may have been meant...
_AHEAD: Final = 0.25  # ...unless the nearest one is nearer by this much


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    words = {_plain(name): name for name in known}
    matches = difflib.get_close_matches(_plain(word[:100]), words, n=1, cutoff=0.6)
    return words[matches[0]] if matches else None


def unmatched_pattern(pattern: str, names: Sequence[str]) -> str:
    """What to write for a regular expression that matches no name from beginning to end: around a
    name that contains it, for those who expect a search, or the nearest one.
    """
    containing = [name for name in names if pattern and re.search(pattern, name)]
    if containing:
        return (
            f"it must match the whole name, as in {containing[0]}; write {pattern}.* or "
            f".*{pattern}.*"
        )
    guess = nearest(pattern, names) or next(iter(names), "")
    if guess:
        return f"did you mean {guess}?"
    return "remove it"


def only_alike(word: str, known: Iterable[str], *, least: float) -> str | None:
    """The one known word that is like a misspelt one, if no other comes near."""
    written = _plain(word[:100])
    ratios = (
        (difflib.SequenceMatcher(None, written, _plain(name)).ratio(), name) for name in known
    )
    (best, name), (second, _) = sorted([*ratios, (0.0, ""), (0.0, "")], reverse=True)[:2]
    if best >= least and (second < _SECOND or best - second >= _AHEAD):
        return name
    return None


def means(written: str, known: str) -> bool:
    """Check whether the written name can only be a slip for the known one."""
    one = _plain(written).replace(" ", "")
    two = _plain(known)
    if one == two:
        return True
    digits = [sorted(letter for letter in name if letter.isdigit()) for name in (one, two)]
    shortest, longest = sorted((len(one), len(two)))
    # fp8 is no slip for fp16
    if shortest < _SHORTEST or longest > _LONGEST or digits[0] != digits[1]:
        return False
    return distance(one, two) <= (2 if shortest >= _LONG else 1)


@cache
def distance(one: str, two: str) -> int:
    """Letters to add, take away, change or swap with their neighbour to get from one word to the
    other.
    """
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
    one = _plain(word[:100])
    two = _plain(other[:100])
    if (len(one) >= _LONG_ENOUGH and one in two) or (
        len(one) >= _BEGINNING and one == other.partition("_")[0]
    ):
        return 0.8
    matcher = difflib.SequenceMatcher(None, one, two)
    if matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE:
        return matcher.ratio()
    return 0.0


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
