"""Rules about the model: by itself, beside data and task, and in recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from framework.config.base import Kind, ModelKind, Section
from framework.config.data import Dataset
from framework.config.model import Classifier, LanguageModel, ModelSection
from framework.config.run_config import RunConfig
from framework.config.training import Classification
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, nearest_divisor, rule


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
        settings: list[_Setting] = [
            ("model", model, key, value),
            ("data", data, data_key, expected),
        ]
        fix = _ways_to_agree(settings)
        kind = f"model-data-{key.replace('_', '-')}"
        reason = f"the {data.kind} data has {value} {words}"
        yield Problem(kind, reason, fix, f"model.{key}", expected)


# Name of a section, the section, one of its keys and a value.
_Setting = tuple[str, Section, str, int]


def _ways_to_agree(settings: Iterable[_Setting]) -> str:
    """Return as a fix the settings that their sections accept."""
    fixes = []
    for name, section, key, value in settings:
        if _accepts(section, key, value):
            fixes.append(f"{name}.{key}: {value}")
    if fixes:
        return f"set {' or '.join(fixes)}"
    return "choose another model or other data"


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
    is_alone = bool(first) and list(known.values()).count(known[first]) == 1
    for part, form in known.items():
        if form != known[first]:
            yield _mismatch(config, part, form, first, known[first], is_alone=is_alone)


def _mismatch(
    config: RunConfig, part: str, form: str, first: str, first_form: str, *, is_alone: bool
) -> Problem:
    """Return the problem of a part that takes another form of data than the first known part;
    `is_alone`: no third part takes the first one's form, so that this one may change as well.
    """
    from framework.config import forms

    kind = getattr(config, part).kind
    first_kind = getattr(config, first).kind
    verb = "has" if first == "data" else "reads"
    first_part = f"{first_kind}, the {first}, {verb} {forms.NAMES[first_form]}"
    fix = f"set {part}.kind: {forms.KINDS[first_form][part]}"
    if is_alone:
        fix += f" or {first}.kind: {forms.KINDS[form][first]}"
    reason = f"it reads {forms.NAMES[form]}, and {first_part}"
    return Problem(f"{part}-{first}-mismatch", reason, fix, f"{part}.kind", kind)


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


def classes_problem(num_classes: int, model: ModelSection) -> Iterator[Problem]:
    """Find training data with more classes than the model has."""
    known = getattr(model, "num_classes", None)
    if known is not None and num_classes > known:
        reason = f"the training data has {num_classes} classes"
        fix = f"set model.num_classes: {num_classes}"
        yield Problem("model-data-num-classes", reason, fix, "model.num_classes", known)


def _accepts(section: Section, key: str, value: int) -> bool:
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
        return _form_of_classification(config)
    return section.form()


def _form_of_classification(config: RunConfig) -> str:
    """Return the form that data or model have, as the task takes either."""
    form = _form(config, "data") or _form(config, "model") or ""
    if "labelled_text" in form:
        return "labelled_text"
    return "images"


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
        yield key, reason, f"set {key}: {nearest_divisor(units, near=heads)}"
    elif heads % num_kv_heads:
        fix = f"set model.num_kv_heads: {nearest_divisor(heads, near=num_kv_heads)}"
        yield "model.num_kv_heads", f"{heads} heads cannot share them evenly", fix
    elif getattr(model, "positions", "") == "rotary" and units // heads % 2:
        reason = f"a head has {units // heads} units, and rotary positions turn pairs of them"
        fix = "set model.hidden_size to an even multiple of model.num_heads"
        yield Problem("odd-rotary-heads", reason, fix, key, heads)


@rule("mlp-not-tiled")
def perceptrons_in_tiles(config: RunConfig, cluster: Cluster) -> Found:
    """Find tiles of perceptrons in a named model that has none to compute so; other models are
    looked at when they are built.
    """
    model = config.model
    key = "training.mlp_tile"
    if not config.training.mlp_tile or not isinstance(model, ModelKind) or model.is_own_code:
        return
    moe = getattr(model, "moe", None)
    if not isinstance(model, LanguageModel):
        yield key, f"{model.kind} reads no positions", f"set {key}: 0"
    elif moe and moe.every == 1:
        reason = "every perceptron is an expert's, which takes the tokens that are sent to it"
        yield key, reason, f"set {key}: 0, or model.moe.every: 2"


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
