"""`check --resolve`: what Hugging Face's Trainer and Accelerate write where a DeepSpeed JSON says
"auto".

The formulas are those of transformers (`HfTrainerDeepSpeedConfig`: `trainer_config_process`,
`trainer_config_finalize`) and accelerate (`Accelerator._prepare_deepspeed`, `DeepSpeedPlugin`).
Where the two differ this follows the Trainer, with one exception: the prefetch bucket is a whole
number, as Accelerate writes it, because DeepSpeed refuses a fraction.

The Trainer refuses a file that says another number than its argument, so a number in the file tells
the argument too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from framework.dslint.facts import dotted, leaves, read_by_model, value_at
from framework.dslint.key_files import variant_of
from framework.dslint.keys import Key, KeyTable, load_table
from framework.dslint.lint import placed
from framework.dslint.readers import ARGUMENTS
from framework.dslint.values import TYPE_WORDS, mismatch
from framework.errors import MISSING, Problem, UsageError, show_value
from framework.text.document import Document, KeyPath
from framework.text.edits import Edit, RemoveMember, ReplaceValue, apply_edits
from framework.text.typos import nearest

_OTHER_NAMES: Final[Mapping[str, str]] = {
    other: name for name, argument in ARGUMENTS.items() for other in argument.get("other_names", ())
}
# Keys that take the value of one argument -> the argument. A value that stands in the file tells
# the argument.
_ARGUMENT_OF: Final[Mapping[str, str]] = {
    key: name for name, argument in ARGUMENTS.items() for key in argument.get("keys", ())
}
_PRECISIONS: Final = ("no", "fp16", "bf16")
_BY_HIDDEN_SIZE: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


class _UnknownArgumentError(Exception):
    """An argument that is needed, was not given, and has no default: why it is not known, and how
    to say it.
    """


@dataclass(frozen=True)
class Resolution:
    """A DeepSpeed JSON without "auto".

    Attributes:
        text: the file with the values filled in; everything else stands as it stood.
        notes: values that came from a default, and keys that were left out.
        problems: what nobody can know from the file and the arguments given; the text then still
            holds "auto".
    """

    text: str
    notes: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()


def resolve(
    document: Document,
    settings: Mapping[str, Any],
    *,
    world_size: int | None = None,
    release: str | None = None,
) -> Resolution:
    """Fill in every "auto" of a file.

    Args:
        document: what was read.
        settings: arguments by the Trainer's or Accelerate's names, ``hidden_size``, or DeepSpeed's
            own dotted keys.
        world_size: ranks.
        release: DeepSpeed's version; left out: the newest known.

    Raises:
        UsageError: a setting that means nothing here.
    """
    table = load_table(release)
    values = document.value if isinstance(document.value, Mapping) else {}
    autos = [path for path, value in leaves(values) if value == "auto"]
    keys = {
        name: value
        for name, value in settings.items()
        if not _is_argument(name) and ("." in name or name in values)
    }
    for name, value in keys.items():
        if tuple(name.split(".")) not in autos:
            raise UsageError(f'{name}: --resolve fills in "auto" only, and the file has none there')
        if not _is_json(value):
            raise UsageError(f"{name}={show_value(value)}: JSON has no such number")
    given = _given({name: settings[name] for name in settings if name not in keys}, world_size)
    filler = _Filler(given, table, keys, values)
    edits = [edit for path in autos for edit in filler.edits(path)]
    if filler.problems:
        return Resolution(document.text, problems=tuple(_placed(document, filler.problems)))
    return Resolution(
        apply_edits(document, edits) if edits else document.text,
        tuple(_placed(document, filler.notes)),
    )


def _given(settings: Mapping[str, Any], world_size: int | None) -> dict[str, Any]:
    """Check the arguments of a command line; by the Trainer's names.

    Raises:
        UsageError: a name that nobody knows, or a value that cannot be.
    """
    given: dict[str, Any] = {} if world_size is None else {"world_size": world_size}
    for name, value in settings.items():
        if name == "mixed_precision":
            if value not in _PRECISIONS:
                raise UsageError(
                    f"mixed_precision={show_value(value)}: known are {', '.join(_PRECISIONS)}"
                )
            given |= {"fp16": value == "fp16", "bf16": value == "bf16"}
            continue
        argument = _OTHER_NAMES.get(name, name)
        if argument not in ARGUMENTS:
            raise UsageError(_unknown_name(name))
        if mismatch(value, ARGUMENTS[argument]) is not None:
            raise UsageError(f"{name}={show_value(value)}: not {_in_words(ARGUMENTS[argument])}")
        if given.get(argument, value) != value:
            raise UsageError(
                f"{name}={show_value(value)}: {argument} is {show_value(given[argument])} already"
            )
        given[argument] = value
    return given


def _is_argument(name: str) -> bool:
    return name in ARGUMENTS or name in _OTHER_NAMES or name == "mixed_precision"


def _unknown_name(name: str) -> str:
    known = [*ARGUMENTS, "mixed_precision"]
    guess = nearest(name, known)
    return f"{name}: not an argument of the Trainer; " + (
        f"did you mean {guess}?"
        if guess
        else f'known are {", ".join(known)}, and the DeepSpeed keys that are "auto"'
    )


def _in_words(argument: Mapping[str, Any]) -> str:
    words = TYPE_WORDS[argument["type"]]
    if "minimum" in argument:
        return f"{words} of {argument['minimum']} or more"
    return words


class _Filler:
    """Finds the edit for each "auto", and says what was assumed."""

    def __init__(
        self,
        given: Mapping[str, Any],
        table: KeyTable,
        keys: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        self.given = given
        self.table = table
        self.keys = keys
        self.values = values
        self.notes: list[Problem] = []
        self.reported: set[str] = set()
        self.assumed: dict[str, Any] = {}  # defaults that the value in hand needed
        self.problems = list(self._mismatches())

    def _mismatches(self) -> Iterator[Problem]:
        """Keys whose value is another than the argument that was given."""
        for name, stated in self.given.items():
            # the Trainer refuses file and argument to differ, but for some
            for path in (
                ARGUMENTS[name].get("keys", ()) if "may_differ" not in ARGUMENTS[name] else ()
            ):
                value = value_at(self.values, path.split("."), None)
                if value not in (None, "auto") and value != stated:
                    reason = (
                        f"{name}={show_value(stated)} was given, and the Trainer refuses two values"
                    )
                    fix = 'write "auto", or the same value in both places'
                    yield Problem("auto-mismatch", reason, fix, path, value)
        name = "gradient_accumulation_steps"
        if self.given.get(name, 1) != 1 and name not in self.values:
            reason = f"left out Accelerate makes it 1, and the Trainer was given {self.given[name]}"
            yield Problem("auto-mismatch", reason, f'add "{name}": "auto"', name)

    def _get(self, name: str) -> Any:
        """The value of an argument: as given, as the file tells, or the default, which is then
        remembered as assumed.

        Raises:
            _UnknownArgumentError: there is none.
        """
        if name in self.given:
            return self.given[name]
        argument = ARGUMENTS[name]
        for path in argument.get("keys", ()):
            value = value_at(self.values, path.split("."), None)
            # another type is for the lint to name
            if value != "auto" and mismatch(value, argument) is None:
                return value
        if "default" not in argument:
            raise _UnknownArgumentError(argument["unknown"], argument["fix"])
        self.assumed[name] = argument["default"]
        return argument["default"]

    def edits(self, path: KeyPath) -> Iterator[Edit]:
        name = dotted(path)
        key = self.table.get(list(map(str, path)), variant_of(self.values, path))
        if key is not None and key.knows_auto:
            return
        if name in self.keys:
            yield ReplaceValue(path, self.keys[name])
            return
        self.assumed = {}
        try:
            value = self._value(name)
        except _UnknownArgumentError as missing:
            self._unknown(name, *missing.args)
            return
        if value is not MISSING:
            self._note_assumed(name, value)
            yield ReplaceValue(path, value)
        elif read_by_model(name, self.table.release) and key is not None and "." in name:
            self._note(
                name,
                "removed: Hugging Face does not fill it in, and DeepSpeed's "
                f"default{_default(key)} holds",
                f"give {name}=VALUE for another one",
            )
            yield RemoveMember(path)
        elif key is not None:
            self._unknown(
                name, "Hugging Face does not fill it in", f"give {name}=VALUE, or remove it"
            )
        # An unknown key is for the lint to name.

    def _value(self, path: str) -> Any:
        """Return the value after Hugging Face has filled it in; MISSING where it leaves "auto"."""
        get = self._get
        if path == "train_batch_size":
            return (
                get("world_size")
                * get("per_device_train_batch_size")
                * get("gradient_accumulation_steps")
            )
        if path == "optimizer.params.betas":
            return [get("adam_beta1"), get("adam_beta2")]
        if path == "scheduler.params.warmup_min_lr":
            return 0
        if path == "scheduler.params.warmup_num_steps":
            ratio = self.given.get("warmup_ratio", 0)
            if ratio and not self.given.get("warmup_steps", 0):
                steps = ratio
            else:
                steps = get("warmup_steps")
            # below 1 it is a share of the run; DeepSpeed refuses 0, so the Trainer writes 1 at
            # least
            return max(1, math.ceil(get("max_steps") * steps) if 0 < steps < 1 else int(steps))
        if path in _ARGUMENT_OF:
            return get(_ARGUMENT_OF[path])
        if path in _BY_HIDDEN_SIZE:
            return self._by_hidden_size(path)
        if path.startswith("zero_optimization.offload_") and path.endswith(".nvme_path"):
            section = path.split(".")[1]
            if get(f"{section}_device") == "nvme":
                return get(f"{section}_nvme_path")
            return MISSING
        return MISSING

    def _by_hidden_size(self, path: str) -> Any:
        has_stage = value_at(self.values, ("zero_optimization", "stage")) is not MISSING
        if "stage3_" in path and not (has_stage and self._get("zero_stage") == 3):
            return MISSING  # the Trainer leaves it, and DeepSpeed does not look
        size = self._get("hidden_size")
        if path.endswith("reduce_bucket_size"):
            return size * size
        if "prefetch" in path:
            return int(0.9 * size * size)
        return 10 * size

    def _note(self, path: str, reason: str, fix: str) -> None:
        self.notes.append(Problem("auto-resolved", reason, fix, path, "auto", severity="note"))

    def _note_assumed(self, path: str, value: Any) -> None:
        """Say each default once, at the first key that it decides."""
        new = {name: default for name, default in self.assumed.items() if name not in self.reported}
        self.reported.update(new)
        if new:
            listed = " and ".join(f"{name}={show_value(default)}" for name, default in new.items())
            if len(new) > 1:
                many = "s"
            else:
                many = ""
            self._note(
                path,
                f"filled in with {show_value(value)}, from Hugging Face's default{many} {listed}",
                f"give {' and '.join(f'{name}=VALUE' for name in new)} if yours "
                f"differ{'' if many else 's'}",
            )

    def _unknown(self, path: str, reason: str, fix: str) -> None:
        self.problems.append(Problem("auto-unknown", reason, fix, path, "auto"))


def _placed(document: Document, problems: Sequence[Problem]) -> Iterator[Problem]:
    return (placed(document, problem, at_top=False) for problem in problems)


def _default(key: Key) -> str:
    if key.default is MISSING:
        return ""
    return f" {show_value(key.default)}"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
