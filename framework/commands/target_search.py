"""A search for the modules that a run config names, without importing anything: `check` executes no
code of the user.

A missing module is a warning: the machine that trains may have it. A package that computes its
contents when it is imported is taken to have the module.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

import framework
from framework.config.base import Target
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.rules.devices import missing_fp8_package

# Packages of the train extra, which a laptop need not have.
_OF_TRAINING: Final = frozenset({"torch", "torchvision", "deepspeed", "numpy", "sklearn", "PIL"})


def missing_targets(config: RunConfig) -> Iterator[Problem]:
    """Yield a warning for each target with a module that train.py would not find here."""
    for name, section in _sections(config).items():
        if not isinstance(section, Target):
            continue
        target = getattr(section, "target", None)
        if not isinstance(target, str):
            continue
        missing = _missing_module(target.partition(":")[0])
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


def _sections(config: RunConfig) -> dict[str, Any]:
    """Return key -> section, with each monitor of the user's own as one."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    for number, monitor in enumerate(config.monitors.others):
        sections[f"monitors.others.{number}"] = monitor
    return sections


def missing_packages(config: RunConfig) -> Iterator[Problem]:
    """Yield a warning for each package that is not installed here: those of monitors, except
    TensorBoard, which comes with the train extra, and torchao.
    """
    for problem in missing_fp8_package(config.precision):
        yield replace(problem, severity="warning")
    for key, name in config.monitors.missing_packages(but="tensorboard"):
        reason = f"{name} is not installed here"
        fix = f"pip install {name} where it trains, or set {key}: false"
        yield Problem("package-missing", reason, fix, key, severity="warning")


def _missing_module(module: str) -> str | None:
    """Return the dotted name up to its first part that is missing; None if all parts are found, or
    if only an import could show that.
    """
    parts = module.split(".")
    if parts[0] in _OF_TRAINING:
        return None
    # train.py looks in the current folder and in its own first
    places = [os.getcwd(), str(Path(framework.__file__).parents[1])]
    try:
        for depth, part in enumerate(parts, start=1):
            spec = _find_spec(part, places, is_first=depth == 1)
            if spec is None:
                return ".".join(parts[:depth])
            places = list(spec.submodule_search_locations or ())  # empty for a single file
            if _has_no_folders(places):
                return None
    except (ImportError, ValueError, AttributeError):
        return None  # an import hook of the user, or a module without a spec
    return None


def _has_no_folders(places: Sequence[str]) -> bool:
    """Check that a package lies in an archive, or is made up by a finder."""
    return bool(places) and not any(map(os.path.isdir, places))


def _find_spec(name: str, places: Sequence[str], *, is_first: bool) -> ModuleSpec | None:
    """Find a module in the folders of its package, or anywhere if it is the first of its name."""
    spec = None
    if places:
        spec = importlib.machinery.PathFinder.find_spec(name, places)
    if spec is None and is_first:
        spec = importlib.util.find_spec(name)  # imports nothing for a name without dots
    return spec
