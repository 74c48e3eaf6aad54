"""The data that a run config names, where it is on this machine: what is wrong with it, and how long the run will be.

Read are ``meta.json`` and the sizes of the files, not the tokens: a laptop needs neither numpy nor torch for it. A
folder that is not here is an error, and a warning where the data may be elsewhere: the machine that trains may have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from framework.config.data import ImageFolder, Text, TextPairs
from framework.config.load import Source
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
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.plan.rules.model import vocabulary_problem

_KEY = "data.path"


@dataclass(frozen=True)
class TextFound:
    """Facts about the text: `num_train_samples` is None where nothing is known."""

    problems: tuple[Problem, ...] = ()
    num_train_samples: int | None = None


def plan_with_text(config: RunConfig, cluster: Cluster, *, source: Source, data_elsewhere: bool = True) -> Plan:
    """Make the plan with the size of the text, and with what is wrong with the data.

    Args:
        config: of the run.
        cluster: where it is to run.
        source: of its values.
        data_elsewhere: a folder that is not here is a warning, no error.

    Raises:
        ConfigError: with every problem found.
    """
    found = look_at_text(config, data_elsewhere=data_elsewhere)
    problems = [source.locate(problem) for problem in found.problems]
    errors = [problem for problem in problems if problem.severity == "error"]
    try:
        plan = make_plan(config, cluster, num_train_samples=found.num_train_samples, source=source)
    except ConfigError as error:
        raise ConfigError([*error.problems, *errors]) from None
    if errors:
        raise ConfigError(errors)
    return replace(plan, findings=(*plan.findings, *problems))


def look_at_text(config: RunConfig, *, data_elsewhere: bool = True) -> TextFound:
    """Read what the folder says of itself; of images only whether their folders are here."""
    data = config.data
    if not isinstance(data, (Text, TextPairs)):
        return TextFound(tuple(_missing_images(config, data_elsewhere=data_elsewhere)))
    if data.path is None:
        return TextFound()
    try:
        folder, meta = read_meta(data.path, _KEY)
    except ConfigError as error:
        return TextFound(tuple(_not_here(each, data_elsewhere=data_elsewhere) for each in error.problems))
    problems = [*size_problems(folder, meta, data.path, _KEY), *_unfit(config, data, meta)]
    num_tokens, length = meta.parts["train"].num_tokens, data.sequence_length
    num_samples = (num_windows if isinstance(data, Text) else num_pairs)(num_tokens, length)
    return TextFound(tuple(problems), num_samples or None)


def _missing_images(config: RunConfig, *, data_elsewhere: bool) -> Iterator[Problem]:
    data = config.data
    if not isinstance(data, ImageFolder):
        return
    for key, name, value in (
        ("data.root", "", data.root),
        ("data.train_dir", data.train_dir, data.train_dir),
        ("data.eval_dir", data.eval_dir, data.eval_dir),
    ):
        folder = os.path.join(os.path.expanduser(data.root), name)  # noqa: PTH111, PTH118 - pathlib raises where ~user is nobody
        if not os.path.isdir(folder):  # noqa: PTH112 - and where the name is too long
            yield _not_here(Problem("dataset-not-found", "", "", key, value), data_elsewhere=data_elsewhere)
            if key == "data.root":
                return


def _not_here(problem: Problem, *, data_elsewhere: bool) -> Problem:
    if problem.kind not in ("text-not-found", "dataset-not-found"):
        return problem
    make = "make it with python -m framework prepare" if problem.kind == "text-not-found" else "name the folder"
    if data_elsewhere:
        return replace(
            problem, severity="warning", reason="there is no such folder here", fix=f"{make}, or start where it is"
        )
    fix = f"{make}; where another machine has it: check --data_elsewhere"
    return replace(problem, reason="there is no such folder here", fix=fix)


def _unfit(config: RunConfig, data: Text | TextPairs, meta: Meta) -> Iterator[Problem]:
    """As the datasets and the run itself would refuse it."""
    for name, part in meta.parts.items():
        if isinstance(data, Text):
            yield from too_short(name, num_tokens=part.num_tokens, sequence_length=data.sequence_length)
        else:
            yield from one_document(name, num_documents=part.num_documents, path=data.path)
    if isinstance(data, TextPairs):
        yield from no_pair_tokens(meta.special_tokens, path=data.path)
    yield from vocabulary_problem(meta.vocab_size, config.model)
