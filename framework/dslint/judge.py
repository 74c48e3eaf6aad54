"""Tells run configs from DeepSpeed JSON, and judges what a run config passes through to DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from framework.dslint.facts import GpuKind, Topology
from framework.dslint.keys import load_table
from framework.dslint.lint import key_problems, lint
from framework.errors import Problem
from framework.text.document import YAML_ENDINGS, Document, read_text
from framework.text.hjson import parse_hjson

if TYPE_CHECKING:  # importing the models of a run config would cost every check of a DeepSpeed JSON a tenth of a second
    from framework.config.load import Source
    from framework.plan.plan import Plan

_ACCELERATES: Final = frozenset({"compute_environment", "distributed_type", "deepspeed_config"})
# GPT-NeoX, each also with dashes; none of them is a key of DeepSpeed's or of a run config's top level.
_NEOX: Final = frozenset(
    {
        "pipe_parallel_size",
        "model_parallel_size",
        "num_layers",
        "num_attention_heads",
        "seq_length",
        "max_position_embeddings",
        "train_iters",
        "pos_emb",
        "no_weight_tying",
        "lr_decay_iters",
    }
)
_SOME_STEPS: Final = 1_000_000
IN_BOTH: Final = frozenset({"optimizer", "scheduler", "checkpoint"})
# Sections that only a run config has. A test holds them against RunConfig.
OURS: Final = frozenset(
    {
        "run",
        "model",
        "data",
        "task",
        "batch",
        "precision",
        "zero",
        "parallel",
        "training",
        "evaluation",
        "monitors",
        "deepspeed",
    }
)


def read_deepspeed_json(path: Path, *, name: str) -> Document | None:
    """The document if the file is DeepSpeed JSON, None if it is a run config.

    Raises:
        ConfigError: it cannot be read.
    """
    return None if _is_yaml(path) else parse_deepspeed_json(read_text(path, name=name), path, name=name)


def parse_deepspeed_json(text: str, path: Path, *, name: str) -> Document | None:
    """As `read_deepspeed_json`, of a text that has been read.

    YAML files are run configs. Anything else is DeepSpeed JSON unless more of its keys are a run config's own.
    """
    if _is_yaml(path):
        return None
    document = parse_hjson(text, name=name)
    return None if is_run_config(document.value) else document


def _is_yaml(path: Path) -> bool:
    return path.suffix.lower() in YAML_ENDINGS


def is_run_config(values: Any) -> bool:
    """Check whether these values are a run config rather than DeepSpeed's own."""
    if not isinstance(values, Mapping):
        return False
    optimizer = values.get("optimizer")
    kinds = {"kind", "target"} & optimizer.keys() if isinstance(optimizer, Mapping) else set()
    return len(OURS & values.keys()) + len(kinds) > len(_deepspeeds(values))


def _deepspeeds(values: Mapping[str, Any]) -> list[str]:
    """Keys that only DeepSpeed has; which are asked only where one of ours is there as well."""
    if not OURS & values.keys():
        return ["type"] if isinstance(values.get("optimizer"), Mapping) and "type" in values["optimizer"] else []
    return [name for name in load_table().children() if name in values and name not in IN_BOTH]


def assumption(document: Document, *, as_run_config: bool) -> Iterator[Problem]:
    """A note on what a file was taken for, where it has keys of both kinds."""
    values = document.value
    if not isinstance(values, Mapping):
        return
    ours, theirs = [name for name in values if name in OURS], _deepspeeds(values)
    if ours and theirs:
        taken, other = ("a run config", theirs[0]) if as_run_config else ("DeepSpeed JSON", ours[0])
        line, column = document.places.get((other,), (0, 0))
        yield Problem(
            kind="kind-of-file-assumed",
            file=document.name,
            line=line,
            column=column,
            key=other,
            severity="note",
            reason=f"the file was taken for {taken}, and this key is of the other kind",
            fix="keep the keys of one kind in one file",
        )


