"""The data that a run config names, where it is on this machine: what is wrong with it, and how
long the run will be.

It reads ``meta.json`` and the sizes of the files, not the tokens: a laptop needs neither numpy nor
torch for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from framework.config.data import ImageFolder, Text, TextPairs
from framework.config.run_config import RunConfig
from framework.data.token_files import (
    Meta,
    no_pair_tokens,
    num_pairs,
    num_windows,
    one_document,
    read_meta,
    size_problems,
    too_short,
)
from framework.errors import ConfigError, Problem
from framework.plan.rules.model import vocabulary_problem

_KEY = "data.path"


def look_at_data(
    config: RunConfig, *, data_elsewhere: bool = True
) -> tuple[list[Problem], int | None]:
    """Read the description of a folder of text; of images check only whether their folders are
    here.

    Args:
        config: of the run.
        data_elsewhere: a folder that is not here is a warning, no error.

    Returns:
        What is wrong with the data, and the number of training samples; None if it is not known.
    """
    data = config.data
    if isinstance(data, ImageFolder):
        missing = list(_missing_images(data))
        return [_not_here(problem, data_elsewhere=data_elsewhere) for problem in missing], None
    if not isinstance(data, (Text, TextPairs)) or data.path is None:
        return [], None
    try:
        folder, meta = read_meta(data.path, _KEY)
    except ConfigError as error:
        problems = [_not_here(problem, data_elsewhere=data_elsewhere) for problem in error.problems]
        return problems, None
    problems = list(size_problems(folder, meta, data.path, _KEY))
    problems += _unfit(config, data, meta)
    count = num_windows if isinstance(data, Text) else num_pairs
    return problems, count(meta.parts["train"].num_tokens, data.sequence_length) or None


def _missing_images(data: ImageFolder) -> Iterator[Problem]:
    for name in ("root", "train_dir", "eval_dir"):
        value = getattr(data, name)
        # pathlib raises for ~user without a user, and for names that are too long
        folder = os.path.expanduser(data.root)  # noqa: PTH111
        if name != "root":
            folder = os.path.join(folder, value)  # noqa: PTH118
        if not os.path.isdir(folder):  # noqa: PTH112
            yield Problem("dataset-not-found", "", key=f"data.{name}", value=value)
            if name == "root":
                return


def _not_here(problem: Problem, *, data_elsewhere: bool) -> Problem:
    if problem.kind not in ("text-not-found", "dataset-not-found"):
        return problem
    fix = "name the folder"
    if problem.kind == "text-not-found":
        fix = "make it with python -m framework prepare"
    severity = problem.severity
    if data_elsewhere:
        fix += ", or start where it is"
        severity = "warning"
    else:
        fix += "; where another machine has it: check --data_elsewhere"
    return replace(problem, severity=severity, reason="there is no such folder here", fix=fix)


def _unfit(config: RunConfig, data: Text | TextPairs, meta: Meta) -> Iterator[Problem]:
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
    yield from vocabulary_problem(meta.vocab_size, config.model)
