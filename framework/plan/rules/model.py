"""Rules about the model: by itself, beside data and task, under what `training` asks of it, and cut
into stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, Final

from pydantic import ValidationError

from framework.config.base import Object, Section, Target
from framework.config.data import HuggingFace, Mixture
from framework.config.freezing import always_frozen, patterns_of, refuse_bad_freeze, scheduled
from framework.config.groups import ALL_LINEAR, LORA, is_named, tied_problem, unmatched_modules
from framework.config.model import BERT, GPT, Classifier, ModelSection
from framework.config.optimizer import Adagrad, optimizer_lr
from framework.config.run_config import RunConfig
from framework.config.training import ModelLoss
from framework.errors import ConfigError, Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule

# What is read -> the kinds that read or give it; every other kind is for images.
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "text": {"model": "gpt", "data": "text", "task": "causal_lm"},
    "text_pairs": {"model": "bert", "data": "text_pairs", "task": "masked_lm"},
    "conversations": {"model": "gpt", "data": "conversations", "task": "causal_lm"},
    "images": {"model": "lenet", "data": "digits", "task": "classification"},
    "labelled_text": {
        "model": "bert, with num_classes",
        "data": "labelled_text",
        "task": "classification",
    },
}
_WORDS: Final = {
    "images": "images",
    "text": "windows of text",
    "text_pairs": "pairs of text segments",
    "labelled_text": "texts and their classes",
}
_ALSO: Final = {"conversations": "text"}


@rule()
def image_shapes_agree(config: RunConfig, cluster: Cluster) -> Found:
    """Model and data are both known by name and their shapes differ: the first forward pass would
    fail.
    """
    model = config.model
    data = config.data
    shape = data.image_shape()
    if not isinstance(model, Classifier) or isinstance(data, (Target, Object)) or shape is None:
        return
    pairs = [
        ("image_size", model.expected_image_size(), "image_size", shape.size, "pixels"),
        ("in_channels", model.in_channels, "channels", shape.channels, "channel(s)"),
        ("num_classes", model.num_classes, "num_classes", shape.num_classes, "classes"),
    ]
    for key, expected, data_key, given, words in pairs:
        if expected is not None and given is not None and expected != given:
            if _takes(model, key, given):
                fixes = [f"model.{key}: {given}"]
            else:
                fixes = []
            fixes += [f"data.{data_key}: {expected}"] if _takes(data, data_key, expected) else []
            if fixes:
                fix = f"set {' or '.join(fixes)}"
            else:
                fix = "choose another model or other data"
            kind, reason = (
                f"model-data-{key.replace('_', '-')}",
                f"the {data.kind} data has {given} {words}",
            )
            yield Problem(kind, reason, fix, f"model.{key}", expected)


@rule()
def parts_speak_of_the_same(config: RunConfig, cluster: Cluster) -> Found:
    """Image data with a language model, or a loss that the data has no targets for: the first step
    would fail.
    """
    known = {part: form for part in ("data", "model", "task") if (form := _form(config, part))}
    first = next(iter(known), "")
    for part, form in known.items():
        if form != known[first]:
            kind, its_kind = getattr(config, part).kind, getattr(config, first).kind
            given = (
                f"{its_kind}, the {first}, {'has' if first == 'data' else 'reads'} "
                f"{_WORDS[known[first]]}"
            )
            fix = (
                f"set {part}.kind: {_PARTS[known[first]][part]} or {first}.kind: "
                f"{_PARTS[form][first]}"
            )
            reason = f"it reads {_WORDS[form]}, and {given}"
            yield Problem(f"{part}-{first}-mismatch", reason, fix, f"{part}.kind", kind)


@rule("sequence-too-long")
def sequence_fits(config: RunConfig, cluster: Cluster) -> Found:
    """A position beyond the model's last one would fail inside a GPU kernel."""
    length = getattr(config.data, "sequence_length", None)
    most = getattr(config.model, "max_positions", None)
    if isinstance(length, int) and isinstance(most, int) and length > most:
        fix = f"set data.sequence_length: {most} or model.max_positions: {length}"
        yield "data.sequence_length", f"the model has {most} positions", fix


@rule()
def vocabulary_fits(config: RunConfig, cluster: Cluster) -> Found:
    """A token that the model does not know would fail inside a GPU kernel; token files are looked
    at later.
    """
    size_of = getattr(config.data, "vocab_size", None)
    yield from vocabulary_problem(size_of() if callable(size_of) else None, config.model)


def vocabulary_problem(given: Any, model: ModelSection) -> Iterator[Problem]:
    """Data with so many different tokens, as soon as somebody knows how many."""
    known = getattr(model, "vocab_size", None)
    if isinstance(given, int) and isinstance(known, int) and given > known:
        reason = f"the data has {given} different tokens"
        fix = f"set model.vocab_size: {given} or more"
        yield Problem("model-data-vocab-size", reason, fix, "model.vocab_size", known)


def _takes(section: Section, key: str, value: int) -> bool:
    try:
        type(section).model_validate({**section.model_dump(), key: value})
    except ValidationError:
        return False
    return True


