"""Keys under `deepspeed:` that pass through to the JSON, that a typed section decides, and that a
run cannot have.

A key that a typed section decides is a contradiction, even if the section was left out: rendering
writes its default. Keys that would change the layout of ranks, the number of samples or the state
in a checkpoint are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.text.typos import nearest
from framework.config.base import Object, Target
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH, SHARED, TYPED
from framework.config.optimizer import DeepSpeedSchedule, Lamb, Muon, OptimizerSection
from framework.config.run_config import RunConfig
from framework.config.zero import OFFLOADS
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, is_on, rule
from framework.plan.zero_plus_plus import COPIES, passed_zero, size_of_copies, uneven_shares

TABLE: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
# DeepSpeed's dotted key -> why a run cannot have it, what to do, and values that are as good as
# left out.
_NOT_IN_A_RUN: Final[Mapping[str, Mapping[str, Any]]] = TABLE["not_in_a_run"]
# Top-level keys that DeepSpeed 0.19.8 refuses with any value (runtime/config.py
# `_REMOVED_TOP_LEVEL_CONFIG_KEYS`), with the release that began to; a test compares them with the
# key tables, which the plan cannot see.
REMOVED: Final[Mapping[str, Sequence[str]]] = TABLE["removed"]
# The two places where the word "auto" means something to DeepSpeed; elsewhere it silently stands
# for the default.
_AUTO_HAS_MEANING: Final = (
    "deepspeed.expert_parallel.",
    "deepspeed.data_types.keep_in_fp32_modules",
)


def not_in_a_run(path: str, value: Any) -> tuple[str, str] | None:
    """Return why a run cannot have a DeepSpeed key with this value, and what to do; None if it
    can.
    """
    entry = _NOT_IN_A_RUN.get(path)
    if entry is None or value in entry.get("harmless", (False, None)):
        return None
    phrases = TABLE["phrases"]
    fix = entry.get("fix", "remove it")
    return entry["reason"].format_map(phrases), fix.format_map(phrases)


@rule()
def deepspeed_section(config: RunConfig, cluster: Cluster) -> Found:
    """Find unknown top-level keys, which DeepSpeed drops silently, and second places for one
    setting, which contradict each other.
    """
    for section, values in config.deepspeed.items():
        for path, value in _entries(section, values):
            problem = _problem_of_key(config, section, path, value)
            if problem:
                kind, reason, fix = problem
                yield Problem(kind, reason, fix, f"deepspeed.{path}", value)


def _entries(section: str, values: Any) -> Iterable[tuple[str, Any]]:
    """Return path and value of each key of a section; of an unknown one it is the section alone."""
    if isinstance(values, dict) and section in SHARED | PASSED_THROUGH:
        return paths_of(values, section)
    return [(section, values)]


def _problem_of_key(
    config: RunConfig, section: str, path: str, value: Any
) -> tuple[str, str, str] | None:
    """Return kind, reason and fix of a key's problem, or None."""
    name, _, field = path[len(section) + 1 :].partition(".")
    if section in SHARED and name:
        setting = _deciding_setting(config, section, path)
    else:
        setting = OWNED.get(path)
    if setting is not None:
        return "section-clash", f"{setting} decides it", f"set {setting} and remove it here"
    refusal = refusal_of(path, value)
    if refusal is not None:
        return refusal
    if not name:
        return _unknown_key(path)
    if section == "zero_optimization" and name in OFFLOADS:
        return _offload_of_nothing(config, name, field)
    return None


def _deciding_setting(config: RunConfig, section: str, path: str) -> str | None:
    """Return our setting that decides a key of a shared section, or leaves the section out, or
    None.
    """
    setting = TYPED.get(path)
    if setting and _is_typed(config, setting):
        return setting
    return _why_absent(config, section, path)


def refusal_of(path: str, value: Any) -> tuple[str, str, str] | None:
    """Return kind, reason and fix of a key that DeepSpeed, or a run, refuses; else None."""
    if path in REMOVED:
        release, instead = REMOVED[path]
        return "removed-deepspeed-key", f"DeepSpeed removed it in {release} and refuses it", instead
    refusal = not_in_a_run(path, value)
    if refusal is None:
        return None
    return "not-in-a-run", *refusal


def _unknown_key(path: str) -> tuple[str, str, str] | None:
    """Return kind, reason and fix of a top-level key that DeepSpeed does not read, else None."""
    if path in PASSED_THROUGH or path in _NOT_IN_A_RUN:
        return None
    guess = nearest(path, [*PASSED_THROUGH, *OWNED])
    if not guess:
        fix = "remove it"
    elif guess in OWNED:
        fix = f"{OWNED[guess]} decides '{guess}'"
    else:
        fix = f"did you mean '{guess}'?"
    return "unknown-deepspeed-key", "DeepSpeed reads no such key and would ignore it", fix


def _offload_of_nothing(config: RunConfig, name: str, field: str) -> tuple[str, str, str] | None:
    """Return kind, reason and fix of an offload's key if the run offloads nothing, else None."""
    if not field or "." in field or getattr(config.zero, name).device != "none":
        return None
    fix = f"set zero.{name}: {{device: cpu}}, or remove it here"
    return "section-clash", f"zero.{name} moves nothing", fix


