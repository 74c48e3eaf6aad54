"""The answer of `plan`: memory, time and strategies, with warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.commands.plan_lines import (
    alternative_line,
    alternatives,
    memory_lines,
    other_lines,
    strategy_lines,
    time_lines,
)
from framework.commands.plan_question import Question
from framework.commands.strategies import strategies_section
from framework.errors import Problem
from framework.plan.alternatives import settings_text
from framework.plan.candidate import Candidate, judge
from framework.plan.costs import KeyCost, costs_of_keys
from framework.plan.knob import Knob, find_knob
from framework.plan.memory import NotEstimatedError
from framework.plan.otherwise import runs_that_fit
from framework.plan.search import SearchResult, search
from framework.plan.search_goals import search_more_devices
from framework.plan.search_space import EVERYTHING, unusual

_TOP: Final = 5


@dataclass(frozen=True)
class Answer:
    """Memory, time and strategies of a plan.

    Attributes:
        section: all of it as plain values, for JSON.
        head: lines on memory and time.
        lines: lines on the strategies.
        findings: warnings.
        candidates: the strategies that are shown, the best one first.
        planned: the plan itself as a candidate; None if its memory is not estimated.
    """

    section: dict[str, Any]
    head: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    findings: tuple[Problem, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    planned: Candidate | None = None


def _time_and_costs(
    question: Question, planned: Candidate, costs: Sequence[KeyCost]
) -> dict[str, Any]:
    """Return time and costs of the plan as plain values, and the machine that they are of."""
    target = question.target
    section: dict[str, Any] = {}
    if planned.time:
        section["time"] = planned.time.to_dict()
    if costs:
        section["costs"] = [cost.to_dict() for cost in costs]
    if question.refused:
        section["refused"] = question.refused.to_dict()
    if target.machine:
        section["machine"] = target.machine.to_dict() | {"rates": target.rates}
    return section


def answer_to(question: Question) -> Answer:
    """Estimate the plan's memory and time, search for strategies, and describe both in lines and as
    plain values. If neither the plan nor a strategy fits, search all keys, and list other runs that
    fit if that finds none. If memory cannot be estimated, the answer is the reason alone.
    """
    plan = question.plan
    target = question.target
    try:
        planned = judge(plan, target, work=question.work)
        result = question.search()
    except NotEstimatedError as error:
        return _not_estimated(question, error)
    candidates = _candidates_to_show(question, planned, result)
    head = list(memory_lines(planned, target))
    head += time_lines(planned, target)
    costs = _costs(question, planned)
    for number, cost in enumerate(costs):
        label = "" if number else "costs"
        head.append(f"{label:<10}{cost}")
    if question.is_wide:
        lines = list(strategy_lines(planned, result, candidates))
    else:
        lines = list(alternative_line(planned, result))
    section: dict[str, Any] = {
        "memory": planned.memory.to_dict(),
        "strategies": strategies_section(result, candidates),
    }
    section |= _time_and_costs(question, planned, costs)
    widest = _widest_search(question, planned, result)
    if widest is not None and not widest.ranked:
        others = list(runs_that_fit(question.widest_request))
        lines += other_lines(others)
        section["strategies"]["otherwise"] = [other.to_dict() for other in others]
    knob = _knob(question, candidates)
    if knob:
        lines.append(f"{'knob':<10}{knob}")
        section["knob"] = vars(knob) | {"text": str(knob)}
    return Answer(
        section,
        head=tuple(head),
        lines=tuple(lines),
        findings=tuple(_findings(question, planned, result, widest)),
        candidates=tuple(candidates),
        planned=planned,
    )


def _costs(question: Question, planned: Candidate) -> list[KeyCost]:
    """Return what fixed keys cost; nothing where a search frees them anyway."""
    if question.is_wide:
        return []
    written = question.written or question.run.config
    return costs_of_keys(question.request, planned, written)


def _not_estimated(question: Question, error: NotEstimatedError) -> Answer:
    """Return the answer for a plan without an estimate of its memory: the reason alone."""
    reason = str(error)
    if question.why:
        reason += f" ({question.why})"
    return Answer({"memory": {"unknown": reason}}, (f"{'memory':<10}not estimated: {reason}",))


def _knob(question: Question, candidates: Sequence[Candidate]) -> Knob | None:
    """Find the setting that frees most in the best strategy, or in the plan itself."""
    plan = question.plan
    if question.is_wide and candidates:
        plan = candidates[0].plan
    return find_knob(plan, question.target, work=question.work)


def _candidates_to_show(
    question: Question, planned: Candidate, result: SearchResult
) -> list[Candidate]:
    """Return the best strategies, as many as ``--top``; beside a plan only clear alternatives."""
    candidates = list(result.ranked)
    if not question.is_wide:
        candidates = alternatives(planned, result)
    return candidates[: question.arguments.top or _TOP]


def ordered_by_trials(answer: Answer, count: int) -> Answer:
    """Run the best `count` strategies and the plan itself here, and put the fastest one first.
    Blocks for the runs.
    """
    from framework.commands.trials import fastest, run_trials, table

    tried = _candidates_to_try(answer, count)
    trials = run_trials(tried)
    best = tried[fastest(trials)]
    others = [candidate for candidate in answer.candidates if candidate is not best]
    return replace(
        answer,
        section=answer.section | {"trials": [trial.to_dict() for trial in trials]},
        lines=answer.lines + tuple(table(trials)),
        candidates=(best, *others),
    )


def _candidates_to_try(answer: Answer, count: int) -> list[Candidate]:
    """Return the best `count` strategies, and the plan itself if it is none of them."""
    candidates = list(answer.candidates[:count])
    planned = answer.planned
    if planned is not None and all(each.choice != planned.choice for each in candidates):
        candidates.append(planned)
    return candidates


def _widest_search(
    question: Question, planned: Candidate, result: SearchResult
) -> SearchResult | None:
    """Return the result of the widest search, where neither a plan nor a strategy beside it fits;
    None where one does.
    """
    if result.ranked or not planned.lacking(question.target):
        return None
    if question.is_wide:
        return result
    return search(question.widest_request)


def _findings(
    question: Question, planned: Candidate, result: SearchResult, widest: SearchResult | None
) -> Iterator[Problem]:
    """Warn of a plan that does not fit the memory, with the nearest that does as the fix."""
    reason = planned.lacking(question.target)
    if not reason:
        return
    if widest is not None:
        reason = f"{reason}; nothing fits: {result.block}"
        fix = _fix_where_nothing_fits(question, planned, widest)
    else:
        best = result.ranked[0]
        fix = f"set {settings_text(best.changes(planned)) or 'as above'}"
        if best.plan.cluster != planned.plan.cluster:
            fix = f"use {best.plan.cluster}, and {fix}"
    stage = planned.plan.config.zero.stage
    yield Problem("memory-too-small", reason, fix, "zero.stage", stage, severity="warning")


def _fix_where_nothing_fits(question: Question, planned: Candidate, widest: SearchResult) -> str:
    """Return the fix where neither the plan nor a strategy beside it fits: the best settings of the
    widest search, or the fewest devices on which a search finds some, or a smaller model.
    """
    if widest.ranked:
        return f"set {settings_text(widest.ranked[0].changes(planned))}"
    on_more_devices = search_more_devices(replace(question.request, free=EVERYTHING))
    if on_more_devices is None:
        return "use a smaller model, or devices with more memory"
    best = on_more_devices.ranked[0]
    settings = settings_text(unusual(best.settings))
    return f"use {best.plan.cluster.world_size} devices with {settings}"
