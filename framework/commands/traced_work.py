"""Work of a model of the user's own, and memory of an optimizer, for the command `plan`: found by a
child process (`framework.setup.trace`), and kept in the user's cache until the code, the config or
torch changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import framework
from framework.commands.torch_child import NoAnswerError, ask_child
from framework.config.base import Object, Target
from framework.plan.compiled_ops import cache_folder
from framework.plan.measured import (
    OptimizerState,
    code_of,
    keep_state,
    kept_state,
    stamps_of,
    state_file,
)
from framework.plan.plan import Plan
from framework.plan.work import Device, LayerWork, ModelWork
from framework.system.files import replace_text

# A pass over fake tensors takes milliseconds for each operation; `plan` is for somebody who waits.
_LONGEST_SECONDS: Final = 120.0
# Sections that the work of a micro-batch depends on.
_SECTIONS: Final = ("model", "data", "task", "precision", "batch", "parallel")


def find_own_work(plan: Plan) -> ModelWork | None:
    """Work of a plan's model on one micro-batch; None for a named model, which needs no pass.

    Raises:
        NoAnswerError: it cannot be found here.
    """
    if isinstance(plan.config.model, Object):
        raise NoAnswerError("it was handed over in Python")
    if not isinstance(plan.config.model, Target):
        return None
    device: Device = "cpu" if plan.cluster.device == "cpu" else "cuda"
    place = _cache_file(plan, device)
    try:
        if place is not None:
            return _work_of(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):  # not there, or of another version
        pass
    reported = ask_child(
        "trace", plan, longest_seconds=_LONGEST_SECONDS, needs=("torch", "deepspeed"), device=device
    )
    if "unknown" in reported:
        raise NoAnswerError(reported["unknown"])
    if place is not None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_text(place, json.dumps(reported["work"]))
        except OSError:  # a folder that may not be written to
            pass
    return _work_of(reported["work"])


def find_own_optimizer(plan: Plan) -> str:
    """Measure the memory of an optimizer of the user's own, unless it is known; returns why it is
    not known then.
    """
    optimizer = plan.config.optimizer
    if isinstance(optimizer, Object):
        return "the optimizer was handed over in Python"
    state_file.cache_clear()  # its code may have changed
    if not isinstance(optimizer, Target) or kept_state(optimizer) is not None:
        return ""
    try:
        found = ask_child(
            "trace",
            plan,
            longest_seconds=_LONGEST_SECONDS,
            needs=("torch", "deepspeed"),
            optimizer=True,
        )
    except NoAnswerError as error:
        return str(error)
    if "unknown" in found:
        return str(found["unknown"])
    keep_state(optimizer, OptimizerState(**found))
    return ""


def _work_of(values: Mapping[str, Any]) -> ModelWork:
    shapes = {
        kind: {name: tuple(shape) for name, shape in values[kind].items()}
        for kind in ("weights", "frozen")
    }
    return ModelWork(
        **{**values, **shapes, "parts": tuple(LayerWork(**part) for part in values["parts"])}
    )


def _cache_file(plan: Plan, device: Device) -> Path | None:
    """The place of a model's work, by a hash of all that it depends on; None where that is not
    known.
    """
    try:
        versions = [metadata.version("torch"), sys.version, str(framework.__version__)]
        config = plan.config.to_dict()
        training = config["training"]
        sections = {name: config.get(name) for name in _SECTIONS} | {
            key: training[key] for key in ("freeze", "lora")
        }
        names = [
            getattr(getattr(plan.config, name), "target", None)
            for name in ("model", "data", "task")
        ]
        files = [found for name in names if isinstance(name, str) for found in code_of(name)]
        own = [
            found
            for room in ("setup", "plan", "models")
            for found in stamps_of(Path(framework.__file__).parent / room)
        ]
    except (OSError, LookupError, metadata.PackageNotFoundError):
        return None
    known = json.dumps(
        [versions, sections, asdict(plan.layout), device, files, own], sort_keys=True, default=str
    )
    return (
        cache_folder(os.environ)
        / "dsf-trainer"
        / "work"
        / f"{hashlib.sha256(known.encode()).hexdigest()}.json"
    )
