"""Models of Hugging Face's transformers that compute what ours do: their config.json and the names of their weights,
read by `checkpoint.init_weights` and written by `export --hf`. Both follow one table, `published.json`:

needs: fields that our model must have; values: our field -> theirs (``a|b``: wherever it stands); absent: what a
missing one of theirs means, or [factor, another key]; written: fields that weights do not depend on, for exports alone;
theirs: key -> values with which both compute the same, the first one where it is missing; rows: weights with a row for
each token or position, whose number may differ; heads: weights that a folder may lack; ties: further names of a weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.errors import Problem, show_value

CONFIG: Final = "config.json"
_KEY: Final = "checkpoint.init_weights"
_WEIGHTS: Final = "model.safetensors"
_TABLE: Final[Mapping[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Of BERT as it was published first.
_FORMER: Final = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_LONGEST_HEADER: Final = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Joined:
    """One weight of theirs, and those of ours that it is made of, one below the other along the first dimension.

    Attributes:
        transposed: theirs has (inputs, outputs), where ours have (outputs, inputs).
        rows: field of our model that says how many rows it has, where the number may differ.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    rows: str = ""


@dataclass(frozen=True)
class Form:
    """Architecture of transformers, by its ``model_type``, as which a model section of ours, or its shape, is seen."""

    name: str
    model: Any

    @cached_property
    def table(self) -> Mapping[str, Any]:
        """Its part of the table."""
        found: Mapping[str, Any] = _TABLE[self.name]
        return found

    @cached_property
    def weights(self) -> Mapping[str, Joined]:
        """All weights of the model, by their name there."""
        table, model, together = self.table, self.model, dict(self.table["modules"])
        for number in range(model.num_layers):
            for ours, theirs in table["block"].items():
                names = " ".join(f"blocks.{number}.{name}" for name in ours.split())
                together[names] = f"{table['blocks']}.{number}.{theirs}"
        found = [
            Joined(theirs, (ours,), rows=table["rows"].get(ours, ""))
            for ours, theirs in table["weights"].items()
            if ours != "head.weight" or not model.tie_embeddings
        ]
        for ours, theirs in together.items():
            is_turned = any(theirs.endswith(f".{name}") for name in table["transposed"])
            for part in ("weight", "bias"):
                if part == "weight" or self._has_bias(ours):
                    all_of_it = tuple(f"{name}.{part}" for name in ours.split())
                    found.append(Joined(f"{theirs}.{part}", all_of_it, is_turned and part == "weight"))
        return {one.theirs: one for one in found}

    def _has_bias(self, module: str) -> bool:
        is_rms = getattr(self.model, "norm", "") == "rmsnorm" and module.endswith("norm")
        return getattr(self.model, "bias", True) and not is_rms

    @property
    def names(self) -> dict[str, str]:
        """Our names -> theirs, where a weight is one there as well; of tied ones all names."""
        single = {one.ours[0]: theirs for theirs, one in self.weights.items() if not one.ours[1:]}
        return {**self.table["weights"], **single}

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        """Names as `weights` has them -> names in a file, which may lack the prefix of the whole model."""
        found, prefix = {}, self.table["prefix"]
        for name in names:
            plain = re.sub("|".join(map(re.escape, _FORMER)), lambda match: _FORMER[match[0]], name)
            if plain not in self.weights and (prefix + plain in self.weights or self.is_ignored(prefix + plain)):
                plain = prefix + plain
            found[plain] = name
        return found

    def is_ignored(self, name: str) -> bool:
        """Check whether a tensor of theirs is no weight."""
        return re.fullmatch(self.table["ignored"], name) is not None

    def is_head(self, one: Joined) -> bool:
        """Check whether a folder may lack it, which then is drawn."""
        return one.ours[0].startswith(tuple(self.table["heads"]))

    def described(self) -> dict[str, Any]:
        """The content of config.json."""
        found: dict[str, Any] = {"architectures": [self.table["architecture"]], "model_type": self.name}
        named = [
            (theirs, getattr(self.model, ours)) for ours, each in self._fields("values", "written") for theirs in each
        ]
        for key, value in (*named, *((key, values[0]) for key, values in self.table["theirs"].items())):
            *path, last = key.partition("|")[0].split(".")
            section = found
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
        return found

    def _fields(self, *names: str) -> Iterator[tuple[str, list[str]]]:
        for name in names:
            yield from self.table[name].items()

    def misfits(self, described: Mapping[str, Any], file: Path) -> Iterator[Problem]:
        """What of a config.json keeps our model from computing the same, each with the key to set; and notes."""
        for key, allowed in self.table["theirs"].items():
            if (value := _find(described, key, allowed[0])) not in allowed:
                reason = (
                    f"{file} has {key.partition('|')[0]}: {show_value(value)}, and model.kind {self.table['kind']} "
                )
                yield Problem("weights-differ", f"{reason}computes with {show_value(allowed[0])}", _AS_IT_IS, _KEY)
        for ours, value in self.table["needs"].items():
            if (own := getattr(self.model, ours)) != value:
                fix = f"set model.{ours}: {show_value(value)}" if value is not None else f"remove model.{ours}"
                reason = f"{file} is of a {self.name}, which has {show_value(value)} there"
                yield Problem("weights-differ", reason, fix, f"model.{ours}", own)
        for ours, keys in self._fields("values"):
            for key in keys:
                yield from self._compared(ours, key, self._theirs(described, key), file)

    def _theirs(self, described: Mapping[str, Any], key: str) -> Any:
        absent = self.table["absent"].get(key)
        if isinstance(absent, list):
            factor, other = absent
            absent = factor * self._theirs(described, other)
        return _find(described, key, absent)

    def _compared(self, ours: str, key: str, theirs: Any, file: Path) -> Iterator[Problem]:
        own, place = getattr(self.model, ours), f"{file} has {key.partition('|')[0]}: {show_value(theirs)}"
        if own == theirs or theirs is None:
            return
        if ours in self.table["rows"].values() and isinstance(theirs, int):
            if own < theirs and ours == "max_positions":
                return  # the first ones are taken
            if own > theirs and ours == "vocab_size":
                reason = f"{place}; the other {own - theirs} tokens begin as the mean of those"
                yield Problem("weights-padded", reason, "", f"model.{ours}", own, severity="note")
                return
        yield Problem("weights-differ", place, f"set model.{ours}: {show_value(theirs)}", f"model.{ours}", own)

    def missing_and_extra(self, names: Collection[str]) -> tuple[list[Joined], list[str]]:
        """Weights of the model that a file with these names has not, and names in it that are not the model's."""
        held = self.plain_names(names)
        extra = [name for plain, name in held.items() if not (plain in self.weights or self.is_ignored(plain))]
        return [one for one in self.weights.values() if one.theirs not in held], extra


