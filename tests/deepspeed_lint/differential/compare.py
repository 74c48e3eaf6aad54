"""Comparison of `check` with DeepSpeed: both judge the same configs, and every disagreement is
named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_lint.errors import Problem
from deepspeed_lint.facts import Facts
from tests.deepspeed_lint.differential.generate import RELEASE, Question
from tests.deepspeed_lint.differential.harms import BY_RULES, HARMS, NOT_ON_ONE_CPU_RANK, by_machine
from tests.launched import run_ranks

ASK = Path(__file__).with_name("ask.py")


@dataclass
class Comparison:
    """Result of a comparison.

    Attributes:
        parsed: how many configs DeepSpeed parsed.
        started: how many it started and stepped as well.
        counts: outcome -> how many.
        mutations: mutation -> outcome -> how many.
        accepted_by_us_alone: what must never be.
        unexplained: refused by us alone, and on no list.
        harms: name of the silent harm -> how many configs it explains.
        not_started: why configs were not started -> how many.
    """

    parsed: int = 0
    started: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    mutations: dict[str, Counter[str]] = field(default_factory=dict)
    accepted_by_us_alone: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    harms: Counter[str] = field(default_factory=Counter)
    not_started: Counter[str] = field(default_factory=Counter)

    def is_clean(self) -> bool:
        return not self.accepted_by_us_alone and not self.unexplained


def ask_deepspeed(
    questions: Sequence[dict[str, Any]], folder: Path, *, start_most: int = 10_000
) -> list[dict[str, Any]]:
    """Return DeepSpeed's answers, from one process on CPU, forked from one that has imported it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.json").write_text(
        json.dumps({"questions": questions, "start_most": start_most}), encoding="utf-8"
    )
    run_ranks(ASK, "questions.json", "answers.json", num_ranks=1, cwd=folder)
    answers: list[dict[str, Any]] = json.loads(
        (folder / "answers.json").read_text(encoding="utf-8")
    )
    return answers


def compare(questions: Sequence[Question], folder: Path, *, start_most: int) -> Comparison:
    """Let DeepSpeed parse all, and start and step up to `start_most` of the parsed configs."""
    result = Comparison(parsed=len(questions))
    asked = [_asked(question) for question in questions]
    answers = ask_deepspeed(asked, folder, start_most=start_most)
    result.started = sum(answer["started"] for answer in answers)
    for question, answer in zip(questions, answers, strict=True):
        _judge(result, question, question.errors(), answer)
    return result


def _asked(question: Question) -> dict[str, Any]:
    """Return the question to DeepSpeed; a config with a pipeline section is tried with every number
    of replicas, because its stages may share the ranks.
    """
    worlds = [question.world]
    if "pipeline" in question.config:
        worlds = [size for size in range(question.world, 0, -1) if question.world % size == 0]
    depth = "step" if question.world == 1 and not _left_alone(question) else "parse"
    return {"config": question.config, "worlds": worlds, "depth": depth}


def _left_alone(question: Question) -> str:
    """Return why this machine does not start the config."""
    return by_machine(Facts(question.config, RELEASE, question.topology()))


def _judge(
    result: Comparison, question: Question, errors: list[Problem], answer: dict[str, Any]
) -> None:
    refused, is_started = answer["refused"], answer["started"]
    if refused == "time":  # a busy machine compiles an optimizer for minutes: no answer
        result.not_started["no answer in time"] += 1
        return
    outcome = {
        (False, False): "both take it",
        (True, True): f"both refuse it, DeepSpeed at {refused}",
        (False, True): "only DeepSpeed refuses it",
        (True, False): "only check refuses it",
    }[bool(errors), bool(refused)]
    result.counts[f"{'started' if is_started else 'parsed'}: {outcome}"] += 1
    result.mutations.setdefault(question.mutation, Counter())[outcome] += 1
    if question.world == 1 and not refused and not is_started:
        result.not_started[_left_alone(question) or "enough were started"] += 1
    stated = f"{question.mutation} ({question.detail}), {question.world} ranks, {json.dumps(question.config)}"
    if refused and not errors:
        result.accepted_by_us_alone.append(
            f"DeepSpeed refuses at {refused}: {answer['error'][:200]}: {stated}"
        )
    elif errors and not refused:
        unexplained = [problem for problem in errors if not _explain(problem, result, is_started)]
        result.unexplained += [f"{problem}: {stated}" for problem in unexplained]


def _explain(problem: Problem, result: Comparison, is_started: bool) -> bool:
    harm = next((harm for harm in HARMS if harm.explains(problem.kind, problem.key)), None)
    if harm is not None:
        result.harms[harm.name] += 1
        return True
    if problem.kind in NOT_ON_ONE_CPU_RANK:
        return True
    return not is_started and (
        problem.kind in BY_RULES or problem.kind == "parameter-of-another-class"
    )
