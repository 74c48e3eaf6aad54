"""Judges what a run config passes through to DeepSpeed: problems of the rendered JSON in its own
words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.facts import value_at
from deepspeed_lint.keys import load_table
from deepspeed_lint.lint import key_problems, lint
from deepspeed_lint.text.document import Document
from deepspeed_lint.topology import GpuKind, Topology
from framework.config.deepspeed_words import OWNED, TYPED
from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import topology_of
from framework.plan.plan import Plan
from framework.plan.render import render
from framework.plan.rules.devices import fp8_problems

_SOME_STEPS: Final = 1_000_000
# Settings with another name and another value in a run config, as fixes write them.
_SETTINGS: Final[Mapping[str, str]] = json.loads(
    Path(__file__).with_name("run_config_settings.json").read_text(encoding="utf-8")
)
_PRECISIONS: Final = frozenset({"fp16", "bf16", "bfloat16", "torch_autocast"})
_KEY: Final = re.compile(r"(?<![\w.])[a-z_0-9]+(?:\.[a-z_0-9]+)*(?![\w(])")


def judge_rendered(
    plan: Plan,
    *,
    source: Source | None = None,
    release: str | None = None,
    gpu: GpuKind | None = None,
) -> list[Problem]:
    """Return the problems of the JSON that a plan renders to, under the run config's keys.

    What DeepSpeed refuses or drops is always reported. Warnings and notes are reported where
    `deepspeed:`, the release or the GPU is the cause: what rendering decides by itself it decides
    on purpose. What the GPU lacks for the run's own precision is reported beside it.

    Args:
        plan: the run.
        source: where the config's values came from.
        release: DeepSpeed's version; left out: the newest known.
        gpu: which GPU; left out: not known.

    Raises:
        UsageError: there is no table of that release.
    """
    cluster = topology_of(plan.cluster, gpu)
    # DeepSpeed's ranks are those that hold the same part of the weights.
    topology = replace(cluster, world_size=plan.layout.world_size // plan.layout.tensor_size)
    all_problems = lint(Document("", _rendering(plan)), release=release, topology=topology)
    problems = [problem for problem in all_problems if not _is_off_anyway(problem)]
    problems = _without_those_on_purpose(problems, plan, topology)
    reported = [_under_our_keys(problem, plan.config) for problem in problems]
    if gpu is not None:
        reported += fp8_problems(plan.config.precision, gpu.name, gpu.capability)
    if source is None:
        return reported
    return [source.locate(problem) for problem in reported]


def _without_those_on_purpose(
    problems: list[Problem], plan: Plan, topology: Topology
) -> list[Problem]:
    """Return the errors, and the warnings and notes that rendering does not cause on purpose."""
    if all(problem.severity == "error" for problem in problems):
        return problems
    on_purpose = _problems_on_purpose(plan, topology)
    return [
        problem
        for problem in problems
        if problem.severity == "error" or (problem.kind, problem.key) not in on_purpose
    ]


def _problems_on_purpose(plan: Plan, topology: Topology) -> set[tuple[str, str]]:
    """Return kind and key of the problems without `deepspeed:`, in the newest release, without a
    GPU's limits.
    """
    plain_config = plan.config.model_copy(update={"deepspeed": {}})
    rendering = _rendering(replace(plan, config=plain_config))
    any_gpu = replace(topology, gpu=None, device=plan.cluster.device)
    problems = lint(Document("", rendering), topology=any_gpu)
    return {(problem.kind, problem.key) for problem in problems}


def judge_passed_through(
    plan: Plan,
    ds_config: Mapping[str, Any],
    *,
    source: Source | None = None,
    release: str | None = None,
) -> list[Problem]:
    """Judge a run that has been rendered as `judge_rendered` does, if it passes further keys
    through.
    """
    rendered = {*ds_config, "comms_logger"}  # which is left out where it is off
    assert rendered >= plan.config.deepspeed.keys(), "the rendering of another plan"
    if plan.config.deepspeed:
        return judge_rendered(plan, source=source, release=release)
    return []


def judge_passed_alone(passed: Any, *, release: str | None = None) -> list[Problem]:
    """Return the problems of single keys under `deepspeed:`, for a run config with problems in
    other sections.

    Args:
        passed: what stands under `deepspeed:`.
        release: DeepSpeed's version; left out: the newest known.
    """
    if not isinstance(passed, dict):
        return []
    problems = key_problems(Document("", passed), release=release)
    config = RunConfig().model_copy(update={"deepspeed": passed})
    return [_under_our_keys(problem, config) for problem in problems]


def _rendering(plan: Plan) -> dict[str, Any]:
    """Render a plan; an unknown length is made up, as no problem depends on it."""
    if plan.length.total_steps is None:
        plan = replace(plan, length=replace(plan.length, total_steps=_SOME_STEPS))
    return render(plan)


def _is_off_anyway(problem: Problem) -> bool:
    """Check whether the key only switches something off: an older release, which lacks it, has it
    off as well.
    """
    return problem.kind == "key-of-another-release" and problem.value in (False, {"enabled": False})


def _under_our_keys(problem: Problem, config: RunConfig) -> Problem:
    """Return the problem with every DeepSpeed key under the name that a run config gives it."""
    key = _our_key(problem.key, config)
    if key.partition(".")[0] != "deepspeed":
        value = value_at(config.to_dict(), key.split("."))
    else:
        value = problem.value
    fix = problem.fix
    for deepspeed_setting, our_setting in _SETTINGS.items():
        fix = fix.replace(deepspeed_setting, our_setting)
    return replace(
        problem,
        key=key,
        value=value,
        reason=_with_our_keys(problem.reason, config),
        fix=_with_our_keys(fix, config),
        file="",
        line=0,
        column=0,
    )


def _with_our_keys(sentence: str, config: RunConfig) -> str:
    return _KEY.sub(lambda match: _our_word(match[0], config), sentence)


def _our_key(path: str, config: RunConfig) -> str:
    """Return the key of the run config that stands for a path of the JSON."""
    if _is_passed(path, config):
        return f"deepspeed.{path}"
    if path in TYPED:
        return TYPED[path]
    if path in _PRECISIONS:
        return "precision.dtype"
    return _key_of_section(path)


def _key_of_section(path: str) -> str:
    """Return the key of the run config that decides the section that a path is in."""
    for deepspeed_section, our_key in TYPED.items():
        if path.startswith(f"{deepspeed_section}."):
            return our_key
    return OWNED.get(path.partition(".")[0], f"deepspeed.{path}")


def _is_passed(path: str, config: RunConfig) -> bool:
    """Check whether `deepspeed:` has the path, or a plain value where the path has a section."""
    values: Any = config.deepspeed
    for part in path.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
        if not isinstance(values, Mapping):
            return True
    return True


def _our_word(word: str, config: RunConfig) -> str:
    """Return our key for a word of a sentence that is a key of DeepSpeed, the word itself if not.

    A name that stands alone is a key only at the top level.
    """
    if word in TYPED or (word in OWNED and "_" in word):
        return _our_key(word, config)
    if _is_listed_path(word):
        return f"deepspeed.{word}"
    return word


def _is_listed_path(word: str) -> bool:
    is_path = "." in word or "_" in word
    return is_path and load_table().get(word) is not None
