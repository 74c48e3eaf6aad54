"""The balance of a pipeline's stages, for the command `plan`: told by a child process, because it takes torch and the
model.

    this process --config and cluster, JSON--> python -m framework.setup.stages --the table, or why there is none,
    JSON--> here

The model is built and looked at on processors only; nothing trains, and no device is touched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from framework.config.load import Source
from framework.errors import ConfigError, Problem
from framework.plan.plan import Plan

# Building a model of a billion weights on one core takes about as long; `plan` is for somebody who waits.
_LONGEST_SECONDS: Final = 120.0
_NEEDED: Final = ("torch", "deepspeed")


@dataclass(frozen=True)
class StageBalance:
    """Facts about the stages before the run.

    Attributes:
        lines: one per stage, for a person; empty where nothing is known.
        pipeline: the table as ``plan.json`` has it; None where nothing is known.
        notes: why nothing is known, or what may still change.
    """

    lines: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] | None = None
    notes: tuple[Problem, ...] = ()


def find_stage_balance(plan: Plan, *, source: Source, longest_seconds: float = _LONGEST_SECONDS) -> StageBalance:
    """Find the cut of a plan's model, and the weight of each stage.

    Raises:
        ConfigError: the model cannot be cut as described.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return _unknown(plan, f"it takes {lacking[0]}, which is not installed")
    question = {"config": plan.config.to_dict(), "cluster": asdict(plan.cluster)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "framework.setup.stages"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={"DS_ACCELERATOR": "cpu", **os.environ},
            timeout=longest_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _unknown(plan, f"looking at the model took more than {longest_seconds:g} s")
    except OSError as error:
        return _unknown(plan, f"{sys.executable} cannot be started: {error.strerror}")
    return _read(plan, done, source)


def _read(plan: Plan, done: subprocess.CompletedProcess[str], source: Source) -> StageBalance:
    try:
        reported = json.loads(done.stdout)
    except ValueError:
        stated = done.stderr.strip().splitlines()
        return _unknown(
            plan, f"looking at the model ended with code {done.returncode}{f': {stated[-1]}' if stated else ''}"
        )
    if "problems" in reported:
        raise ConfigError(source.locate(Problem.from_dict(each)) for each in reported["problems"])
    if "missing" in reported:
        return _unknown(plan, str(source.locate(Problem.from_dict(reported["missing"][0]))))
    return StageBalance(tuple(reported["lines"]), reported["pipeline"], tuple(_may_change(plan)))


def _unknown(plan: Plan, reason: str) -> StageBalance:
    note = Problem(
        kind="stages-unknown",
        key="parallel.pipe",
        value=plan.config.parallel.pipe,
        severity="note",
        reason=f"what each stage will hold is not known here: {reason}",
        fix="the run tells it when it starts",
    )
    return StageBalance(notes=(note,))


def _may_change(plan: Plan) -> list[Problem]:
    """Times on another machine say nothing of those on the devices of the run, so nothing is timed here."""
    parallel = plan.config.parallel
    if parallel.partition != "measured" or parallel.stages is not None:
        return []
    return [
        Problem(
            kind="stages-measured-at-start",
            key="parallel.partition",
            value="measured",
            severity="note",
            reason="the layers are timed on the device when the run starts; until then the stages share the parameters",
            fix="the run tells where it cuts",
        )
    ]
