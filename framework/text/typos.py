"""What a misspelt word most likely means. A module of its own, because it needs nothing that is slow to import."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    words = {name.lower().replace("_", ""): name for name in known}
    matches = difflib.get_close_matches(word[:100].lower().replace("_", ""), words, n=1, cutoff=0.6)
    return words[matches[0]] if matches else None
