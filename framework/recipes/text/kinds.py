"""Sections of text: windows and pairs of segments of tokenised text, conversations, texts with
classes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from framework.config.base import CountFromEight, PositiveCount
from framework.config.data import BYTE_VOCAB_SIZE, DataKind, Dataset
from framework.config.paths import OptionalPath


class _Text(DataKind):
    """Text as numbered tokens, from a folder that ``prepare`` made."""

    looks_at_files: ClassVar[str] = "framework.recipes.text.files:look_at_tokens"
    path: OptionalPath = None
    """Folder made by ``dsf prepare``; left out: the sources of Python's own
    standard library, byte by byte (vocabulary 261), some megabytes that need no download and differ
    between Python versions.
    """

    def vocab_size(self) -> int | None:
        """Return the number of different tokens; None if only the files have it."""
        return BYTE_VOCAB_SIZE if self.path is None else None


class Text(_Text):
    """Windows of text for a causal language model (GPT): documents packed back to back, split by an
    end token.
    """

    builds: ClassVar[str] = "framework.recipes.text.windows:build"
    kind: Literal["text"] = "text"
    sequence_length: PositiveCount = 256
    """Tokens per sample."""

    def form(self) -> str:
        return "text"


class TextPairs(_Text):
    """Pairs of segments for BERT: [CLS] A [SEP] B [SEP], where B follows A in half of them, with
    hidden tokens to guess.
    """

    builds: ClassVar[str] = "framework.recipes.text.pairs:build"
    kind: Literal["text_pairs"] = "text_pairs"
    sequence_length: CountFromEight = 128
    """Tokens per sample, the three special ones included."""
    mask_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.15
    """Share of the tokens to be guessed; of these 80 % become [MASK], 10 % another token, 10 % stay
    (Devlin et al. 2018).
    """

    def form(self) -> str:
        return "text_pairs"

    def has_random_samples(self) -> bool:
        """Return True: segments and hidden tokens are drawn anew every epoch."""
        return True


class Labelled(Dataset):
    """Text by the line, that becomes tokens when the run starts."""

    looks_at_files: ClassVar[str] = "framework.recipes.text.files:look_at_tokenizer"
    path: OptionalPath = None
    eval_path: OptionalPath = None
    """File of the evaluation; left out: every so many of `path`."""
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of `path` that is for evaluation, where there is no `eval_path`."""
    tokenizer: OptionalPath = None
    """Folder of a tokenizer of transformers, or that `prepare` made; left out: bytes (vocabulary
    261).
    """
    sequence_length: PositiveCount = 512
    """Most tokens of a sample."""

    def vocab_size(self) -> int | None:
        """Return the number of different tokens; None if only the files have it."""
        return BYTE_VOCAB_SIZE if self.tokenizer is None else None


class Conversations(Labelled):
    """Conversations, of which a causal language model learns the assistant's answers: supervised
    fine-tuning.
    """

    builds: ClassVar[str] = "framework.recipes.text.conversations:build"
    kind: Literal["conversations"] = "conversations"
    path: OptionalPath = None
    """JSON lines of ``messages`` ({role, content}), of ``prompt`` and ``completion``, or of
    ShareGPT's ``conversations``; left out: questions that the documentation of Python's own library
    answers.
    """
    chat_template: str | None = None
    """Jinja, or a file of it; left out: the tokenizer's own. What is learnt stands between ``{%
    generation %}`` and ``{% endgeneration %}``; without them it is found by rendering conversations
    up to each answer.
    """
    packing: bool = False
    """Several conversations in a row of `sequence_length`, none of which sees another."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of longer conversations: their end is cut off, or they are left out."""

    def form(self) -> str:
        return "text"


class LabelledText(Labelled):
    """Texts and their classes, for a model that reads (tokens, segments, mask) or transformers'
    ``input_ids``.
    """

    builds: ClassVar[str] = "framework.recipes.text.labelled_text:build"
    kind: Literal["labelled_text"] = "labelled_text"
    path: OptionalPath = None
    """Rows of ``.jsonl`` or ``.csv``; left out: sentences of the documentation of Python's own
    library, of which the module is to be guessed (8 classes).
    """
    text: str = "text"
    """Column of the text."""
    label: str = "label"
    """Column of the class: its number from 0, or its name, which are numbered in alphabetical
    order.
    """

    def form(self) -> str:
        return "labelled_text"
