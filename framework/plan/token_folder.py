"""The data that a run config names, where it is on this machine: what is wrong with it, and how
long the run will be.

Read are ``meta.json`` and the sizes of the files, not the tokens: a laptop needs neither numpy nor
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
    """Read what a folder of text says of itself; of images only whether their folders are here.

    Args:
        config: of the run.
        data_elsewhere: a folder that is not here is a warning, no error.

    Returns:
        What is wrong with the data, and the number of training samples; None where it is not known.
    """
    data = config.data
    if isinstance(data, ImageFolder):
        return [
            _not_here(problem, data_elsewhere=data_elsewhere) for problem in _missing_images(data)
        ], None
    if not isinstance(data, (Text, TextPairs)) or data.path is None:
        return [], None
    try:
        folder, meta = read_meta(data.path, _KEY)
    except ConfigError as error:
        return [_not_here(each, data_elsewhere=data_elsewhere) for each in error.problems], None
    if isinstance(data, Text):
        count = num_windows
    else:
        count = num_pairs
    problems = [*size_problems(folder, meta, data.path, _KEY), *_unfit(config, data, meta)]
    return problems, count(meta.parts["train"].num_tokens, data.sequence_length) or None


def _missing_images(data: ImageFolder) -> Iterator[Problem]:
    for name in ("root", "train_dir", "eval_dir"):
        value = getattr(data, name)
        folder = os.path.join(os.path.expanduser(data.root), "" if name == "root" else value)  # noqa: PTH111, PTH118 - pathlib raises where ~user is nobody
        if not os.path.isdir(folder):  # noqa: PTH112 - and where the name is too long
            yield Problem("dataset-not-found", "", key=f"data.{name}", value=value)
            if name == "root":
                return


def _not_here(problem: Problem, *, data_elsewhere: bool) -> Problem:
    if problem.kind not in ("text-not-found", "dataset-not-found"):
        return problem
    if problem.kind == "text-not-found":
        fix = "make it with python -m framework prepare"
    else:
        fix = "name the folder"
    fix += (
        ", or start where it is"
        if data_elsewhere
        else "; where another machine has it: check --data_elsewhere"
    )
    severity = "warning" if data_elsewhere else problem.severity
    return replace(problem, severity=severity, reason="there is no such folder here", fix=fix)


def _unfit(config: RunConfig, data: Text | TextPairs, meta: Meta) -> Iterator[Problem]:
    """As the datasets and the run itself would refuse it."""
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
