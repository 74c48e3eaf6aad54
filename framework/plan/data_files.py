"""The data that a run config names, where it is on this machine: what is wrong with it, and how
long the run will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from framework.config.data import Dataset
from framework.config.model import ModelSection
from framework.config.run_config import RunConfig
from framework.errors import Problem

# Function of a kind of data: its section and the model's -> problems, and training samples.
LookAtFiles = Callable[[Any, ModelSection], tuple[Iterable[Problem], int | None]]


def look_at_data(
    config: RunConfig, *, data_elsewhere: bool = True
) -> tuple[list[Problem], int | None]:
    """Look at the files of the data by the function that its kind names (`Dataset.looks_at_files`).

    Args:
        config: of the run.
        data_elsewhere: report a missing folder as a warning, since another machine may have it;
            otherwise as an error.

    Returns:
        The problems of the data, and the number of training samples, None if it is not known.
    """
    data = config.data
    if not isinstance(data, Dataset) or not data.looks_at_files:
        return [], None
    module_name, _, name = data.looks_at_files.partition(":")
    look: LookAtFiles = getattr(import_module(module_name), name)
    problems, num_samples = look(data, config.model)
    return [_not_here(problem, data_elsewhere=data_elsewhere) for problem in problems], num_samples


def _not_here(problem: Problem, *, data_elsewhere: bool) -> Problem:
    """Return a problem as it is, or that of a missing folder with a fix for `data_elsewhere`."""
    if problem.kind not in ("text-not-found", "dataset-not-found"):
        return problem
    fix = "name the folder"
    if problem.kind == "text-not-found":
        fix = "make it with dsf prepare"
    severity = problem.severity
    if data_elsewhere:
        fix += ", or start where it is"
        severity = "warning"
    else:
        fix += "; where another machine has it: check --data_elsewhere"
    return replace(problem, severity=severity, reason="there is no such folder here", fix=fix)
