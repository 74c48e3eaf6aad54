"""Judges what a run config passes through to DeepSpeed: problems of the rendered JSON in its own
words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from framework.config.deepspeed_words import OWNED, TYPED
from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.dslint.facts import GpuKind, Topology, value_at
from framework.dslint.key_files import TABLES
from framework.dslint.keys import load_table
from framework.dslint.lint import key_problems, lint
from framework.errors import Problem
from framework.plan.plan import Plan
from framework.plan.render import render
from framework.text.document import Document

_SOME_STEPS: Final = 1_000_000
# Settings whose value has another name as well, as fixes write them.
_SETTINGS: Final[Mapping[str, str]] = json.loads(
    (TABLES / "run_config_settings.json").read_text(encoding="utf-8")
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
    """Problems of the JSON that a plan renders to, in the words of the run config.

    What DeepSpeed refuses or drops is told whatever the cause. Warnings and notes are told where
    `deepspeed:`, the release or the GPU is the cause: what rendering decides by itself it decides
    on purpose.

    Args:
        plan: the run.
        source: where the config's values came from.
        release: DeepSpeed's version; left out: the newest known.
        gpu: which GPU; left out: not said.

    Raises:
        UsageError: there is no table of that release.
    """
    config = plan.config
    of_cluster = Topology.from_cluster(plan.cluster, gpu)
    # DeepSpeed's ranks are those that hold the same part of the weights.
    topology = replace(of_cluster, world_size=plan.layout.world_size // plan.layout.tensor_size)
    found = lint(Document("", _rendering(plan)), release=release, topology=topology)
    wanted = [problem for problem in found if not _is_off_anyway(problem)]
    if any(problem.severity != "error" for problem in wanted):
        plain = replace(plan, config=config.model_copy(update={"deepspeed": {}}))
        on_purpose = lint(
            Document("", _rendering(plain)),
            topology=replace(topology, gpu=None, device=plan.cluster.device),
        )
        known = {(problem.kind, problem.key) for problem in on_purpose}
        wanted = [p for p in wanted if p.severity == "error" or (p.kind, p.key) not in known]
    reported = [_in_its_words(problem, config) for problem in wanted]
    if source is None:
        return reported
    return [source.locate(problem) for problem in reported]


def judge_passed_through(
    plan: Plan,
    ds_config: Mapping[str, Any],
    *,
    source: Source | None = None,
    release: str | None = None,
) -> list[Problem]:
    """As `judge_rendered`, of a run whose JSON has been rendered; nothing where it passes no
    further keys through.
    """
    assert ds_config.keys() >= plan.config.deepspeed.keys(), "the rendering of another plan"
    if plan.config.deepspeed:
        return judge_rendered(plan, source=source, release=release)
    return []


def judge_passed_alone(passed: Any, *, release: str | None = None) -> list[Problem]:
    """Problems of single keys under `deepspeed:`, for a run config whose other sections are wrong
    as well.

    Args:
        passed: what stands under `deepspeed:`.
        release: DeepSpeed's version; left out: the newest known.
    """
    if not isinstance(passed, dict):
        return []
    found = key_problems(Document("", passed), release=release)
    alone = RunConfig().model_copy(update={"deepspeed": passed})
    return [_in_its_words(problem, alone) for problem in found]


def _rendering(plan: Plan) -> dict[str, Any]:
    """The JSON; a length that only the data tells stands for itself, as no problem depends on
    it.
    """
    if plan.length.total_steps is None:
        plan = replace(plan, length=replace(plan.length, total_steps=_SOME_STEPS))
    return render(plan)


def _is_off_anyway(problem: Problem) -> bool:
    """Check whether the key only switches something off: an older release, which lacks it, has it
    off as well.
    """
    return problem.kind == "key-of-another-release" and problem.value in (False, {"enabled": False})


def _in_its_words(problem: Problem, config: RunConfig) -> Problem:
    """The same problem with every DeepSpeed key under the name that a run config gives it."""
    key = _own_key(problem.key, config)
    if key.partition(".")[0] != "deepspeed":
        value = value_at(config.to_dict(), key.split("."))
    else:
        value = problem.value
    fix = problem.fix
    for theirs, ours in _SETTINGS.items():
        fix = fix.replace(theirs, ours)
    reason, fix = (
        _KEY.sub(lambda found: _named(found[0], config), text) for text in (problem.reason, fix)
    )
    return replace(problem, key=key, value=value, reason=reason, fix=fix, file="", line=0, column=0)


def _own_key(path: str, config: RunConfig) -> str:
    """Return the key of the run config that stands for a path of the JSON."""
    if _is_passed(path, config):
        return f"deepspeed.{path}"
    if path in TYPED:
        return TYPED[path]
    if path in _PRECISIONS:
        return "precision.dtype"
    inner = next((ours for theirs, ours in TYPED.items() if path.startswith(f"{theirs}.")), None)
    return inner or OWNED.get(path.partition(".")[0], f"deepspeed.{path}")


def _is_passed(path: str, config: RunConfig) -> bool:
    """Check whether the key, or a section around it that only `deepspeed:` gives, is written
    there.
    """
    values: Any = config.deepspeed
    for part in path.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
        if not isinstance(values, Mapping):
            return True
    return True


def _named(word: str, config: RunConfig) -> str:
    """A word of a sentence, where it is a key of DeepSpeed; a name that stands alone is one only at
    the top level.
    """
    top = word.partition(".")[0]
    if word in TYPED or (word in OWNED and "_" in word):
        return _own_key(word, config)
    if "." in word and load_table().get(word) is not None:
        if word in TYPED:
            return _own_key(word, config)
        return f"deepspeed.{word}"
    if "_" in word and top == word and load_table().get(word) is not None:
        return f"deepspeed.{word}"
    return word
