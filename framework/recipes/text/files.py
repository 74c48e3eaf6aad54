"""Files of text, as far as a laptop looks at them: of tokenised text ``meta.json`` and the sizes of
the files, of other text the numbers of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from framework.config.model import ModelSection
from framework.data.token_files import (
    TOKENIZER_FILE,
    Meta,
    no_pair_tokens,
    num_pairs,
    num_windows,
    one_document,
    read_meta,
    size_problems,
    too_short,
)
from framework.data.tokenizer_numbers import read_numbers
from framework.errors import ConfigError, Problem
from framework.plan.rules.model import vocabulary_problem
from framework.recipes.text.kinds import Labelled, Text, TextPairs

_KEY: Final = "data.path"


def look_at_tokens(data: Text | TextPairs, model: ModelSection) -> tuple[list[Problem], int | None]:
    """Return what is wrong with the folder, and the number of its training samples: None if it
    cannot be read, has no sample, or no folder is set.
    """
    if data.path is None:
        return [], None
    try:
        folder, meta = read_meta(data.path, _KEY)
    except ConfigError as error:
        return list(error.problems), None
    problems = list(size_problems(folder, meta, data.path, _KEY))
    problems += _unfit(data, model, meta)
    count = num_windows if isinstance(data, Text) else num_pairs
    return problems, count(meta.parts["train"].num_tokens, data.sequence_length) or None


def look_at_tokenizer(data: Labelled, model: ModelSection) -> tuple[list[Problem], None]:
    """Return the problem of a tokenizer with more tokens than the model has; and None, as samples
    are not counted.
    """
    if data.tokenizer is None:
        return [], None
    path = data.tokenizer
    try:
        file = Path(path).expanduser() / TOKENIZER_FILE
        numbers = read_numbers(file, key="data.tokenizer", value=path)
    except RuntimeError:  # ~user without a user
        return [], None
    except ConfigError as error:
        return list(error.problems), None
    return list(vocabulary_problem(max(numbers, default=-1) + 1, model)), None


def _unfit(data: Text | TextPairs, model: ModelSection, meta: Meta) -> Iterator[Problem]:
    """Find what the datasets and the run itself would refuse."""
    for name, part in meta.parts.items():
        if isinstance(data, Text):
            yield from too_short(
                name, num_tokens=part.num_tokens, sequence_length=data.sequence_length
            )
        else:
            yield from one_document(name, num_documents=part.num_documents, path=data.path)
    if isinstance(data, TextPairs):
        yield from no_pair_tokens(meta.special_tokens, path=data.path)
    yield from vocabulary_problem(meta.vocab_size, model)