_AS_IT_IS: Final = "train it as it is: model.target: transformers:AutoModel....from_pretrained"


def form_of(model: Any) -> Form | None:
    """The architecture that a model section of ours has in transformers; None where there is none."""
    kind = getattr(model, "kind", None)
    for name, table in _TABLE.items():
        if table["kind"] == kind and all(getattr(model, ours) == value for ours, value in table["needs"].items()):
            return Form(name, model)
    return None


def published_problems(config: RunConfig) -> list[Problem]:
    """What is wrong with the Hugging Face folder that `checkpoint.init_weights` names for one of our models, as far as
    its config.json and the headers of its safetensors show it. Empty where it is something else, or not here.
    """
    path, model = config.checkpoint.init_weights, config.model
    kind = getattr(model, "kind", None)
    if path is None or kind not in {table["kind"] for table in _TABLE.values()}:
        return []
    place = Path(path)
    file = (place if place.is_dir() else place.parent) / CONFIG
    described = _read_json(file)
    if "model_type" not in described:
        return []
    type_ = described["model_type"]
    if type_ not in _TABLE or _TABLE[type_]["kind"] != kind:
        fix = f"set model.kind: {_TABLE[type_]['kind']}" if type_ in _TABLE else _AS_IT_IS
        reason = f"{file} is of a {show_value(type_)}, which no model.kind {kind} is"
        return [Problem("weights-differ", reason, fix, _KEY, path)]
    form = Form(type_, model)
    found = list(form.misfits(described, file))
    names = _names_in(place)
    if names and "embed.weight" not in names and all(problem.severity != "error" for problem in found):
        found += _of_names(form, names, path)
    return found


def _of_names(form: Form, names: Collection[str], path: str) -> Iterator[Problem]:
    missing, extra = form.missing_and_extra(names)
    lost = [one.theirs for one in missing if not form.is_head(one)]
    extra = [name for name in extra if name not in form.table["ties"]]
    for found, reason in ((lost, "it lacks {}"), (extra, "it has {}, which the model has not")):
        if found:
            more = f" and {len(found) - 1} more" if found[1:] else ""
            yield Problem("weights-differ", reason.format(found[0] + more), "name weights of this model", _KEY, path)
    if drawn := [name for one in missing if form.is_head(one) for name in one.ours]:
        reason = f"it lacks {', '.join(drawn)}, which are drawn from run.seed"
        yield Problem("weights-partial", reason, "", _KEY, path, severity="warning")


def _names_in(place: Path) -> set[str]:
    """Names of tensors, without reading one; empty where there is no safetensors file or it is damaged."""
    index = _read_json(place / f"{_WEIGHTS}.index.json").get("weight_map")
    if isinstance(index, dict):
        return set(index)
    try:
        with (place / _WEIGHTS if place.is_dir() else place).open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size < _LONGEST_HEADER else {}
    except (OSError, ValueError):
        return set()
    return set(header) - {"__metadata__"} if isinstance(header, dict) else set()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _find(described: Mapping[str, Any], key: str, absent: Any) -> Any:
    """The value at the first of these dotted paths that there is."""
    for path in key.split("|"):
        found: Any = described
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            return found
    return absent