def foreign_problem(document: Document) -> Problem | None:
    """Return the problem of a config of another tool, which has some of DeepSpeed's settings under names of its own; or
    None.
    """
    values = document.value
    if not isinstance(values, Mapping) or OURS & values.keys():
        return None
    if len(_NEOX & {str(name).replace("-", "_") for name in values}) > 1:
        return Problem(
            kind="gpt-neox-config",
            file=document.name,
            line=1,
            column=1,
            reason="this is a config of GPT-NeoX, neither a run config nor DeepSpeed JSON",
            fix="check the DeepSpeed JSON that GPT-NeoX makes of it, or write a run config",
        )
    return _accelerate_problem(document, values) if _ACCELERATES & values.keys() else None


def _accelerate_problem(document: Document, values: Mapping[str, Any]) -> Problem:
    section = values.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    fix = (
        f"check or import {file}, the DeepSpeed JSON that it names (check --for accelerate)"
        if isinstance(file, str)
        else "write a run config: zero_stage is zero.stage there, gradient_accumulation_steps "
        "batch.accumulation_steps, "
        "gradient_clipping training.clip_grad_norm, mixed_precision precision.dtype"
    )
    return Problem(
        kind="accelerate-config",
        file=document.name,
        line=1,
        column=1,
        fix=fix,
        reason="this is a config of Hugging Face's Accelerate, neither a run config nor DeepSpeed JSON",
    )


def judge_rendered(
    plan: Plan, *, source: Source | None = None, release: str | None = None, gpu: GpuKind | None = None
) -> list[Problem]:
    """Problems of the JSON that a plan renders to, in the words of the run config.

    What DeepSpeed refuses or drops is told whatever the cause. Warnings and notes are told where `deepspeed:`, the
    release or the GPU is the cause: what rendering decides by itself it decides on purpose.

    Args:
        plan: the run.
        source: where the config's values came from.
        release: DeepSpeed's version; left out: the newest known.
        gpu: which GPU; left out: not said.

    Raises:
        UsageError: there is no table of that release.
    """
    from framework.dslint.translate import to_run_config_keys

    config, topology = plan.config, Topology.from_cluster(plan.cluster, gpu)
    found = lint(Document("", _rendering(plan)), release=release, topology=topology)
    wanted = [problem for problem in found if not _is_off_anyway(problem)]
    if any(problem.severity != "error" for problem in wanted):
        plain = replace(plan, config=config.model_copy(update={"deepspeed": {}}))
        on_purpose = lint(Document("", _rendering(plain)), topology=Topology.from_cluster(plan.cluster))
        known = {(problem.kind, problem.key) for problem in on_purpose}
        wanted = [p for p in wanted if p.severity == "error" or (p.kind, p.key) not in known]
    reported = [to_run_config_keys(problem, config) for problem in wanted]
    return reported if source is None else [source.locate(problem) for problem in reported]


def judge_passed_through(
    plan: Plan, ds_config: Mapping[str, Any], *, source: Source | None = None, release: str | None = None
) -> list[Problem]:
    """As `judge_rendered`, of a run whose JSON has been rendered; nothing where it passes no further keys through."""
    assert ds_config.keys() >= plan.config.deepspeed.keys(), "the rendering of another plan"
    return judge_rendered(plan, source=source, release=release) if plan.config.deepspeed else []


def judge_passed_alone(passed: Any, *, release: str | None = None) -> list[Problem]:
    """Problems of single keys under `deepspeed:`, for a run config whose other sections are wrong as well.

    Args:
        passed: what stands under `deepspeed:`.
        release: DeepSpeed's version; left out: the newest known.
    """
    if not isinstance(passed, dict):
        return []
    from framework.config.run_config import RunConfig
    from framework.dslint.translate import to_run_config_keys

    found = key_problems(Document("", passed), release=release)
    alone = RunConfig().model_copy(update={"deepspeed": passed})
    return [to_run_config_keys(problem, alone) for problem in found]


def _rendering(plan: Plan) -> dict[str, Any]:
    """The JSON; a length that only the data tells stands for itself, as no problem depends on it."""
    from framework.plan.render import render

    if plan.length.total_steps is None:
        plan = replace(plan, length=replace(plan.length, total_steps=_SOME_STEPS))
    return render(plan)


def _is_off_anyway(problem: Problem) -> bool:
    """Check whether the key only switches something off: an older release, which lacks it, has it off as well."""
    return problem.kind == "key-of-another-release" and problem.value in (False, {"enabled": False})
