"""Rules about the model: by itself, beside data and task, under what `training` asks of it, and cut
into stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from pydantic import ValidationError

from framework.config import forms
from framework.config.base import Kind, ModelKind, Section
from framework.config.data import Dataset
from framework.config.freezing import always_frozen, patterns_of, refuse_bad_freeze, scheduled
from framework.config.groups import ALL_LINEAR, LORA, is_named, tied_problem, unmatched_modules
from framework.config.model import Classifier, LanguageModel, ModelSection
from framework.config.optimizer import Adagrad, optimizer_lr
from framework.config.run_config import RunConfig
from framework.config.training import Classification, FrozenSteps
from framework.errors import ConfigError, Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule


@rule()
def image_shapes_agree(config: RunConfig, cluster: Cluster) -> Found:
    """Find shapes that differ between a model and data that are both known by name: the first
    forward pass would fail.
    """
    model = config.model
    data = config.data
    shape = data.image_shape()
    if not isinstance(model, Classifier) or not isinstance(data, Dataset) or shape is None:
        return
    pairs = [
        ("image_size", model.expected_image_size(), "image_size", shape.size, "pixels"),
        ("in_channels", model.in_channels, "channels", shape.channels, "channel(s)"),
        ("num_classes", model.num_classes, "num_classes", shape.num_classes, "classes"),
    ]
    for key, expected, data_key, value, words in pairs:
        if expected is None or value is None or expected == value:
            continue
        fixes = []
        if _takes(model, key, value):
            fixes.append(f"model.{key}: {value}")
        if _takes(data, data_key, expected):
            fixes.append(f"data.{data_key}: {expected}")
        fix = "choose another model or other data"
        if fixes:
            fix = f"set {' or '.join(fixes)}"
        kind, reason = (
            f"model-data-{key.replace('_', '-')}",
            f"the {data.kind} data has {value} {words}",
        )
        yield Problem(kind, reason, fix, f"model.{key}", expected)


@rule()
def parts_speak_of_the_same(config: RunConfig, cluster: Cluster) -> Found:
    """Find image data with a language model, or a loss that the data has no targets for: the first
    step would fail.
    """
    known = {}
    for part in ("data", "model", "task"):
        form = _form(config, part)
        if form:
            known[part] = form
    first = next(iter(known), "")
    for part, form in known.items():
        if form != known[first]:
            kind = getattr(config, part).kind
            first_kind = getattr(config, first).kind
            verb = "has" if first == "data" else "reads"
            first_part = f"{first_kind}, the {first}, {verb} {forms.NAMES[known[first]]}"
            fix = (
                f"set {part}.kind: {forms.KINDS[known[first]][part]} or {first}.kind: "
                f"{forms.KINDS[form][first]}"
            )
            reason = f"it reads {forms.NAMES[form]}, and {first_part}"
            yield Problem(f"{part}-{first}-mismatch", reason, fix, f"{part}.kind", kind)


@rule("sequence-too-long")
def sequence_fits(config: RunConfig, cluster: Cluster) -> Found:
    """Find sequences with a position beyond the model's last one, which fail in a GPU kernel."""
    length = getattr(config.data, "sequence_length", None)
    most = getattr(config.model, "max_positions", None)
    if isinstance(length, int) and isinstance(most, int) and length > most:
        fix = f"set data.sequence_length: {most} or model.max_positions: {length}"
        yield "data.sequence_length", f"the model has {most} positions", fix


@rule()
def vocabulary_fits(config: RunConfig, cluster: Cluster) -> Found:
    """Find tokens that are not in the model's vocabulary, which fail in a GPU kernel; token files
    are checked later.
    """
    size_of = getattr(config.data, "vocab_size", None)
    if callable(size_of):
        yield from vocabulary_problem(size_of(), config.model)


