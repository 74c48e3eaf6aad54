"""Sentences of the pages have at most thirty words: one rule each, so that they are read once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.places import ROOT

MOST_WORDS = 30
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "tutorials").glob("*.md"))]
# Blocks of code and tables have lines of their own; a link counts as its text.
_NOT_PROSE = re.compile(
    r"^( *)```.*?^\1```|^ *\|.*?$|^ {4,}\S.*?$|<!--.*?-->", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NEXT_PARAGRAPH = re.compile(r"\n\s*\n|\n(?= *[-*] )|\n(?= *\d+\. )|\n(?=#)")
_NEXT_SENTENCE = re.compile(r"(?<=[.:;!?])\s+|(?<=[.:;!?]\*\*)\s+|(?<=[.:;!?]\))\s+")


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page with more than `MOST_WORDS` words; a colon and a semicolon end
    one as a full stop does, for a reader may rest there. Lists of short items may be longer.
    """
    prose = _LINK.sub(r"\1", _NOT_PROSE.sub("", text))
    found = []
    for paragraph in _NEXT_PARAGRAPH.split(prose):
        for sentence in _NEXT_SENTENCE.split(paragraph.replace("\n", " ")):
            if len(sentence.split()) > MOST_WORDS and not _is_list(sentence):
                found.append(" ".join(sentence.split()))
    return found


def _is_list(sentence: str) -> bool:
    """Tell whether a sentence is a list: at least four items of at most sixteen words each."""
    items = re.split(r", | -> | \+ ", sentence)
    return len(items) >= 4 and max(len(item.split()) for item in items) <= 16


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_sentences_are_short(path: Path) -> None:
    assert long_sentences(path.read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_found_in_prose_alone() -> None:
    many = " ".join(["word"] * 31)
    assert long_sentences(f"A short one. {many}. Another.") == [f"{many}."]
    assert long_sentences(f"```\n{many}\n```\n\n| {many} |\n\n[{many[:20]}]({many})") == []
