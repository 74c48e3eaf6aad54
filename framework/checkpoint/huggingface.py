"""Models of Hugging Face's transformers that compute what shipped ones do: their config.json and
the names of their weights, read by `checkpoint.init_weights` and written by `export --hf`. Both
follow one table, which the kind of a model names (`ModelKind.transformers_table`), by
``model_type``:

- kind: the kind of our model;

- needs: fields that our model must have;
- values: our field -> their keys (``a|b``: the first of these that is set);
- absent: their key -> its value where it is missing, or [factor, another key];
- written: fields that weights do not depend on, for exports alone;
- theirs: key -> values with which both compute the same, the first one where it is missing;
- rows: weights with a row for each token or position; the number of rows may differ;
- heads: weights that a folder may lack;
- ties: further names of a weight.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.json_objects import read_object
from framework.config.base import ModelKind
from framework.config.model import ModelSection
from framework.config.run_config import RunConfig
from framework.errors import Problem, show_value

CONFIG: Final = "config.json"
_KEY: Final = "checkpoint.init_weights"
_WEIGHTS: Final = "model.safetensors"
_AS_IT_IS: Final = "train it as it is: model.target: transformers:AutoModel....from_pretrained"


@dataclass(frozen=True)
class Joined:
    """Our weights that make up one of theirs, one below the other along the first dimension.

    Attributes:
        ours: their names.
        transposed: theirs has the shape (inputs, outputs), and ours have (outputs, inputs).
        rows: field of our model with the number of rows, if that may differ.
        may_lack: a folder may be without it; ours are then drawn.
    """

    ours: tuple[str, ...]
    transposed: bool
    rows: str
    may_lack: bool


@dataclass(frozen=True)
class Form:
    """A model section of ours as an architecture of transformers, its ``model_type``."""

    name: str
    table: dict[str, Any]
    model: Any

    @cached_property
    def weights(self) -> Mapping[str, Joined]:
        """All weights, by their name in transformers."""
        table = self.table
        names = dict(table["weights"])
        if getattr(self.model, "tie_embeddings", False):
            del names["head.weight"]
        for ours, theirs in self._modules().items():
            for parameter in self._parameters_of(ours):
                our_names = " ".join(f"{module}.{parameter}" for module in ours.split())
                names[our_names] = f"{theirs}.{parameter}"
        weights = {}
        for ours, theirs in names.items():
            weights[theirs] = Joined(
                tuple(ours.split()),
                transposed=theirs.endswith(tuple(table["transposed"])),
                rows=table["rows"].get(ours, ""),
                may_lack=ours.startswith(tuple(table["heads"])),
            )
        return weights

    def _modules(self) -> dict[str, str]:
        """Map our modules to theirs; names of ours that make up one of theirs, joined by spaces."""
        modules = dict(self.table["modules"])
        for number in range(self.model.num_layers):
            for ours, theirs in self.table["block"].items():
                our_names = " ".join(f"blocks.{number}.{name}" for name in ours.split())
                modules[our_names] = f"{self.table['blocks']}.{number}.{theirs}"
        return modules

    def _parameters_of(self, module: str) -> tuple[str, ...]:
        is_rms_norm = getattr(self.model, "norm", "") == "rmsnorm" and module.endswith("norm")
        if getattr(self.model, "bias", True) and not is_rms_norm:
            return ("weight", "bias")
        return ("weight",)

    def names_in(self, names: Collection[str]) -> dict[str, str]:
        """Map names as `weights` has them to `names`, those in a file, which may lack a prefix or
        name norms as BERT once did. Names that the table ignores are left out; unknown ones stay.
        """
        name_of = {}
        prefix = self.table["prefix"]
        for name in names:
            plain = name.replace("LayerNorm.gamma", "LayerNorm.weight")
            plain = plain.replace("LayerNorm.beta", "LayerNorm.bias")
            prefixed = plain
            if not plain.startswith(prefix):
                prefixed = prefix + plain
            if re.fullmatch(self.table["ignored"], prefixed):
                continue
            if prefixed in self.weights:
                name_of[prefixed] = name
            else:
                name_of[plain] = name
        return name_of

    def described(self) -> dict[str, Any]:
        """Return the content of config.json."""
        values = {}
        for ours, keys in (self.table["values"] | self.table["written"]).items():
            for key in keys:
                values[key] = getattr(self.model, ours)
        for key, allowed in self.table["theirs"].items():
            values[key] = allowed[0]
        content: dict[str, Any] = {
            "architectures": [self.table["architecture"]],
            "model_type": self.name,
        }
        for key, value in values.items():
            path = key.partition("|")[0].split(".")
            if len(path) == 1:
                content[path[0]] = value
            else:
                content.setdefault(path[0], {})[path[-1]] = value
        return content

    def misfits(self, described: Mapping[str, Any], file: Path) -> Iterator[Problem]:
        """Find the values of a config.json with which our model does not compute the same, with
        the key to set.
        """
        yield from self._other_architecture(described, file)
        yield from self._other_values(described, file)

    def _other_architecture(self, described: Mapping[str, Any], file: Path) -> Iterator[Problem]:
        """Find what the other model does not compute: values of their keys that ours lacks, and
        values of our fields that theirs lacks.
        """
        for key, allowed in self.table["theirs"].items():
            value = _find(described, key, allowed[0])
            if value not in allowed:
                reason = (
                    f"{file} has {key.partition('|')[0]}: {show_value(value)}; ours is "
                    f"{show_value(allowed[0])}"
                )
                yield Problem("weights-differ", reason, _AS_IT_IS, _KEY)
        for ours, value in self.table["needs"].items():
            own = getattr(self.model, ours)
            if own != value:
                fix = f"set model.{ours}: {show_value(value)}"
                yield Problem(
                    "weights-differ", f"{file} is of a {self.name}", fix, f"model.{ours}", own
                )

    def _other_values(self, described: Mapping[str, Any], file: Path) -> Iterator[Problem]:
        """Find the fields of our model with another value than their keys; a larger vocabulary of
        ours is a note.
        """
        reported: dict[str, Any] = {}
        for ours, keys in self.table["values"].items():
            own = getattr(self.model, ours)
            for key in keys:
                theirs = self._theirs(described, key)
                # Of more positions than ours the first are taken.
                if own == theirs or (ours == "max_positions" and own < theirs):
                    continue
                # Two of our fields may share a key, as heads and key-value heads do: report one.
                if key in reported and own == reported[key]:
                    continue
                reported[key] = own
                place = f"{file} has {key.partition('|')[0]}: {show_value(theirs)}"
                yield _other_value(ours, own, theirs, place)

    def _theirs(self, described: Mapping[str, Any], key: str) -> Any:
        """Return the number at a key of config.json, or its default if there is no number."""
        absent = self.table["absent"][key]
        if isinstance(absent, list):
            factor, other_key = absent
            absent = factor * self._theirs(described, other_key)
        value = _find(described, key, absent)
        if isinstance(value, int | float):
            return value
        return absent

    def misnamed(self, names: Collection[str], path: str) -> Iterator[Problem]:
        """Find weights that the tensors' names lack, names that the model lacks, and weights that
        may be drawn instead. `path` is the value of `checkpoint.init_weights`.
        """
        name_of = self.names_in(names)
        absent = {key: joined for key, joined in self.weights.items() if key not in name_of}
        missing = [key for key, joined in absent.items() if not joined.may_lack]
        drawn: list[str] = []
        for joined in absent.values():
            if joined.may_lack:
                drawn += joined.ours
        extra = self._unknown(name_of)
        fix = "name weights of it"
        if missing:
            reason = f"it lacks {_shortened(missing)}"
            yield Problem("weights-differ", reason, fix, _KEY, path)
        if extra:
            reason = f"it has {_shortened(extra)}, which the model has not"
            yield Problem("weights-differ", reason, fix, _KEY, path)
        if drawn:
            reason = f"it lacks {', '.join(drawn)}, which are drawn from run.seed"
            yield Problem("weights-partial", reason, "", _KEY, path, severity="warning")

    def _unknown(self, name_of: Mapping[str, str]) -> list[str]:
        """List the names of tensors that the model lacks, given plain name -> name."""
        unknown = []
        for plain, name in name_of.items():
            if plain not in self.weights and name not in self.table["ties"]:
                unknown.append(name)
        return unknown


def _other_value(name: str, own: Any, theirs: Any, place: str) -> Problem:
    """Return the problem of a field of our model with another value than there, at a place; a note
    for a larger vocabulary.
    """
    key = f"model.{name}"
    if name == "vocab_size" and own > theirs:
        reason = f"{place}; the other {own - theirs} tokens begin as the mean of those"
        return Problem("weights-padded", reason, "", key, own, severity="note")
    return Problem("weights-differ", place, f"set {key}: {show_value(theirs)}", key, own)


def _shortened(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


@cache
def _table(place: str) -> Mapping[str, Any]:
    """Read a table, named as ``package:file``."""
    package, _, name = place.partition(":")
    table: dict[str, Any] = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
    return table


def form_of(model: ModelSection) -> Form | None:
    """Return the architecture that our model section has in transformers, or None."""
    if not isinstance(model, ModelKind) or not model.transformers_table:
        return None
    for name, table in _table(model.transformers_table).items():
        if table["kind"] != model.kind:
            continue
        if all(getattr(model, field) == value for field, value in table["needs"].items()):
            return _form(name, table, model)
    return None


def _form(name: str, table: dict[str, Any], model: Any) -> Form:
    if getattr(model, "num_classes", None):
        table = table | table.get("with_classes", {})
    return Form(name, table, model)


def published_problems(config: RunConfig) -> list[Problem]:
    """Find the problems of a Hugging Face folder as `checkpoint.init_weights` of one of our models,
    as far as its config.json and the header of its safetensors show them.
    """
    path = config.checkpoint.init_weights
    model = config.model
    if path is None or not isinstance(model, ModelKind) or not model.transformers_table:
        return []
    weights_file = Path(path)
    if os.path.isdir(path):  # noqa: PTH112 - pathlib raises if the name is too long
        weights_file = weights_file / _WEIGHTS
    file = weights_file.parent / CONFIG
    described = read_object(file) or {}
    type_ = described.get("model_type")
    if not isinstance(type_, str):
        return []
    table = _table(model.transformers_table).get(type_, {})
    if table.get("kind") != model.kind:
        reason = f"{file} is of a {show_value(type_)}, which no model.kind {model.kind} is"
        return [Problem("weights-differ", reason, _fix_of_kind(table), _KEY, path)]
    form = _form(type_, table, model)
    problems = list(form.misfits(described, file))
    names = _tensors_in(weights_file)
    # With this name of ours it is an export under our own names.
    has_errors = any(problem.severity == "error" for problem in problems)
    if names and "embed.weight" not in names and not has_errors:
        problems += form.misnamed(names, path)
    return problems


def _fix_of_kind(table: Mapping[str, Any]) -> str:
    """Return the fix for weights of another kind, which `table` describes; empty: of no kind."""
    if table:
        return f"set model.kind: {table['kind']}"
    return _AS_IT_IS


def _tensors_in(file: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file, or in the shards of its index."""
    index = (read_object(Path(f"{file}.index.json")) or {}).get("weight_map")
    if isinstance(index, dict):
        names = set(index)
    else:
        names = set(read_object(file, is_header=True) or {})
    return names - {"__metadata__"}


def _find(described: Mapping[str, Any], key: str, absent: Any) -> Any:
    """Return the value at the first of these dotted paths (``a.b|c``) that is set, or `absent`."""
    for path in key.split("|"):
        value: Any = described
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return absent