def vocabulary_problem(num_tokens: Any, model: ModelSection) -> Iterator[Problem]:
    """Find data with more different tokens than the model has; None: not known."""
    known = getattr(model, "vocab_size", None)
    if isinstance(num_tokens, int) and isinstance(known, int) and num_tokens > known:
        reason = f"the data has {num_tokens} different tokens"
        fix = f"set model.vocab_size: {num_tokens} or more"
        yield Problem("model-data-vocab-size", reason, fix, "model.vocab_size", known)


def _takes(section: Section, key: str, value: int) -> bool:
    try:
        type(section).model_validate({**section.model_dump(), key: value})
    except ValidationError:
        return False
    return True


def _form(config: RunConfig, part: str) -> str | None:
    """Return the form of the data that a part gives or takes; None for a part of the user's own."""
    section: Any = getattr(config, part)
    if not isinstance(section, Kind):
        return None
    if isinstance(section, Classification):
        if "labelled_text" in (_form(config, "data") or _form(config, "model") or ""):
            return "labelled_text"
        return "images"
    return section.form()


@rule("heads-not-divisible")
def heads_divide(config: RunConfig, cluster: Cluster) -> Found:
    """Find heads that do not divide: attention splits the hidden units evenly over its heads, and
    shares key heads evenly; a rotation turns pairs.
    """
    model = config.model
    key = "model.num_heads"
    if not isinstance(model, LanguageModel):
        return
    units = model.hidden_size
    heads = model.num_heads
    num_kv_heads = getattr(model, "num_kv_heads", heads)
    if units % heads:
        reason = f"{units} hidden units cannot be split evenly over the heads"
        yield key, reason, f"set {key}: {_divisor(units, near=heads)}"
    elif heads % num_kv_heads:
        fix = f"set model.num_kv_heads: {_divisor(heads, near=num_kv_heads)}"
        yield "model.num_kv_heads", f"{heads} heads cannot share them evenly", fix
    elif getattr(model, "positions", "") == "rotary" and units // heads % 2:
        reason = f"a head has {units // heads} units, and rotary positions turn pairs of them"
        fix = "set model.hidden_size to an even multiple of model.num_heads"
        yield Problem("odd-rotary-heads", reason, fix, key, heads)


