"""Rules about weights that are not all trained alike: frozen ones, adapters, the optimizer's
groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from framework.config.freezing import always_frozen, patterns_of, refuse_bad_freeze, scheduled
from framework.config.groups import ALL_LINEAR, LORA, is_named, tied_problem, unmatched_modules
from framework.config.optimizer import Adagrad, optimizer_lr
from framework.config.run_config import RunConfig
from framework.config.training import FrozenSteps
from framework.errors import ConfigError, Problem
from framework.plan.balance import pattern_problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule
from framework.plan.work import model_work


@rule()
def freeze_patterns(config: RunConfig, cluster: Cluster) -> Found:
    """Flag `training.freeze` patterns that are globs, such as ``*.bias``, and patterns that freeze
    every expert: DeepSpeed then finds none.
    """
    entries = config.training.freeze
    if not entries:
        return
    problems = list[Problem]()
    fix = "write for example .*bias for all that ends so"
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            key = f"training.freeze.{number}"
        else:
            key = f"training.freeze.{number}.match"
        for pattern in patterns_of(entry):
            problems += pattern_problem(pattern, key=key, value=pattern, fix=fix)
    yield from problems
    if problems:
        return
    work = model_work(config.model, micro_size=1)
    if work is None:
        return
    if scheduled(entries):
        try:
            refuse_bad_freeze(work.weights, entries)
        except ConfigError as error:
            yield from error.problems
    patterns = always_frozen(entries)
    if config.parallel.expert > 1 and not _has_trained_experts(work.weights, patterns):
        reason = "it freezes all experts, and divided ones must be trained"
        fix = "set parallel.expert: 1"
        yield Problem("expert-with-other", reason, fix, "training.freeze", patterns)


def _has_trained_experts(names: Iterable[str], patterns: Sequence[str]) -> bool:
    experts = [name for name in names if ".experts." in name]
    for pattern in patterns:
        experts = [name for name in experts if not re.fullmatch(pattern, name)]
    return bool(experts)


def _wrong_limits(entry: FrozenSteps, key: str, value: dict[str, Any]) -> Iterator[Problem]:
    """Find an entry without a limit, or with two."""
    if entry.until_step is None and entry.from_step is None:
        reason = "it does not say in which steps"
        fix = "add until_step or from_step, or write the patterns alone for the whole run"
        yield Problem("freeze-steps", reason, fix, key, value)
    elif entry.until_step is not None and entry.from_step is not None:
        fix = "keep one of until_step and from_step"
        yield Problem(
            "freeze-steps", "an entry freezes up to a step or from one on", fix, key, value
        )


@rule("freeze-steps")
def freeze_by_steps(config: RunConfig, cluster: Cluster) -> Found:
    """Find weights that are frozen in some steps and have not one limit, or are not proven against
    plain PyTorch.
    """
    entries = scheduled(config.training.freeze)
    if not entries:
        return
    shown = []
    for number, entry in entries.items():
        value = entry.model_dump(exclude_none=True)
        shown.append(value)
        yield from _wrong_limits(entry, f"training.freeze.{number}", value)
    parallel = config.parallel
    zero = config.zero
    refused = {
        # As with groups of the optimizer's own: DeepSpeed reduces a norm for each group over all
        # stages.
        "stages of a pipeline would each have others": (
            "parallel.pipe: 1",
            parallel.pipe > 1 and (zero.stage > 0 or config.precision.dtype == "fp16"),
        ),
        "so have experts that are divided": ("parallel.expert: 1", parallel.expert > 1),
        "state on NVMe is swapped with every step": (
            "zero.offload_optimizer.device: cpu",
            "nvme" in (zero.offload_optimizer.device, zero.offload_param.device),
        ),
        f"at zero.stage {zero.stage} DeepSpeed makes one group of Adagrad's": (
            "optimizer.kind: adamw, or zero.stage: 0",
            zero.stage > 0 and isinstance(config.optimizer, Adagrad),
        ),
    }
    for reason, (fix, holds) in refused.items():
        if holds:
            reason = f"frozen weights have parameter groups of their own, and {reason}"
            yield Problem("freeze-steps", reason, f"set {fix}", "training.freeze", shown)
    if config.training.ema is not None and any(entry.from_step for entry in entries.values()):
        reason = "the moving average of weights that are frozen later would stand still with them"
        yield Problem(
            "freeze-steps", reason, "remove training.ema or from_step", "training.freeze", shown
        )


@rule()
def adapted_modules(config: RunConfig, cluster: Cluster) -> Found:
    """Find adapters for modules that a named model has not, that hold no matrix, or that share
    their weight; other models are checked when they are built.
    """
    lora = config.training.lora
    key = "training.lora.target_modules"
    if lora is None:
        return
    pattern = lora.target_modules
    if isinstance(pattern, str) and pattern != ALL_LINEAR:
        fix = "write for example .*query, or a list of names"
        wrong = list(pattern_problem(pattern, key=key, value=pattern, fix=fix))
        yield from wrong
        if wrong:
            return
    size = getattr(config.model, "image_size", 32)
    work = model_work(config.model, micro_size=1, image_size=size, lora=lora)
    if work is None:
        return
    names = list(work.weights)
    names += work.frozen
    modules = _modules_of(names)
    problems = unmatched_modules(lora, modules)
    yield from problems
    if problems or pattern == ALL_LINEAR:
        return
    adapted = {name.partition(LORA)[0] for name in names if LORA in name}
    shared = {part.shares for part in work.parts}
    for module in modules:
        if not is_named(module, pattern):
            continue
        if module not in adapted:
            reason = f"{module} is no linear layer, convolution or embedding"
            fix = "name modules that are one"
            yield Problem("lora-not-adaptable", reason, fix, key, pattern)
        elif module in shared:
            yield tied_problem(module, pattern)


def _modules_of(names: Iterable[str]) -> list[str]:
    """List the modules that have the weights of these names, without adapters; outer modules come
    before their inner ones.
    """
    modules: dict[str, None] = {}
    for name in names:
        if LORA not in name:
            module = ""
            for part in name.split(".")[:-1]:
                module = f"{module}.{part}" if module else part
                modules[module] = None
    return list(modules)


@rule()
def optimizer_groups(config: RunConfig, cluster: Cluster) -> Found:
    """Find patterns that are no regular expressions, groups that change nothing, rates that are a
    share of 0, and groups in pipelines with ZeRO or in fp16.

    In these pipelines the norm is reduced once per group over all stages, so that each stage would
    have to have all groups.
    """
    optimizer = config.optimizer
    fix = "write for example .*bias for all that ends so"
    groups = getattr(optimizer, "groups", [])
    for number, group in enumerate(groups):
        key = f"optimizer.groups.{number}"
        yield from pattern_problem(group.match, key=f"{key}.match", value=group.match, fix=fix)
        if group.lr is None and group.weight_decay is None:
            reason = "it has neither lr nor weight_decay of its own"
            yield Problem(
                "group-changes-nothing",
                reason,
                "set one of them, or remove the group",
                key,
                group.match,
            )
        if group.lr and not optimizer_lr(config.optimizer):
            reason = "a schedule moves it as a share of optimizer.lr, which is 0"
            yield Problem("group-lr-of-nothing", reason, "set optimizer.lr", f"{key}.lr", group.lr)
    yield from _groups_in_stages(config, groups)


def _groups_in_stages(config: RunConfig, groups: Sequence[Any]) -> Iterator[Problem]:
    """Find groups in pipelines with ZeRO or in fp16."""
    is_fp16 = config.precision.dtype == "fp16"
    if config.parallel.pipe == 1 or not (config.zero.stage or is_fp16):
        return
    key = "optimizer.groups"
    value: Any = [group.match for group in groups]
    if not groups:
        key = "optimizer.layer_decay"
        value = getattr(config.optimizer, "layer_decay", 1.0)
        if value == 1.0:
            return
    how = "with ZeRO" if config.zero.stage else "in fp16"
    reason = f"{how} every stage of a pipeline must have weights of every group"
    other = ""
    if not is_fp16:
        other = "zero.stage: 0 or "
    elif not config.zero.stage:
        other = "precision.dtype: fp32 or "
    fix = f"set {other}parallel.pipe: 1, or use weight_decay_on: matrices alone"
    yield Problem("groups-with-pipeline", reason, fix, key, value)
