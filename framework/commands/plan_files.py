"""Files that `plan` writes: the best strategy into the run config, and the chart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.commands.plan_answer import Answer
from framework.commands.plan_question import Question, stream_of_notes
from framework.commands.strategies import write_choice
from framework.errors import UsageError
from framework.load_run import LoadedRun
from framework.system.output import write


def write_files(question: Question, answer: Answer) -> None:
    """Write the best strategy into the run config (--apply), and the chart (--chart). UsageError if
    no strategy fits.
    """
    arguments = question.arguments
    if not (arguments.apply or arguments.chart):
        return
    if not answer.candidates:
        raise UsageError("plan: there is no strategy that fits, so that nothing is written")
    if arguments.apply:
        _apply_best(question, answer)
    if arguments.chart:
        _write_chart(arguments.chart, question, answer)


def _write_chart(file: str, question: Question, answer: Answer) -> None:
    from framework.commands.check_fix import write_file
    from framework.commands.memory_chart import draw_chart
    from framework.report.chart import Chart

    limit = question.target.usable_bytes(answer.candidates[0].memory)
    title = question.plan.config.run.name
    chart = draw_chart(answer.candidates, limit_bytes=limit, title=title)
    write_file(Path(file), chart, name=file, marks=[Chart.MARK])


def _apply_best(question: Question, answer: Answer) -> None:
    """Write the settings of the best strategy that the file does not imply, and print the diff."""
    arguments = question.arguments
    run = question.run
    out = stream_of_notes(arguments)
    if arguments.goal == "fewest-devices":
        write(out, f"devices   {answer.candidates[0].plan.cluster}\n")
    settings = _settings_to_write(run, answer, is_refused=question.refused is not None)
    diff = write_choice(run.config_path, arguments.words, settings)
    diff = diff or f"{run.config_path}: it says so already"
    write(out, f"{diff}\n")
    further = [word for word in arguments.words if word.partition("=")[0] not in settings]
    if further:
        words = " ".join(further)
        write(out, f"note      chosen with {words}, which {run.config_path} does not hold\n")


def _settings_to_write(
    run: LoadedRun, answer: Answer, *, is_refused: bool = False
) -> dict[str, Any]:
    """Return the best strategy's settings that differ from the plan, or that the file leaves open:
    keys that the command line sets, and ``auto`` ones.
    """
    planned_choice: Mapping[str, Any] = {}
    if answer.planned and not is_refused:
        planned_choice = answer.planned.choice
    settings = {}
    for key, value in answer.candidates[0].settings.items():
        is_override = run.source.is_override(tuple(key.split(".")))
        was_auto = key in run.config.was_auto
        if is_override or was_auto or planned_choice.get(key) != value:
            settings[key] = value
    return settings
