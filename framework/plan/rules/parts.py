"""Rules between model, data and task: three parts that are known by name must speak of the same thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from framework.config.base import Object, Section, Target
from framework.config.data import DataObject, DataTarget
from framework.config.model import Classifier, ModelSection
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster

# What a part gives or takes: the data kinds that yield it, the models and tasks that read it. Every other kind is for
# images.
_OF_TEXT: Final[Mapping[str, Mapping[str, str]]] = {
    "data": {"text": "text", "text_pairs": "text_pairs"},
    "model": {"gpt": "text", "bert": "text_pairs"},
    "task": {"causal_lm": "text", "masked_lm": "text_pairs"},
}
_WORDS: Final = {"images": "images", "text": "windows of text", "text_pairs": "pairs of text segments"}
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "text": {"model": "gpt", "data": "text", "task": "causal_lm"},
    "text_pairs": {"model": "bert", "data": "text_pairs", "task": "masked_lm"},
    "images": {"model": "lenet", "data": "digits", "task": "classification"},
}


def parts_speak_of_the_same(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Image data with a language model, or a loss that the data has no targets for: the first step would fail."""
    known = {part: form for part in ("data", "model", "task") if (form := _form(config, part))}
    against = next(iter(known), None)
    for part, form in known.items():
        if against is None or form == known[against]:
            continue
        fixes = [f"{part}.kind: {_PARTS[known[against]][part]}", f"{against}.kind: {_PARTS[form][against]}"]
        given = "has" if against == "data" else "reads"
        yield Problem(
            kind=f"{part}-{against}-mismatch",
            key=f"{part}.kind",
            value=getattr(config, part).kind,
            reason=f"it reads {_WORDS[form]}, and {getattr(config, against).kind}, the {against}, {given} "
            f"{_WORDS[known[against]]}",
            fix=f"set {' or '.join(fixes)}",
        )


def image_shapes_agree(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Model and data are both known by name and their shapes differ: the first forward pass would fail."""
    model, data = config.model, config.data
    if not isinstance(model, Classifier) or isinstance(data, (DataTarget, DataObject)):
        return
    shape = data.image_shape()
    if shape is None:
        return
    pairs = [
        ("image_size", model.expected_image_size(), "image_size", shape.size, "{} pixels"),
        ("in_channels", model.in_channels, "channels", shape.channels, "{} channel(s)"),
        ("num_classes", model.num_classes, "num_classes", shape.num_classes, "{} classes"),
    ]
    for key, expected, data_key, given, words in pairs:
        if expected is not None and given is not None and expected != given:
            fixes = [f"model.{key}: {given}"] if _takes(model, key, given) else []
            fixes += [f"data.{data_key}: {expected}"] if _takes(data, data_key, expected) else []
            yield Problem(
                kind=f"model-data-{key.replace('_', '-')}",
                key=f"model.{key}",
                value=expected,
                reason=f"the {data.kind} data has {words.format(given)}",
                fix=f"set {' or '.join(fixes)}" if fixes else "choose another model or other data",
            )


def sequence_fits(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A position beyond the model's last one would fail inside a GPU kernel."""
    length, most = getattr(config.data, "sequence_length", None), getattr(config.model, "max_positions", None)
    if isinstance(length, int) and isinstance(most, int) and length > most:
        yield Problem(
            kind="sequence-too-long",
            key="data.sequence_length",
            value=length,
            reason=f"the model has {most} positions",
            fix=f"set data.sequence_length: {most} or model.max_positions: {length}",
        )


def vocabulary_fits(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A token that the model does not know would fail inside a GPU kernel; a token file's size is checked before
    training.
    """
    size_of = getattr(config.data, "vocab_size", None)
    yield from vocabulary_problem(size_of() if callable(size_of) else None, config.model)


def vocabulary_problem(given: Any, model: ModelSection) -> Iterator[Problem]:
    """Data with so many different tokens, as soon as somebody knows how many."""
    known = getattr(model, "vocab_size", None)
    if isinstance(given, int) and isinstance(known, int) and given > known:
        yield Problem(
            kind="model-data-vocab-size",
            key="model.vocab_size",
            value=known,
            reason=f"the data has {given} different tokens",
            fix=f"set model.vocab_size: {given} or more",
        )


def _takes(section: Section, key: str, value: int) -> bool:
    try:
        type(section).model_validate({**section.model_dump(), key: value})
    except ValidationError:
        return False
    return True


def _form(config: RunConfig, part: str) -> str | None:
    """Return the form of what a part gives or takes; None where it is the user's own."""
    section: Any = getattr(config, part)
    if isinstance(section, (Target, Object)):
        return None
    return _OF_TEXT[part].get(section.kind, "images")