@rule("sequence-not-shared")
def sequences_are_shared(config: RunConfig, cluster: Cluster) -> Found:
    """Find sequences that ranks cannot share: they have a part of the heads in attention, and equal
    parts of the positions elsewhere.
    """
    model = config.model
    key = "parallel.sequence"
    size = config.parallel.sequence
    if size == 1 or not isinstance(model, ModelKind) or model.is_own_code:
        return
    if not isinstance(model, LanguageModel):
        yield key, f"{model.kind} reads no sequences", f"set {key}: 1"
        return
    length = getattr(config.data, "sequence_length", None)
    heads = model.num_heads // config.parallel.tensor  # of a rank's tensor group
    if heads % size:
        shared = _divisor(heads, near=size) if heads else 1
        reason = f"the {heads} heads of attention cannot be shared evenly"
        multiple = size * config.parallel.tensor
        yield key, reason, f"set {key}: {shared} or model.num_heads to a multiple of {multiple}"
    elif isinstance(length, int) and length % size:
        near = max(1, length // size) * size
        yield (
            key,
            f"sequences of {length} positions cannot be shared evenly",
            f"set data.sequence_length: {near}",
        )


@rule("no-block-of-experts")
def blocks_have_experts(config: RunConfig, cluster: Cluster) -> Found:
    """Find a model without experts in any block, because `moe.every` is more than its blocks."""
    moe = getattr(config.model, "moe", None)
    if not moe:
        return
    count = config.model.num_layers  # type: ignore[union-attr]
    if moe.every > count:
        yield (
            "model.moe.every",
            f"of {count} blocks none would have experts",
            f"write every: {count} or less",
        )


@rule("experts-not-divisible")
def experts_divide(config: RunConfig, cluster: Cluster) -> Found:
    """Find experts that do not divide over the ranks of a group, and ranks that do not divide into
    groups.
    """
    size = config.parallel.expert
    moe = getattr(config.model, "moe", None)
    key = "parallel.expert"
    ranks = cluster.world_size // prod(config.parallel.sizes().values())
    if not moe:
        return
    for count, what in ((moe.num_experts, "experts"), (ranks, "data-parallel ranks")):
        if count % size:
            reason = f"{count} {what} cannot be split evenly over them"
            yield key, reason, f"set {key}: {_divisor(count, near=size)}"
            return


def _divisor(number: int, *, near: int) -> int:
    """Return the divisor of a number that is nearest to another one."""
    near = min(near, number)
    for distance in range(number):
        for divisor in (near - distance, near + distance):
            if divisor > 0 and number % divisor == 0:
                return divisor
    raise ValueError(f"{number} has no divisor")


@rule("recompute-whole-model", "warning")
def recompute_in_parts(config: RunConfig, cluster: Cluster) -> Found:
    """Find recomputation in a single group: it runs the entire model again, and holds as much
    meanwhile as a run without recomputation.
    """
    key = "training.recompute_every"
    if not config.training.recompute_every:
        return
    from framework.plan.layers import num_layers

    count = num_layers(config.model)
    if count is not None and config.training.recompute_every >= count:
        reason = (
            f"all {count} layers are one group, which computes them twice and saves next to "
            "no memory"
        )
        yield key, reason, f"set {key}: 1 or a few"


@rule()
def freeze_patterns(config: RunConfig, cluster: Cluster) -> Found:
    """Flag `training.freeze` patterns that are globs, such as ``*.bias``, and patterns that freeze
    every expert: DeepSpeed then finds none.
    """
    entries = config.training.freeze
    if not entries:
        return
    from framework.plan.balance import pattern_problem
    from framework.plan.work import model_work

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
    from framework.plan.balance import pattern_problem
    from framework.plan.work import model_work

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
    if groups:
        from framework.plan.balance import pattern_problem
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


@rule()
def stages_fit(config: RunConfig, cluster: Cluster) -> Found:
    """Find what is wrong with the cut into stages; models that are not known by name are checked
    when they are built.
    """
    if config.parallel.pipe > 1:
        from framework.plan.balance import stage_problems
        from framework.plan.layers import num_layers

        yield from stage_problems(config.parallel, num_layers(config.model))


@rule("inert-beside-stages", "warning")
def partition_beside_stages(config: RunConfig, cluster: Cluster) -> Found:
    """Find two ways to cut a model: one of them has no effect."""
    parallel = config.parallel
    # A resolved config has the default, too.
    is_changed = parallel.partition != type(parallel).model_fields["partition"].default
    if parallel.pipe > 1 and parallel.stages is not None and is_changed:
        yield (
            "parallel.partition",
            "parallel.stages names the stage of every layer",
            "remove one of them",
        )


@rule()
def idle_stages(config: RunConfig, cluster: Cluster) -> Found:
    """Find pipelines with fewer micro-batches than stages: a stage waits (p - 1) / (m + p - 1) of a
    step (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2).
    """
    stages = config.parallel.pipe
    batch = config.batch
    count = batch.accumulation_steps
    if count is None and batch.global_size and batch.micro_size:
        count = batch.global_size * stages // (batch.micro_size * cluster.world_size)
    count = count or 1
    if 1 < stages > count:
        idle = (stages - 1) / (count + stages - 1)
        then_idle = (stages - 1) / (4 * stages + stages - 1)
        batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        reason = f"with {batches} per step {stages} stages stand idle {idle:.0%} of the time"
        key = "batch.accumulation_steps"
        yield Problem(
            "pipeline-idle",
            reason,
            f"set {key}: {4 * stages} for {then_idle:.0%}",
            key,
            count,
            severity="note",
        )
