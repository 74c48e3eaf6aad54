"""Forms of samples, which data gives and models and tasks take: images, windows of text, pairs of
segments, texts with classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Form -> its name in a message.
NAMES: Final[Mapping[str, str]] = {
    "images": "images",
    "text": "windows of text",
    "text_pairs": "pairs of text segments",
    "labelled_text": "texts and their classes",
}
# Form -> a kind of each section for it, to write instead.
KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "images": {"model": "lenet", "data": "digits", "task": "classification"},
    "text": {"model": "gpt", "data": "text", "task": "causal_lm"},
    "text_pairs": {"model": "bert", "data": "text_pairs", "task": "masked_lm"},
    "labelled_text": {
        "model": "bert, with num_classes",
        "data": "labelled_text",
        "task": "classification",
    },
}
