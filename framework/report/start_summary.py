"""The summary that rank 0 prints before training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config.training import Checkpoint
from framework.errors import counted
from framework.plan.compiling import compile_choice
from framework.plan.plan import Plan, describe_packed_rows
from framework.system.log import print_line

if TYPE_CHECKING:
    from framework.config.training import Monitors
    from framework.plan.balance import StageTable


def _other_size(plan: Plan) -> Iterator[str]:
    """Note training data of another size than the config expects."""
    expected = plan.config.data.num_train_samples()
    num_found = plan.length.num_train_samples
    if None not in (expected, num_found) and expected != num_found:
        yield (
            f"note: {num_found:,} training samples found ({expected:,} expected); "
            "steps and schedule follow what was found"
        )


def print_start(
    plan: Plan,
    folder: Path,
    *,
    start_step: int,
    stages: StageTable | None = None,
    evaluates: bool = True,
    num_params: int | None = None,
    num_trained: int | None = None,
) -> None:
    """Print the plan's warnings and notes, the balance of the stages, and one line about the run
    that begins, with sizes below it if they are known.

    Args:
        plan: of the run.
        folder: its folder.
        start_step: the step that it starts from.
        stages: of its pipeline.
        evaluates: whether there is evaluation data, which is not in the plan.
        num_params: size of the model.
        num_trained: how many of them are trained; None: all.
    """
    for line in _lines_before_start(plan, stages, evaluates=evaluates):
        print_line(line)
    begin = f"from step {start_step} " if start_step else ""
    steps = counted(plan.length.total_steps or 0, "step")
    print_line(
        f"training {plan.config.run.name} {begin}on {plan.cluster}: {steps}, {plan.layout}, "
        f"ZeRO {plan.config.zero.stage}, {plan.config.precision.dtype} -> {folder}"
    )
    if num_params is not None:
        if num_trained is None:
            num_trained = num_params
        print_rows(_start_rows(plan, num_params, num_trained))


def _lines_before_start(plan: Plan, stages: StageTable | None, *, evaluates: bool) -> Iterator[str]:
    """Yield the plan's warnings and notes, and the balance of the stages."""
    for finding in plan.findings:
        yield f"{finding.severity}: {finding}"
    yield from _other_size(plan)
    if not evaluates:
        yield from _without_evaluation_data(plan)
    if stages:
        yield from stages.lines()


def _start_rows(plan: Plan, num_params: int, num_trained: int) -> Iterator[tuple[str, str]]:
    """Yield label and text of what a run begins with: model, compiling, length, memory estimate,
    checkpoints and metrics.
    """
    config = plan.config
    yield "model", _model_text(config.model, num_params, num_trained)
    choice = compile_choice(config, plan.cluster.device, os.environ)
    compiled = choice.section
    if compiled is not None:
        where = ", if the first micro-batch then gives the same" if choice.is_auto else ""
        yield "compiled", f"per {compiled.per} by {compiled.backend}, in the first step{where}"
    elif choice.reason:
        yield "compiled", f"no: {choice.reason}"
    yield "length", str(plan.length)
    packed = describe_packed_rows(plan)
    if packed:
        yield "rows", packed
    from framework.plan.memory import NotEstimatedError, estimate  # rank 0 alone prints it

    with suppress(NotEstimatedError):
        memory = estimate(plan)
        where = "host memory" if plan.cluster.device == "cpu" else "device memory"
        lacks = ", without activations" if memory.lacks else ""
        yield "estimate", f"{bytes_text(memory.total(memory.peak))} of {where} per rank{lacks}"
    yield "checkpoints", ", ".join(_saves(config.checkpoint)) or "none"
    yield "metrics", ", ".join(_sinks(config.monitors))


def _model_text(model: Any, num_params: int, num_trained: int) -> str:
    """Return the model's kind, or the import path of its code, and its parameters."""
    tags = [tag for tag in ("kind", "target", "object") if hasattr(model, tag)]
    text = f"{getattr(model, tags[0])}, {num_params:,} parameters"
    if num_trained < num_params:
        text += f", {num_trained:,} of them trained ({num_trained / num_params:.2%})"
    return text


def _sinks(monitors: Monitors) -> Iterator[str]:
    """Yield what metrics are written to."""
    yield "metrics.jsonl"
    if monitors.csv:
        yield "metrics.csv"
    yield from monitors.sinks()
    for other in monitors.others:
        yield other.factory().path


def _saves(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.every_steps:
        yield f"every {counted(checkpoint.every_steps, 'step')}"
    elif checkpoint.every_epochs:
        yield f"every {counted(checkpoint.every_epochs, 'epoch')}"
    if checkpoint.every_minutes:
        yield f"every {checkpoint.every_minutes:g} minutes"
    if checkpoint.at_end:
        yield "at the end"


def bytes_text(count: float) -> str:
    """Return a number of bytes in megabytes or gigabytes."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB"


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print labels and texts in two columns."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print_line(f"  {label:<{width}}  {text}")


def _without_evaluation_data(plan: Plan) -> Iterator[str]:
    """List evaluations that are configured and will not happen; evaluating the last step is a
    default and not listed.
    """
    evaluation = plan.config.evaluation
    metric = plan.config.checkpoint.keep_best or ""
    for name in ("every_steps", "every_epochs", "every_minutes", "at_start"):
        if getattr(evaluation, name):
            value = getattr(evaluation, name)
            yield (
                f"note: evaluation.{name} = {value}: there is no evaluation data "
                "[no-evaluation-data]"
            )
    if metric.startswith("eval/"):
        yield (
            f"warning: checkpoint.keep_best = {metric}: there is no evaluation data, so it is "
            "never measured, and no checkpoint is deleted [no-evaluation-data]"
        )