def _form(config: RunConfig, part: str) -> str | None:
    """Return the form of what a part gives or takes; None where it is the user's own."""
    section: Any = getattr(config, part)
    if isinstance(section, (Target, Object, HuggingFace, Mixture, ModelLoss)):
        return None
    if section.kind == "classification":
        if "labelled_text" in (_form(config, "data") or _form(config, "model") or ""):
            return "labelled_text"
        return "images"
    if isinstance(section, BERT) and section.num_classes:
        return "labelled_text"
    form = next((form for form, kinds in _PARTS.items() if kinds[part] == section.kind), "images")
    return _ALSO.get(form, form)


@rule("heads-not-divisible")
def heads_divide(config: RunConfig, cluster: Cluster) -> Found:
    """Attention splits the hidden units evenly over its heads, and shares key heads evenly; a
    rotation turns pairs.
    """
    model = config.model
    key = "model.num_heads"
    if not isinstance(model, (GPT, BERT)):
        return
    units = model.hidden_size
    heads = model.num_heads
    if units % heads:
        reason = f"{units} hidden units cannot be split evenly over the heads"
        yield key, reason, f"set {key}: {_divisor(units, near=heads)}"
    elif isinstance(model, GPT) and heads % model.num_kv_heads:
        fix = f"set model.num_kv_heads: {_divisor(heads, near=model.num_kv_heads)}"
        yield "model.num_kv_heads", f"{heads} heads cannot share them evenly", fix
    elif isinstance(model, GPT) and model.positions == "rotary" and units // heads % 2:
        reason = f"a head has {units // heads} units, and rotary positions turn pairs of them"
        fix = "set model.hidden_size to an even multiple of model.num_heads"
        yield Problem("odd-rotary-heads", reason, fix, key, heads)


