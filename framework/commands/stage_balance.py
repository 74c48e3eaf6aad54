"""The balance of a pipeline's stages, for the command `plan`. The layers of a named model are known
from its work. For others, and for tasks of the user's own, a child process with torch,
`framework.setup.pipeline_stages`, builds the model on processors and reports its stages. Nothing
trains, and no device is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.commands.torch_child import NoAnswerError, ask_child
from framework.config.load import Source
from framework.config.precision import BF16, FP16
from framework.errors import ConfigError, Problem
from framework.plan.balance import LayerFacts, cut, needs_same_groups
from framework.plan.plan import Plan
from framework.plan.work import work_of

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
    """Find the cut of a plan's model, and the weight of each stage. Where the layers are not known
    it waits for a child process, at most `longest_seconds`.

    Raises:
        ConfigError: the model cannot be cut as described.
    """
    layers = _known_layers(plan)
    if layers:
        config = plan.config
        table = cut(layers, config.parallel, same_groups=needs_same_groups(config))
        if isinstance(table, Problem):
            raise ConfigError(source.locate(table))
        return StageBalance(tuple(table.lines()), table.to_dict(), _notes(plan))
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


def _known_layers(plan: Plan) -> list[LayerFacts]:
    """List the layers of a named model; empty for a model or a task of the user's own, where
    buffers or adapters add bytes to some layers, and where a cut goes by types of layers.
    """
    config = plan.config
    work = work_of(plan)
    if work is None or work.buffer_bytes or config.training.lora is not None:
        return []
    if config.parallel.partition.startswith("type:") or config.task.is_own_code:
        return []
    width = 4
    if isinstance(config.precision, BF16 | FP16):
        width = 2
    known = []
    for facts, layer in zip(work.facts, work.layers[:-1], strict=True):
        num_all = facts.num_params + work.num_frozen(layer)
        known.append(replace(facts, param_bytes=width * num_all))
    return known


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
