"""The balance of a pipeline's stages, for the command `plan`. A child process with torch,
`framework.setup.pipeline_stages`, builds the model on processors and reports its stages. Nothing
trains, and no device is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from framework.commands.torch_child import NoAnswerError, ask_child
from framework.config.load import Source
from framework.errors import ConfigError, Problem
from framework.plan.plan import Plan

# Building a model of a billion weights on one core takes about as long; the user of `plan` waits.
_LONGEST_SECONDS: Final = 120.0


@dataclass(frozen=True)
class StageBalance:
    """Facts about the stages before the run.

    Attributes:
        lines: to print; empty if the stages are not known.
        pipeline: the same as plain values, as in ``plan.json``.
        notes: why the stages are not known, or what may still change.
    """

    lines: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] | None = None
    notes: tuple[Problem, ...] = ()


def find_stage_balance(
    plan: Plan, *, source: Source, longest_seconds: float = _LONGEST_SECONDS
) -> StageBalance:
    """Find the cut of a plan's model, and the weight of each stage. Waits for a child process, at
    most `longest_seconds`.

    Raises:
        ConfigError: the model cannot be cut as described.
    """
    try:
        reported = ask_child(
            "pipeline_stages", plan, longest_seconds=longest_seconds, needs=("torch", "deepspeed")
        )
    except NoAnswerError as error:
        return _unknown(plan, str(error))
    if "problems" in reported:
        raise ConfigError(source.locate(Problem.from_dict(each)) for each in reported["problems"])
    if "missing" in reported:
        return _unknown(plan, str(source.locate(Problem.from_dict(reported["missing"][0]))))
    return StageBalance(tuple(reported["lines"]), reported["pipeline"], _notes(plan))


def _notes(plan: Plan) -> tuple[Problem, ...]:
    """Note a cut by measured times: nothing is timed here, the run's devices are others."""
    parallel = plan.config.parallel
    if parallel.partition != "measured" or parallel.stages is not None:
        return ()
    reason = (
        "the layers are timed on the device when the run starts; until then the stages "
        "share the parameters"
    )
    fix = "the run tells where it cuts"
    return (_note("stages-measured-at-start", "partition", "measured", reason, fix),)


def _unknown(plan: Plan, reason: str) -> StageBalance:
    reason = f"what each stage will hold is not known here: {reason}"
    fix = "the run tells it when it starts"
    note = _note("stages-unknown", "pipe", plan.config.parallel.pipe, reason, fix)
    return StageBalance(notes=(note,))


def _note(kind: str, key: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(kind, reason, fix, key=f"parallel.{key}", value=value, severity="note")
