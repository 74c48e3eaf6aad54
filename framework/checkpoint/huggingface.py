"""Models of Hugging Face's transformers that compute what ours do: their config.json and the names
of their weights, read by `checkpoint.init_weights` and written by `export --hf`. Both follow one
table, `huggingface.json`:

needs: fields that our model must have; values: our field -> theirs (``a|b``: wherever it stands);
absent: what a missing one of theirs means, or [factor, another key]; written: fields that weights
do not depend on, for exports alone; theirs: key -> values with which both compute the same, the
first one where it is missing; rows: weights with a row for each token or position, whose number may
differ; heads: weights that a folder may lack; ties: further names of a weight.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.errors import Problem, show_value

CONFIG: Final = "config.json"
_KEY: Final = "checkpoint.init_weights"
_WEIGHTS: Final = "model.safetensors"
_AS_IT_IS: Final = "train it as it is: model.target: transformers:AutoModel....from_pretrained"
_TABLE: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
_LONGEST_HEADER: Final = 100_000_000  # the format's


@dataclass(frozen=True)
class Joined:
    """Weights of ours that one of theirs is made of, one below the other along the first dimension.

    Attributes:
        transposed: theirs has (inputs, outputs), where ours have (outputs, inputs).
        rows: field of our model with the number of rows, where it may differ.
        may_lack: where a folder is without it, it is drawn.
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
        """All weights, by their name there."""
        table = self.table
        model = self.model
        found = dict(table["weights"])
        if getattr(model, "tie_embeddings", False):
            del found["head.weight"]
        modules = dict(table["modules"])
        for number in range(model.num_layers):
            for ours, theirs in table["block"].items():
                names = " ".join(f"blocks.{number}.{name}" for name in ours.split())
                modules[names] = f"{table['blocks']}.{number}.{theirs}"
        for ours, theirs in modules.items():
            is_rms = getattr(model, "norm", "") == "rmsnorm" and ours.endswith("norm")
            for part in (
                ("weight", "bias") if getattr(model, "bias", True) and not is_rms else ("weight",)
            ):
                found[" ".join(f"{name}.{part}" for name in ours.split())] = f"{theirs}.{part}"
        return {
            theirs: Joined(
                tuple(ours.split()),
                transposed=theirs.endswith(tuple(table["transposed"])),
                rows=table["rows"].get(ours, ""),
                may_lack=ours.startswith(tuple(table["heads"])),
            )
            for ours, theirs in found.items()
        }

    def names_in(self, names: Collection[str]) -> dict[str, str]:
        """Names as `weights` has them -> names in a file, which may lack a prefix or name norms as
        BERT once did.
        """
        found = {}
        prefix = self.table["prefix"]
        for name in names:
            plain = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            )
            if plain.startswith(prefix):
                whole = plain
            else:
                whole = prefix + plain
            if not re.fullmatch(self.table["ignored"], whole):
                found[whole if whole in self.weights else plain] = name
        return found

    def described(self) -> dict[str, Any]:
        """The content of config.json."""
        found: dict[str, Any] = {
            "architectures": [self.table["architecture"]],
            "model_type": self.name,
        }
        fields = {**self.table["values"], **self.table["written"]}
        values = {
            theirs: getattr(self.model, ours) for ours, each in fields.items() for theirs in each
        }
        for key, value in (
            values | {key: allowed[0] for key, allowed in self.table["theirs"].items()}
        ).items():
            *path, last = key.partition("|")[0].split(".")
            (found.setdefault(path[0], {}) if path else found)[last] = value
        return found

    def misfits(self, described: Mapping[str, Any], file: Path) -> Iterator[Problem]:
        """Find what of a config.json keeps our model from computing the same, with the key to
        set.
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
        stated = dict[str, Any]()
        for ours, key in (
            (ours, key) for ours, keys in self.table["values"].items() for key in keys
        ):
            own = getattr(self.model, ours)
            theirs = self._theirs(described, key)
            place = f"{file} has {key.partition('|')[0]}: {show_value(theirs)}"
            # Of positions the first are taken; key and value heads follow the others.
            if (
                own == theirs
                or (ours == "max_positions" and own < theirs)
                or (key in stated and own == stated[key])
            ):
                continue
            stated[key] = own
            if ours == "vocab_size" and own > theirs:
                reason = f"{place}; the other {own - theirs} tokens begin as the mean of those"
                yield Problem(
                    "weights-padded", reason, "", "model.vocab_size", own, severity="note"
                )
            else:
                yield Problem(
                    "weights-differ",
                    place,
                    f"set model.{ours}: {show_value(theirs)}",
                    f"model.{ours}",
                    own,
                )

    def _theirs(self, described: Mapping[str, Any], key: str) -> Any:
        absent = self.table["absent"][key]
        if isinstance(absent, list):
            absent = absent[0] * self._theirs(described, absent[1])
        else:
            absent = absent
        found = _find(described, key, absent)
        if isinstance(found, int | float):
            return found
        return absent

    def misnamed(self, names: Collection[str], path: str) -> Iterator[Problem]:
        """Find what is wrong with the names of the tensors there are."""
        held = self.names_in(names)
        missing = {theirs: one for theirs, one in self.weights.items() if theirs not in held}
        lost = [theirs for theirs, one in missing.items() if not one.may_lack]
        extra = [
            name
            for plain, name in held.items()
            if plain not in self.weights and name not in self.table["ties"]
        ]
        for found, reason in ((lost, "it lacks {}"), (extra, "it has {}, which the model has not")):
            if found:
                if found[1:]:
                    more = f" and {len(found) - 1} more"
                else:
                    more = ""
                yield Problem(
                    "weights-differ",
                    reason.format(found[0] + more),
                    "name weights of it",
                    _KEY,
                    path,
                )
        drawn = [name for one in missing.values() if one.may_lack for name in one.ours]
        if drawn:
            reason = f"it lacks {', '.join(drawn)}, which are drawn from run.seed"
            yield Problem("weights-partial", reason, "", _KEY, path, severity="warning")


def form_of(model: Any) -> Form | None:
    """The architecture that a model section of ours has in transformers; None where there is
    none.
    """
    for name, table in _TABLE.items():
        needs = table["needs"].items()
        if table["kind"] == getattr(model, "kind", None) and all(
            getattr(model, ours) == own for ours, own in needs
        ):
            return _form(name, table, model)
    return None


def _form(name: str, table: dict[str, Any], model: Any) -> Form:
    if getattr(model, "num_classes", None):
        further = table.get("with_classes", {})
    else:
        further = {}
    return Form(name, table | further, model)


def published_problems(config: RunConfig) -> list[Problem]:
    """What is wrong with a Hugging Face folder as `checkpoint.init_weights` of one of our models,
    as far as its config.json and the header of its safetensors show it.
    """
    path = config.checkpoint.init_weights
    kind = getattr(config.model, "kind", None)
    if path is None or kind not in ("gpt", "bert"):
        return []
    place, is_folder = Path(path), os.path.isdir(path)  # noqa: PTH112 - pathlib raises where the name is too long
    file = (place if is_folder else place.parent) / CONFIG
    described = _read_json(file)
    type_ = described.get("model_type")
    if not isinstance(type_, str):
        return []
    table = _TABLE.get(type_, {})
    if table.get("kind") != kind:
        if table:
            fix = f"set model.kind: {table['kind']}"
        else:
            fix = _AS_IT_IS
        reason = f"{file} is of a {show_value(type_)}, which no model.kind {kind} is"
        return [Problem("weights-differ", reason, fix, _KEY, path)]
    form = _form(type_, table, config.model)
    found = list(form.misfits(described, file))
    names = _tensors_in(place / _WEIGHTS if is_folder else place)
    if (
        names
        and "embed.weight" not in names
        and all(problem.severity != "error" for problem in found)
    ):
        found += form.misnamed(names, path)
    return found


def _tensors_in(file: Path) -> set[str]:
    """Names of the tensors in safetensors."""
    index = _read_json(Path(f"{file}.index.json")).get("weight_map")
    return set(index if isinstance(index, dict) else _read_json(file, is_header=True)) - {
        "__metadata__"
    }


def _read_json(file: Path, *, is_header: bool = False) -> dict[str, Any]:
    """The object in a file, or behind the length at its begin."""
    try:
        with file.open("rb") as stream:
            if is_header:
                size = int.from_bytes(stream.read(8), "little")
            else:
                size = -1
            if size < _LONGEST_HEADER:
                found = json.loads(stream.read(size))
            else:
                found = None
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}


def _find(described: Mapping[str, Any], key: str, absent: Any) -> Any:
    """The value at the first of these dotted paths that there is."""
    for path in key.split("|"):
        found: Any = described
        for part in path.split("."):
            if isinstance(found, dict):
                found = found.get(part)
            else:
                found = None
        if found is not None:
            return found
    return absent