@rule("needs-cuda")
def quantized_on_cpu(config: RunConfig, cluster: Cluster) -> Found:
    """Find quantized weights on CPUs: the quantizer has no form for them
    (deepspeed/ops/op_builder/cpu/no_impl.py); stage 3 alone uses it.
    """
    if cluster.device != "cpu" or config.zero.stage < 3:
        return
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if is_on(passed_zero(config), name):
            reason = "DeepSpeed's quantizer has no kernel for cpu devices"
            yield Problem(
                "needs-cuda", reason, "remove it here", f"deepspeed.zero_optimization.{name}", True
            )


@rule("quantized-share")
def shares_are_quantized(config: RunConfig, cluster: Cluster) -> Found:
    """Find weights of a named model that DeepSpeed's quantizer cannot share; other models are
    checked when they are built.
    """
    if config.zero.stage < 3 or not is_on(passed_zero(config), "zero_quantized_weights"):
        return
    from framework.plan.layers import RankShare
    from framework.plan.rank_memory import EXPERTS
    from framework.plan.work import model_work

    parallel = config.parallel
    share = RankShare(parallel.tensor, parallel.sequence)
    size = getattr(config.model, "image_size", 32)
    work = model_work(
        config.model, micro_size=1, image_size=size, lora=config.training.lora, share=share
    )
    if work is None:
        return
    ranks = cluster.world_size // parallel.tensor
    sizes = []
    for name, shape in {**work.weights, **work.frozen}.items():
        holders = ranks // parallel.expert if EXPERTS in name else ranks
        sizes.append((name, prod(shape), holders))
    yield from uneven_shares(sizes, kept_whole=config.zero.stage3_param_persistence_threshold)


@rule("not-in-a-run")
def copies_of_weights_on_nvme(config: RunConfig, cluster: Cluster) -> Found:
    """Find second copies of weights on NVMe: DeepSpeed makes each where the weights are, and torch
    has no such device (deepspeed/runtime/zero/partition_parameters.py `_partition_param_sec`).
    """
    size = size_of_copies(config)
    if size > 1 and config.zero.offload_param.device == "nvme":
        reason = "DeepSpeed has no second copies of weights on NVMe"
        fix = "remove it, or keep the weights on the host"
        yield Problem("not-in-a-run", reason, fix, COPIES, size)


def _why_absent(config: RunConfig, section: str, path: str) -> str | None:
    """Return our setting that decides a key of a section that the JSON is left without, or None if
    the JSON has it.
    """
    if section == "optimizer":
        return _why_no_optimizer(config.optimizer, path.rpartition(".")[2])
    if section == "scheduler" and not isinstance(config.scheduler, DeepSpeedSchedule):
        return "scheduler.kind"
    if section == "pipeline" and config.parallel.pipe == 1:
        return "parallel.pipe"
    return None


def _why_no_optimizer(optimizer: OptimizerSection, name: str) -> str | None:
    """Return our setting for a parameter of an optimizer that DeepSpeed does not make, or None."""
    if isinstance(optimizer, (Target, Object)):
        return "optimizer.target"
    if not optimizer.is_own_code and not isinstance(optimizer, Muon | Lamb):
        return None
    if name in type(optimizer).model_fields:
        return f"optimizer.{name}"
    return "optimizer.kind"


def _is_typed(config: RunConfig, key: str) -> bool:
    """Check whether the config's kind of optimizer or schedule has the key: sgd has no betas, for
    example, and then nothing contradicts. Other sections have all their keys.
    """
    section, _, name = key.partition(".")
    fields = type(getattr(config, section)).model_fields
    return section not in ("optimizer", "scheduler") or name in fields


def paths_of(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys that hold no section, and the sections that are refused as one."""
    for name, value in values.items():
        path = f"{prefix}.{name}"
        if isinstance(value, dict) and value and path not in _NOT_IN_A_RUN:
            yield from paths_of(value, path)
        else:
            yield path, value


@rule()
def deepspeed_values(config: RunConfig, cluster: Cluster) -> Found:
    """Find values that DeepSpeed or JSON do not take: DeepSpeed drops "auto" silently and fails on
    most nulls; JSON has neither NaN nor Python's objects.
    """
    for key, value in _leaves(config.deepspeed, "deepspeed"):
        problem = _value_problem(key, value)
        if problem is not None:
            yield problem


def _value_problem(key: str, value: Any) -> Problem | None:
    """Return the problem of a value that DeepSpeed or JSON do not take, or None."""
    if value == "auto" and not key.startswith(_AUTO_HAS_MEANING):
        reason = "DeepSpeed drops it and takes its default"
        fix = "write the value, or remove the key"
        return Problem("auto-in-deepspeed", reason, fix, key, value)
    if value is None:
        reason = "DeepSpeed wants a value or no key"
        return Problem("null-in-deepspeed", reason, "remove the key", key, value)
    if not _is_json(value):
        fix = "write text, a finite number, true, false, a list or a section"
        return Problem("not-json", "JSON has no such value", fix, key, value)
    if key == COPIES and not isinstance(value, int):
        reason = "the run reads it too, and converts nothing"
        fix = "write a whole number, without quotes or a point"
        return Problem("wrong-type", reason, fix, key, value)
    return None


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, (str, int))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of all that is no section and no list; items are numbered."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}.{number}")
    else:
        yield key, value
