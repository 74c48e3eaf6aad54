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
_SHORTEST: Final = 4  # "io" is one letter from "aio", and means something else
_LONG: Final = 7  # from here on two letters may be wrong
_LONGEST: Final = 80
_SECOND: Final = 0.6  # as near as this, another name may have been meant...
_AHEAD: Final = 0.25  # ...unless the nearest one is nearer by this much
_MOST_BEGINS: Final = 8


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a misspelt one most likely means, or None."""
    words = {_plain(name): name for name in known}
    matches = difflib.get_close_matches(_plain(word[:100]), words, n=1, cutoff=0.6)
    if not matches:
        return None
    return words[matches[0]]


def unmatched_pattern(pattern: str, names: Sequence[str]) -> str:
    """Return what to write for a regular expression that matches no name from beginning to end.

    It is the pattern around a name that contains it, for users who expect a search; or the nearest
    name; or the pattern with its first part as a name has it; or how names begin.
    """
    containing = [name for name in names if pattern and re.search(pattern, name)]
    if containing:
        return (
            f"it must match the whole name, as in {containing[0]}; write {pattern}.* or "
            f".*{pattern}.*"
        )
    guess = nearest(pattern, names)
    if guess:
        return f"did you mean {guess}?"
    begins = list(dict.fromkeys(name.partition(".")[0] for name in names))
    first = re.split(r"\W", pattern, maxsplit=1)[0]
    rest = pattern[len(first) :]
    guess = nearest(first, begins)
    if guess and any(re.fullmatch(re.escape(guess) + rest, name) for name in names):
        return f"did you mean {guess}{rest}?"
    if len(begins) > _MOST_BEGINS:
        begins[_MOST_BEGINS:] = ["..."]
    if begins:
        return f"names begin with {', '.join(begins)}"
    return "remove it"


def only_alike(word: str, known: Iterable[str], *, least: float) -> str | None:
    """Return the one known word that is like a misspelt one, if no other comes near."""
    written = _plain(word[:100])
    # Two empty names, so that there are a nearest and a second one.
    ratios = [(0.0, ""), (0.0, "")]
    for name in known:
        ratios.append((difflib.SequenceMatcher(None, written, _plain(name)).ratio(), name))
    ratios.sort(reverse=True)
    best, nearest_name = ratios[0]
    second, _ = ratios[1]
    if best >= least and (second < _SECOND or best - second >= _AHEAD):
        return nearest_name
    return None


def means(written: str, known: str) -> bool:
    """Check whether the written name can only be a slip for the known one."""
    plain_written = _plain(written).replace(" ", "")
    plain_known = _plain(known)
    if plain_written == plain_known:
        return True
    shortest, longest = sorted((len(plain_written), len(plain_known)))
    if shortest < _SHORTEST or longest > _LONGEST:
        return False
    if _digits(plain_written) != _digits(plain_known):  # fp8 is no slip for fp16
        return False
    most_wrong = 2 if shortest >= _LONG else 1
    return distance(plain_written, plain_known) <= most_wrong


def _digits(name: str) -> list[str]:
    return sorted(letter for letter in name if letter.isdigit())


@cache
def distance(first: str, second: str) -> int:
    """Count the letters to add, take away, change or swap with their neighbour to get from one word
    to the other.
    """
    # Row i has the distances of the first i letters of one word to each beginning of the other.
    row_before_last: list[int] = []
    last_row: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        row_before_last = last_row
        last_row = row
        row = [i]
        for j, other in enumerate(second, start=1):
            cost = min(last_row[j] + 1, row[j - 1] + 1, last_row[j - 1] + (letter != other))
            is_swap = i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other
            if is_swap:
                cost = min(cost, row_before_last[j - 2] + 1)
            row.append(cost)
    return row[-1]


@cache
def likeness(word: str, other: str) -> float:
    """Return a number from 0 to 1; a name that holds the other one whole is a good guess as
    well.
    """
    plain_word = _plain(word[:100])
    plain_other = _plain(other[:100])
    if len(plain_word) >= _LONG_ENOUGH and plain_word in plain_other:
        return 0.8
    matcher = difflib.SequenceMatcher(None, plain_word, plain_other)
    if matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE:
        return matcher.ratio()
    return 0.0


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
