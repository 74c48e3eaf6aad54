"""Looks for the modules that a run config names, without importing anything: `check` executes
nobody's code.

What is not found is a warning: the machine that trains may have it. Only what names its place for
sure is said; a package that computes its contents when it is imported is believed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import framework
from framework.config.base import Target
from framework.config.run_config import RunConfig
from framework.errors import Problem

# Come with the train extra, which a laptop need not have.
_OF_TRAINING: Final = frozenset({"torch", "torchvision", "deepspeed", "numpy", "sklearn", "PIL"})


def missing_targets(config: RunConfig) -> Iterator[Problem]:
    """A warning for each target whose module is nowhere that train.py would look."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    sections |= {
        f"monitors.others.{number}": other for number, other in enumerate(config.monitors.others)
    }
    for name, section in sections.items():
        if isinstance(section, Target):
            target = getattr(section, "target", None)
        else:
            target = None
        if isinstance(target, str):
            missing = _missing_module(target.partition(":")[0])
        else:
            missing = None
        if missing is not None:
            reason = f"there is no module {missing} here"
            fix = f"check the spelling, or start where {missing.partition('.')[0]} can be imported"
            yield Problem(
                "target-not-found",
                reason,
                fix,
                key=f"{name}.target",
                value=target,
                severity="warning",
            )


def missing_sinks(config: RunConfig) -> Iterator[Problem]:
    """A warning for each monitor whose package is not here, but for TensorBoard: that comes with
    the train extra.
    """
    for key, name in config.monitors.missing_packages(but="tensorboard"):
        reason = f"{name} is not installed here"
        fix = f"pip install {name} where it trains, or set {key}: false"
        yield Problem("package-missing", reason, fix, key, severity="warning")


def _missing_module(module: str) -> str | None:
    """The first part of a dotted name that is nowhere; None where all of it is found, or nobody can
    tell.
    """
    parts = module.split(".")
    if parts[0] in _OF_TRAINING:
        return None
    # train.py looks in its own and the current folder first. Of a name without dots, finding
    # imports nothing.
    places = [os.getcwd(), str(Path(framework.__file__).parents[1])]
    try:
        for depth, part in enumerate(parts, start=1):
            if places:
                spec = importlib.machinery.PathFinder.find_spec(part, places)
            else:
                spec = None
            spec = spec or (importlib.util.find_spec(part) if depth == 1 else None)
            if spec is None:
                return ".".join(parts[:depth])
            places = list(spec.submodule_search_locations or ())  # none of a single file
            if places and not any(Path(place).is_dir() for place in places):
                return None  # in an archive, or made up by a finder
    except (
        ImportError,
        ValueError,
        AttributeError,
    ):  # a finder of somebody's own, or a module without a spec
        return None
    return None
