"""Rules about weights that are not all trained alike: frozen ones, adapters, the optimizer's
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from framework.config.freezing import patterns_of, refuse_bad_freeze, scheduled
from framework.config.groups import (
    ALL_LINEAR,
    LORA,
    NUMBERS_OF_A_BLOCK,
    is_adapted,
    is_named,
    refuse_unmatched_groups,
    tied_problem,
    unmatched_modules,
)
from framework.config.optimizer import optimizer_lr
from framework.config.run_config import RunConfig
from framework.config.training import FrozenSteps
from framework.errors import ConfigError, Problem
from framework.plan.balance import pattern_problem
from framework.plan.cluster import Cluster
from framework.plan.rank_memory import EXPERTS
from framework.plan.rules.base import Found, rule
from framework.plan.work import ModelWork, model_work, trained_shapes, weights_alone

_ADAPTED: Final = "training.lora.target_modules"


@rule()
def freeze_patterns(config: RunConfig, cluster: Cluster) -> Found:
    """Flag `training.freeze` patterns that are globs, such as ``*.bias``, and those that no weight
    of a named model matches.
    """
    entries = config.training.freeze
    if not entries:
        return
    problems = _bad_patterns(entries)
    yield from problems
    if problems:
        return
    work = weights_alone(config.model)
    if work is None:
        return
    try:
        refuse_bad_freeze(work.weights, entries)
    except ConfigError as error:
        yield from error.problems


def _bad_patterns(entries: Sequence[str | FrozenSteps]) -> list[Problem]:
    """List the problems of patterns that are no regular expressions."""
    problems: list[Problem] = []
    fix = "write for example .*bias for all that ends so"
    for number, entry in enumerate(entries):
        key = f"training.freeze.{number}"
        if not isinstance(entry, str):
            key += ".match"
        for pattern in patterns_of(entry):
            problems += pattern_problem(pattern, key=key, value=pattern, fix=fix)
    return problems


def _wrong_limits(entry: FrozenSteps, key: str, value: dict[str, Any]) -> Iterator[Problem]:
    """Find an entry without a limit, or with two; `key`, `value`: as problems show it."""
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
    """Find entries of `training.freeze` that freeze weights in some steps only, and name no step or
    two, or stand beside a setting with which that is not proven against plain PyTorch.
    """
    entries = scheduled(config.training.freeze)
    if not entries:
        return
    entry_values = []
    for number, entry in entries.items():
        value = entry.model_dump(exclude_none=True)
        entry_values.append(value)
        yield from _wrong_limits(entry, f"training.freeze.{number}", value)
    for reason, fix in _refused_with_frozen_groups(config):
        reason = f"frozen weights have parameter groups of their own, and {reason}"
        yield Problem("freeze-steps", reason, f"set {fix}", "training.freeze", entry_values)
    if config.training.ema is not None and any(entry.from_step for entry in entries.values()):
        reason = "the moving average of weights that are frozen later would stand still with them"
        yield Problem(
            "freeze-steps",
            reason,
            "remove training.ema or from_step",
            "training.freeze",
            entry_values,
        )


def _refused_with_frozen_groups(config: RunConfig) -> list[tuple[str, str]]:
    """List reason and fix of each setting with which no group of frozen weights is made."""
    parallel = config.parallel
    zero = config.zero
    refused = []
    # DeepSpeed reduces a norm for each group over all stages, as `optimizer_groups` explains.
    if parallel.pipe > 1 and (zero.stage > 0 or config.precision.dtype == "fp16"):
        refused.append(("stages of a pipeline would each have others", "parallel.pipe: 1"))
    if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
        reason = "state on NVMe is swapped with every step"
        refused.append((reason, "zero.offload_optimizer.device: cpu"))
    return refused


@rule()
def adapted_modules(config: RunConfig, cluster: Cluster) -> Found:
    """Find adapters for modules that a named model has not, that hold no matrix, or that share
    their weight; other models are checked when they are built.
    """
    lora = config.training.lora
    if lora is None:
        return
    pattern = lora.target_modules
    wrong = _bad_targets(pattern)
    yield from wrong
    if wrong:
        return
    size = getattr(config.model, "image_size", 32)
    work = model_work(config.model, micro_size=1, image_size=size, lora=lora)
    if work is None:
        return
    modules = _modules_of(chain(work.weights, work.frozen))
    problems = unmatched_modules(lora, modules)
    yield from problems
    experts = [module for module in modules if EXPERTS in module and is_adapted(module, lora)]
    if experts:
        reason = f"{experts[0]} is an expert's, and its adapter was not held against one process"
        fix = "name other modules, or train experts whole: training.lora.modules_to_save"
        yield Problem("lora-not-adaptable", reason, fix, _ADAPTED, pattern)
    elif not problems and pattern != ALL_LINEAR:
        named = [module for module in modules if is_named(module, pattern)]
        yield from _not_adaptable(named, work, pattern)
    if lora.quantization == "nf4" and config.parallel.tensor > 1:
        adapted = [module for module in modules if is_adapted(module, lora)]
        yield from _cut_blocks(adapted, dict(work.weights) | dict(work.frozen))


def _cut_blocks(modules: Iterable[str], shapes: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    """Find the first row layer that a tensor group cannot divide: its rows are no whole blocks of
    nf4 (`engine/tensor_quantized.py`).
    """
    for module in modules:
        if not module.endswith((".attention.output", ".down")):
            continue
        columns = shapes[f"{module}.weight"][-1]
        if columns % NUMBERS_OF_A_BLOCK:
            reason = (
                f"nf4 has a scale for each {NUMBERS_OF_A_BLOCK} numbers, and {module} divides "
                f"rows of {columns} numbers, which are no multiple of that"
            )
            fix = "set int8, which has a scale for each row, or parallel.tensor: 1"
            key = "training.lora.quantization"
            yield Problem("lora-not-adaptable", reason, fix, key, "nf4")
            return


def _bad_targets(pattern: str | Sequence[str]) -> list[Problem]:
    """List the problems of a pattern that is no regular expression."""
    if not isinstance(pattern, str) or pattern == ALL_LINEAR:
        return []
    fix = "write for example .*query, or a list of names"
    return list(pattern_problem(pattern, key=_ADAPTED, value=pattern, fix=fix))


def _not_adaptable(
    modules: Iterable[str], work: ModelWork, pattern: str | Sequence[str]
) -> Iterator[Problem]:
    """Find modules that hold no matrix, or share their weight."""
    names = chain(work.weights, work.frozen)
    adapted = {name.partition(LORA)[0] for name in names if LORA in name}
    shared = {part.shares for part in work.parts}
    for module in modules:
        if module not in adapted:
            reason = f"{module} is no linear layer, convolution or embedding"
            fix = "name modules that are one"
            yield Problem("lora-not-adaptable", reason, fix, _ADAPTED, pattern)
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
    """Find patterns that are no regular expressions, or that no weight of a named model matches;
    groups that change nothing, rates that are a share of 0, and groups in pipelines with ZeRO or in
    fp16.

    In these pipelines the norm is reduced once per group over all stages, so that each stage would
    have to have all groups.
    """
    optimizer = config.optimizer
    groups = getattr(optimizer, "groups", [])
    wrong = list(_bad_groups(optimizer))
    yield from wrong
    if not wrong and (groups or getattr(optimizer, "matrices", [])):
        yield from _unmatched_groups(config)
    for number, group in enumerate(groups):
        yield from _group_without_effect(optimizer, group, f"optimizer.groups.{number}")
    yield from _groups_in_stages(config, groups)


def _bad_groups(optimizer: Any) -> Iterator[Problem]:
    """Find patterns of groups and matrices that are no regular expressions."""
    fix = "write for example .*bias for all that ends so"
    for number, group in enumerate(getattr(optimizer, "groups", [])):
        key = f"optimizer.groups.{number}.match"
        yield from pattern_problem(group.match, key=key, value=group.match, fix=fix)
    fix = "write for example .*weight"
    for number, pattern in enumerate(getattr(optimizer, "matrices", [])):
        key = f"optimizer.matrices.{number}"
        yield from pattern_problem(pattern, key=key, value=pattern, fix=fix)


def _unmatched_groups(config: RunConfig) -> Iterator[Problem]:
    """Find patterns that match no trained weight of a named model; the names of weights with
    adapters are known when they are added.
    """
    if config.training.lora is not None or _bad_patterns(config.training.freeze):
        return
    shapes = trained_shapes(config)
    if not shapes:
        return
    try:
        refuse_unmatched_groups(shapes, config.optimizer)
    except ConfigError as error:
        yield from error.problems


def _group_without_effect(optimizer: Any, group: Any, key: str) -> Iterator[Problem]:
    """Find a group that changes nothing, or has a share of a rate that is 0."""
    if group.lr is None and group.weight_decay is None:
        reason = "it has neither lr nor weight_decay of its own"
        fix = "set one of them, or remove the group"
        yield Problem("group-changes-nothing", reason, fix, key, group.match)
    if group.lr and not optimizer_lr(optimizer):
        reason = "a schedule moves it as a share of optimizer.lr, which is 0"
        yield Problem("group-lr-of-nothing", reason, "set optimizer.lr", f"{key}.lr", group.lr)


def _groups_in_stages(config: RunConfig, groups: Sequence[Any]) -> Iterator[Problem]:
    """Find groups in pipelines with ZeRO or in fp16."""
    is_fp16 = config.precision.dtype == "fp16"
    if config.parallel.pipe == 1 or not (config.zero.stage or is_fp16):
        return
    key, value = _grouping(config.optimizer, groups)
    if value is None:
        return
    how = "with ZeRO" if config.zero.stage else "in fp16"
    reason = f"{how} every stage of a pipeline must have weights of every group"
    other = _other_than_pipeline(config.zero.stage, is_fp16=is_fp16)
    fix = f"set {other}parallel.pipe: 1, or use weight_decay_on: matrices alone"
    yield Problem("groups-with-pipeline", reason, fix, key, value)


def _grouping(optimizer: Any, groups: Sequence[Any]) -> tuple[str, Any]:
    """Return the key that makes groups, and its value; None if there are none."""
    if groups:
        return "optimizer.groups", [group.match for group in groups]
    layer_decay = getattr(optimizer, "layer_decay", 1.0)
    if layer_decay == 1.0:
        layer_decay = None
    return "optimizer.layer_decay", layer_decay


def _other_than_pipeline(stage: int, *, is_fp16: bool) -> str:
    """Return the setting beside one stage that allows groups, to precede "parallel.pipe: 1" in a
    fix; empty if there is no single one.
    """
    if not is_fp16:
        return "zero.stage: 0 or "
    if not stage:
        return "precision.dtype: fp32 or "
    return ""
