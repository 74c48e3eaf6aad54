"""Work of a model of the user's own, and memory of an optimizer, for the command `plan`.

A child process (`framework.setup.trace`) measures them. They are kept in the user's cache until
the code, the config or torch changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import framework
from framework.commands.torch_child import NoAnswerError, ask_child
from framework.config.base import Object
from framework.config.groups import refuse_unmatched_groups
from framework.errors import ConfigError, Problem
from framework.plan.measured import (
    code_of,
    keep_state,
    kept_state,
    stamps_of,
    state_file,
)
from framework.plan.optimizer_state import OptimizerState
from framework.plan.plan import Plan
from framework.plan.rank_work import Collective, WorkOfRank
from framework.plan.work import Device, LayerWork, ModelWork
from framework.system.cache_folders import cache_folder
from framework.system.files import replace_text

# A pass over fake tensors takes milliseconds for each operation; the user of `plan` waits for it,
# and for another one with each size of groups.
_LONGEST_SECONDS: Final = 120.0
# Sections that the work of a micro-batch depends on.
_SECTIONS: Final = ("model", "data", "task", "precision", "batch", "parallel")
_TRAINING_KEYS: Final = ("freeze", "lora", "mlp_tile")


def find_own_work(plan: Plan, sizes: Sequence[tuple[int, int]] = ()) -> ModelWork | None:
    """Return the work of a plan's model on one micro-batch, or None for a named model, which needs
    no pass. Waits for a child process, at most `_LONGEST_SECONDS` for each pass, unless the work is
    kept.

    Args:
        plan: of the run.
        sizes: of tensor and sequence groups beside the plan's: the work of their ranks comes too.

    Raises:
        NoAnswerError: it cannot be measured here.
        ConfigError: the run cannot work: a pattern of names has no weight, or ranks cannot share
            the experts.
    """
    if isinstance(plan.config.model, Object):
        raise NoAnswerError("it was handed over in Python")
    if not plan.config.model.is_own_code:
        return None
    device: Device = "cuda"
    if plan.cluster.device == "cpu":
        device = "cpu"
    own_sizes = (plan.layout.tensor_size, plan.layout.sequence_size)
    all_sizes = sorted({own_sizes, *sizes} - {(1, 1)})
    place = _cache_file(plan, device, all_sizes)
    answer = _kept_answer(place)
    if answer is None:
        needs = ("torch", "deepspeed")
        answer = ask_child(
            "trace",
            plan,
            longest_seconds=_LONGEST_SECONDS * (1 + len(all_sizes)),
            needs=needs,
            device=device,
            sizes=all_sizes,
        )
        if "work" in answer or answer.get("is_final"):
            _keep_answer(place, answer)
    if "problems" in answer:
        raise ConfigError(Problem.from_dict(each) for each in answer["problems"])
    if "unknown" in answer:
        raise NoAnswerError(answer["unknown"])
    return _work_of(answer["work"])


def refuse_unlike_model(plan: Plan, work: ModelWork) -> None:
    """Refuse a plan with parameter groups that match no weight of its model, or with tensor or
    sequence groups that cannot divide it. Raises ConfigError.
    """
    refuse_unmatched_groups(work.weights, plan.config.optimizer)
    share = work.of_rank(plan.layout.tensor_size, plan.layout.sequence_size)
    if share is not None and share.problem is not None:
        raise ConfigError([share.problem])


def _kept_answer(place: Path | None) -> dict[str, Any] | None:
    """Return the child's answer in a file of the cache: the work, the problems, or why nothing is
    known; None if there is none, or of another version.
    """
    if place is None:
        return None
    try:
        answer = json.loads(place.read_text(encoding="utf-8"))
        if "work" in answer:
            _work_of(answer["work"])
        elif not answer["is_final"]:
            return None
    except (OSError, ValueError, TypeError, KeyError):  # not there, or of another version
        return None
    return dict(answer)


def _keep_answer(place: Path | None, answer: Mapping[str, Any]) -> None:
    if place is None:
        return
    with suppress(OSError):  # a folder that may not be written to
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_text(place, json.dumps(answer))


def find_own_optimizer(plan: Plan) -> str:
    """Measure and keep the memory of an optimizer of the user's own, unless it is known; returns
    why it cannot be, or "". Waits for a child process, at most `_LONGEST_SECONDS`.

    Raises:
        ConfigError: the optimizer does not take its arguments.
    """
    optimizer = plan.config.optimizer
    if isinstance(optimizer, Object):
        return "the optimizer was handed over in Python"
    state_file.cache_clear()  # its code may have changed
    factory = optimizer.own_factory()
    if factory is None or kept_state(factory) is not None:
        return ""
    try:
        state = ask_child(
            "trace",
            plan,
            longest_seconds=_LONGEST_SECONDS,
            needs=("torch", "deepspeed"),
            optimizer=True,
        )
    except NoAnswerError as error:
        return str(error)
    if "problems" in state:
        raise ConfigError(Problem.from_dict(each) for each in state["problems"])
    if "unknown" in state:
        return str(state["unknown"])
    keep_state(factory, OptimizerState(**state))
    return ""


def _work_of(values: Mapping[str, Any]) -> ModelWork:
    """Build the work of its plain values.

    Raises:
        KeyError: they lack a figure, as an earlier version wrote them.
    """
    fields = dict(values)
    fields["of_ranks"] = tuple(_work_of_rank(share) for share in values["of_ranks"])
    for part in values["parts"]:
        missing = LayerWork.__dataclass_fields__.keys() - part.keys()
        if missing:
            raise KeyError(*missing)
    for kind in ("weights", "frozen"):
        fields[kind] = {name: tuple(shape) for name, shape in values[kind].items()}
    fields["parts"] = tuple(LayerWork(**part) for part in values["parts"])
    fields["collectives"] = tuple(Collective(**each) for each in values["collectives"])
    return ModelWork(**fields)


def _work_of_rank(values: Mapping[str, Any]) -> WorkOfRank:
    work = None
    if values["work"] is not None:
        work = _work_of(values["work"])
    problem = None
    if values["problem"] is not None:
        problem = Problem.from_dict(values["problem"])
    return WorkOfRank(**{**values, "work": work, "problem": problem})


def _cache_file(plan: Plan, device: Device, sizes: Sequence[tuple[int, int]]) -> Path | None:
    """Return the file of a model's work, and that of ranks of groups of these sizes, named by a
    hash of everything that the work depends on, or None if that is not known.
    """
    try:
        versions = [metadata.version("torch"), sys.version, str(framework.__version__)]
        config = plan.config.to_dict()
        sections = {name: config.get(name) for name in _SECTIONS}
        for name in _TRAINING_KEYS:
            sections[name] = config["training"][name]
        user_files = _user_files(plan)
        package_files = _package_files()
    except (OSError, LookupError, metadata.PackageNotFoundError):
        return None
    dependencies = json.dumps(
        [versions, sections, asdict(plan.layout), device, sizes, user_files, package_files],
        sort_keys=True,
        default=str,
    )
    digest = hashlib.sha256(dependencies.encode()).hexdigest()
    return cache_folder(os.environ) / "dsf-trainer" / "work" / f"{digest}.json"


def _user_files(plan: Plan) -> list[Any]:
    """Return the code of the user's own that a plan's model, data and task are built by."""
    files: list[Any] = []
    for section in (plan.config.model, plan.config.data, plan.config.task):
        own_factory = section.own_factory()
        if own_factory is not None:
            files += code_of(own_factory.path)
    return files


def _package_files() -> list[Any]:
    """Return the stamps of the framework's files that measure the work."""
    package = Path(framework.__file__).parent
    files: list[Any] = []
    for room in ("setup", "plan", "models", "engine"):
        files += stamps_of(package / room)
    return files