@rule("sequence-not-shared")
def sequences_are_shared(config: RunConfig, cluster: Cluster) -> Found:
    """Ranks that share sequences have a part of the heads in attention, and equal parts of the
    positions elsewhere.
    """
    model = config.model
    key = "parallel.sequence"
    size = config.parallel.sequence
    if size == 1 or isinstance(model, (Target, Object)):
        return
    length = getattr(config.data, "sequence_length", None)
    if not isinstance(model, (GPT, BERT)):
        yield key, f"{model.kind} reads no sequences", f"set {key}: 1"
    elif (heads := model.num_heads // config.parallel.tensor) % size:  # of a rank's tensor group
        if heads:
            shared = _divisor(heads, near=size)
        else:
            shared = 1
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
    """Of so many blocks the last has experts, and there are not so many."""
    moe = getattr(config.model, "moe", None)
    if moe and moe.every > (count := config.model.num_layers):  # type: ignore[union-attr]
        yield (
            "model.moe.every",
            f"of {count} blocks none would have experts",
            f"write every: {count} or less",
        )


@rule("experts-not-divisible")
def experts_divide(config: RunConfig, cluster: Cluster) -> Found:
    """Whole experts for every rank of a group, and whole groups."""
    size = config.parallel.expert
    moe = getattr(config.model, "moe", None)
    key = "parallel.expert"
    ranks = cluster.world_size // prod(config.parallel.sizes().values())
    for count, what in (
        ((moe.num_experts, "experts"), (ranks, "data-parallel ranks")) if moe else ()
    ):
        if count % size:
            reason = f"{count} {what} cannot be split evenly over them"
            yield key, reason, f"set {key}: {_divisor(count, near=size)}"
            return


def _divisor(number: int, *, near: int) -> int:
    """The divisor that is nearest."""
    near = min(near, number)
    return next(
        d for step in range(number) for d in (near - step, near + step) if d > 0 and number % d == 0
    )


@rule("recompute-whole-model", "warning")
def recompute_in_parts(config: RunConfig, cluster: Cluster) -> Found:
    """One group of everything runs everything again and holds, while it does, as much as
    without.
    """
    key = "training.recompute_every"
    if not config.training.recompute_every:
        return
    from framework.plan.shipped_models import num_layers

    count = num_layers(config.model)
    if count is not None and config.training.recompute_every >= count:
        reason = (
            f"all {count} layers are one group, which computes them twice and saves next to "
            "no memory"
        )
        yield key, reason, f"set {key}: 1 or a few"


@rule()
def freeze_patterns(config: RunConfig, cluster: Cluster) -> Found:
    """Text that is no regular expression, such as ``*.bias``; all experts, of which DeepSpeed then
    finds none.
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
    experts = [name for name in work.weights if ".experts." in name]
    if config.parallel.expert > 1 and all(
        any(re.fullmatch(one, name) for one in patterns) for name in experts
    ):
        reason = "it freezes all experts, and divided ones must be trained"
        fix = "set parallel.expert: 1"
        yield Problem("expert-with-other", reason, fix, "training.freeze", patterns)


@rule("freeze-steps")
def freeze_by_steps(config: RunConfig, cluster: Cluster) -> Found:
    """Weights that are frozen in some steps: one limit each, and only where they were held against
    plain PyTorch.
    """
    entries = scheduled(config.training.freeze)
    if not entries:
        return
    shown = [entry.model_dump(exclude_none=True) for entry in entries.values()]
    for number, entry in entries.items():
        key = f"training.freeze.{number}"
        value = entry.model_dump(exclude_none=True)
        if entry.until_step is None and entry.from_step is None:
            reason = "it does not say in which steps"
            fix = "add until_step or from_step, or write the patterns alone for the whole run"
            yield Problem("freeze-steps", reason, fix, key, value)
        elif entry.until_step is not None and entry.from_step is not None:
            fix = "keep one of until_step and from_step"
            yield Problem(
                "freeze-steps", "an entry freezes up to a step or from one on", fix, key, value
            )
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
    """Adapters for modules that a named model has not, that hold no matrix, or whose weight is used
    twice; other models are looked at when they are built.
    """
    lora = config.training.lora
    key = "training.lora.target_modules"
    if lora is None:
        return
    from framework.plan.balance import pattern_problem
    from framework.plan.work import model_work

    pattern = lora.target_modules
    if isinstance(pattern, str) and pattern != ALL_LINEAR:
        wrong = [
            *pattern_problem(
                pattern, key=key, value=pattern, fix="write for example .*query, or a list of names"
            )
        ]
        yield from wrong
        if wrong:
            return
    size = getattr(config.model, "image_size", 32)
    work = model_work(config.model, micro_size=1, image_size=size, lora=lora)
    if work is None:
        return
    names = [*work.weights, *work.frozen]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names if LORA not in name)
    parents = dict.fromkeys(
        parent for name in modules for parent in accumulate(name.split("."), "{}.{}".format)
    )
    problems = unmatched_modules(lora, [*parents])
    yield from problems
    if problems or pattern == ALL_LINEAR:
        return
    adapted = {name.partition(LORA)[0] for name in names if LORA in name}
    shared = {part.shares for part in work.parts}
    for module in filter(partial(is_named, names=pattern), parents):
        if module not in adapted:
            reason = f"{module} is no linear layer, convolution or embedding"
            fix = "name modules that are one"
            yield Problem("lora-not-adaptable", reason, fix, key, pattern)
        elif module in shared:
            yield tied_problem(module, pattern)


@rule()
def optimizer_groups(config: RunConfig, cluster: Cluster) -> Found:
    """Patterns that are none, groups that change nothing or a rate that has no share of anything,
    and pipelines with ZeRO or in fp16: there the norm is reduced once per group over all stages,
    and each would have to have all groups.
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
    is_fp16 = config.precision.dtype == "fp16"
    if config.zero.stage:
        how = "with ZeRO"
    elif is_fp16:
        how = "in fp16"
    else:
        how = ""
    if (
        config.parallel.pipe > 1
        and how
        and (groups or getattr(optimizer, "layer_decay", 1.0) != 1.0)
    ):
        key = "optimizer.groups" if groups else "optimizer.layer_decay"
        reason = f"{how} every stage of a pipeline must have weights of every group"
        if config.zero.stage and is_fp16:
            other = ""
        elif how == "with ZeRO":
            other = "zero.stage: 0 or "
        else:
            other = "precision.dtype: fp32 or "
        fix = f"set {other}parallel.pipe: 1, or use weight_decay_on: matrices alone"
        value = [group.match for group in groups] if groups else optimizer.layer_decay  # type: ignore[union-attr]
        yield Problem("groups-with-pipeline", reason, fix, key, value)


@rule()
def stages_fit(config: RunConfig, cluster: Cluster) -> Found:
    """The cut into stages as it is written; models that are not known by name are looked at when
    they are built.
    """
    if config.parallel.pipe > 1:
        from framework.plan.balance import stage_problems
        from framework.plan.shipped_models import num_layers

        yield from stage_problems(config.parallel, num_layers(config.model))


@rule("inert-beside-stages", "warning")
def partition_beside_stages(config: RunConfig, cluster: Cluster) -> Found:
    """Two ways to cut were written down, and one of them decides."""
    parallel = config.parallel
    # A resolved config writes the default down too.
    is_asked = parallel.partition != type(parallel).model_fields["partition"].default
    if parallel.pipe > 1 and parallel.stages is not None and is_asked:
        yield (
            "parallel.partition",
            "parallel.stages names the stage of every layer",
            "remove one of them",
        )


@rule()
def idle_stages(config: RunConfig, cluster: Cluster) -> Found:
    """Share of a step in which a stage waits: (p - 1) / (m + p - 1) (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training", section 2.2).
    """
    stages = config.parallel.pipe
    batch = config.batch
    count = batch.accumulation_steps
    if count is None and batch.global_size and batch.micro_size:
        count = batch.global_size * stages // (batch.micro_size * cluster.world_size)
    count = count or 1
    if 1 < stages > count:
        idle, then_idle = ((stages - 1) / (number + stages - 1) for number in (count, 4 * stages))
        batches = f"{count} micro-batch{'es' if count > 1 else ''}"
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
