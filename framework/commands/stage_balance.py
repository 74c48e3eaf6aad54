"""The balance of a pipeline's stages, for the command `plan`: a child process,
`framework.setup.pipeline_stages`, builds the model on processors and looks at it, because that takes torch.
Nothing trains, and no device is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from framework.commands.torch_child import NoAnswerError, ask_child
from framework.config.load import Source
from framework.errors import ConfigError, Problem
from framework.plan.plan import Plan

# Building a model of a billion weights on one core takes about as long; `plan` is for somebody who
# waits.
_LONGEST_SECONDS: Final = 120.0


@dataclass(frozen=True)
class StageBalance:
    """Facts about the stages before the run, where any are known: lines for a person, the table as
    ``plan.json`` has it, and notes on why nothing is known, or what may still change.
    """

    lines: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] | None = None
    notes: tuple[Problem, ...] = ()


def find_stage_balance(
    plan: Plan, *, source: Source, longest_seconds: float = _LONGEST_SECONDS
) -> StageBalance:
    """Find the cut of a plan's model, and the weight of each stage.

    Raises:
        ConfigError: the model cannot be cut as described.
    """
    try:
        reported = ask_child(
            "stages", plan, longest_seconds=longest_seconds, needs=("torch", "deepspeed")
        )
    except NoAnswerError as error:
        return _unknown(plan, str(error))
    if "problems" in reported:
        raise ConfigError(source.locate(Problem.from_dict(each)) for each in reported["problems"])
    if "missing" in reported:
        return _unknown(plan, str(source.locate(Problem.from_dict(reported["missing"][0]))))
    parallel = plan.config.parallel
    notes = []
    if parallel.partition == "measured" and parallel.stages is None:
        # Times on another machine say nothing of those on the devices of the run, so nothing is
        # timed here.
        reason = (
            "the layers are timed on the device when the run starts; until then the stages "
            "share the parameters"
        )
        notes = [
            _note(
                "stages-measured-at-start",
                "partition",
                "measured",
                reason,
                "the run tells where it cuts",
            )
        ]
    return StageBalance(tuple(reported["lines"]), reported["pipeline"], tuple(notes))


def _unknown(plan: Plan, reason: str) -> StageBalance:
    unknown = f"what each stage will hold is not known here: {reason}"
    note = _note(
        "stages-unknown",
        "pipe",
        plan.config.parallel.pipe,
        unknown,
        "the run tells it when it starts",
    )
    return StageBalance(notes=(note,))


def _note(kind: str, key: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(kind, reason, fix, key=f"parallel.{key}", value=value, severity="note")
