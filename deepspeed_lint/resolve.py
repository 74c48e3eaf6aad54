"""What Hugging Face's Trainer and Accelerate write where a DeepSpeed JSON has
"auto".

The formulas come from transformers (`HfTrainerDeepSpeedConfig`: `trainer_config_process`,
`trainer_config_finalize`) and accelerate (`Accelerator._prepare_deepspeed`, `DeepSpeedPlugin`).
Where the two differ this follows the Trainer, with one exception: the prefetch bucket is a whole
number, as Accelerate writes it, because DeepSpeed refuses a fraction.

The Trainer refuses a file with another number than its argument, so a number in the file gives the
argument too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.check import check_document
from deepspeed_lint.errors import MISSING, ConfigError, Problem, UsageError, show_value
from deepspeed_lint.facts import dotted, leaves, read_by_model, value_at
from deepspeed_lint.key_files import variant_of
from deepspeed_lint.keys import Key, KeyTable, load_table
from deepspeed_lint.lint import placed
from deepspeed_lint.readers import ARGUMENTS
from deepspeed_lint.report import CheckResult
from deepspeed_lint.text.document import COMMAND_LINE, Document, KeyPath, parse_scalar
from deepspeed_lint.text.edits import (
    Edit,
    RemoveMember,
    ReplaceValue,
    apply_edits,
    edited_value,
    is_json,
)
from deepspeed_lint.text.hjson import parse_hjson
from deepspeed_lint.text.typos import nearest
from deepspeed_lint.topology import Target
from deepspeed_lint.values import TYPE_WORDS, mismatch


def _other_names() -> Iterator[tuple[str, str]]:
    for name, argument in ARGUMENTS.items():
        for other in argument.get("other_names", ()):
            yield other, name


def _arguments_of_keys() -> Iterator[tuple[str, str]]:
    for name, argument in ARGUMENTS.items():
        for key in argument.get("keys", ()):
            yield key, name


_OTHER_NAMES: Final[Mapping[str, str]] = dict(_other_names())
# Keys that take the value of one argument -> the argument. A value in the file gives the argument.
_ARGUMENT_OF: Final[Mapping[str, str]] = dict(_arguments_of_keys())
_PRECISIONS: Final = ("no", "fp16", "bf16")
_BY_HIDDEN_SIZE: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


class _UnknownArgumentError(Exception):
    """An argument that is needed, was not given, and has no default.

    Attributes:
        reason: why it is not known.
        fix: how to give it.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True)
class Resolution:
    """A DeepSpeed JSON without "auto".

    Attributes:
        text: the file with the values filled in; everything else stands as it stood.
        notes: values that came from a default, and keys that were left out.
        problems: what cannot be known from the file and the arguments given; the text then still
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
    key_settings, argument_settings = _split_settings(settings, values)
    _check_key_settings(key_settings, autos)
    filler = _Filler(_checked(argument_settings, world_size), table, key_settings, values)
    edits: list[Edit] = []
    for path in autos:
        edits += filler.edits(path)
    if filler.problems:
        return Resolution(document.text, problems=_placed(document, filler.problems))
    text = document.text
    if edits:
        text = _filled(document, edits)
    return Resolution(text, _placed(document, filler.notes))


def _filled(document: Document, edits: Sequence[Edit]) -> str:
    """Return the text with the values; Hjson becomes JSON, the only one that the Trainer reads."""
    if is_json(document.text):
        return apply_edits(document, edits)
    return json.dumps(edited_value(document.value, edits), indent=4, ensure_ascii=False) + "\n"


def check_resolved(
    document: Document,
    arguments: Mapping[str, Any],
    target: Target,
    *,
    name: str,
    check: Callable[[Document, Target], CheckResult] = check_document,
) -> tuple[str, CheckResult]:
    """Fill in every "auto" as Hugging Face's Trainer does, and check the text that results.

    Args:
        document: the file with "auto".
        arguments: of the Trainer or Accelerate, see `resolve`.
        target: what the text is judged against.
        name: of the text in messages.
        check: checks the text.

    Returns:
        The text, and what is wrong with it; an empty text where an argument is not known.
    """
    topology = target.topology
    resolved = resolve(document, arguments, world_size=topology.world_size, release=target.release)
    if resolved.problems:
        return "", CheckResult(document.name, resolved.problems)
    # The number of devices may be given as an argument of the Trainer too.
    world_size = arguments.get("world_size", arguments.get("num_processes"))
    if topology.world_size is None and isinstance(world_size, int):
        topology = replace(topology, world_size=world_size)
    result = check(
        parse_hjson(resolved.text, name=name),
        replace(target, topology=topology, reader="deepspeed"),
    )
    return resolved.text, replace(result, problems=resolved.notes + result.problems)


def is_of_another_origin(path: Path, document: Document) -> bool:
    """Check whether a path holds a file that has no key in common with a document: writing the
    document there would destroy something else.
    """
    try:
        if not path.is_file():
            return False
        text = path.read_text(encoding="utf-8")
    except OSError:  # its writer meets it again
        return False
    except ValueError:
        return True
    if not text.strip():
        return False
    return _top_level_keys(_value_of(text)).isdisjoint(_top_level_keys(document.value))


def _value_of(text: str) -> Any:
    """Return the value of a text; None if it is not Hjson."""
    try:
        return parse_hjson(text, name="").value
    except ConfigError:
        return None


def _top_level_keys(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set(value)
    return set()


def _check_key_settings(settings: Mapping[str, Any], autos: Sequence[KeyPath]) -> None:
    """Raise UsageError for a key that is not "auto" in the file, or a value that is not JSON's."""
    for name, value in settings.items():
        if tuple(name.split(".")) not in autos:
            raise UsageError(f'{name}: only "auto" is filled in, and the file has none there')
        if not _is_json(value):
            raise UsageError(f"{name}={show_value(value)}: JSON has no such number")


def _split_settings(
    settings: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into values for DeepSpeed's keys and values for arguments."""
    keys = {}
    arguments = {}
    for name, value in settings.items():
        if not _is_argument(name) and ("." in name or name in values):
            keys[name] = value
        else:
            arguments[name] = value
    return keys, arguments


def _checked(settings: Mapping[str, Any], world_size: int | None) -> dict[str, Any]:
    """Check the arguments of a command line and return them by the Trainer's names.

    Raises:
        UsageError: an unknown name, or a value that its argument does not take.
    """
    arguments: dict[str, Any] = {}
    if world_size is not None:
        arguments["world_size"] = world_size
    for name, value in settings.items():
        if name == "mixed_precision":
            arguments |= _precisions(value)
            continue
        argument = _argument_of(name, value)
        if arguments.get(argument, value) != value:
            other_value = show_value(arguments[argument])
            raise UsageError(f"{name}={show_value(value)}: {argument} is {other_value} already")
        arguments[argument] = value
    return arguments


def _precisions(value: Any) -> dict[str, bool]:
    """Return the Trainer's arguments for Accelerate's mixed_precision."""
    if value not in _PRECISIONS:
        raise UsageError(f"mixed_precision={show_value(value)}: known are {', '.join(_PRECISIONS)}")
    return {"fp16": value == "fp16", "bf16": value == "bf16"}


def _argument_of(name: str, value: Any) -> str:
    """Return the Trainer's name of a setting, if the value is one that it takes."""
    argument = _OTHER_NAMES.get(name, name)
    if argument not in ARGUMENTS:
        raise UsageError(_unknown_name(name))
    if mismatch(value, ARGUMENTS[argument]) is not None:
        raise UsageError(f"{name}={show_value(value)}: not {_type_words(ARGUMENTS[argument])}")
    return argument


def _is_argument(name: str) -> bool:
    return name in ARGUMENTS or name in _OTHER_NAMES or name == "mixed_precision"


def _unknown_name(name: str) -> str:
    known = [*ARGUMENTS, "mixed_precision"]
    guess = nearest(name, known)
    if guess:
        fix = f"did you mean {guess}?"
    else:
        fix = f'known are {", ".join(known)}, and the DeepSpeed keys that are "auto"'
    return f"{name}: not an argument of the Trainer; {fix}"


def _type_words(argument: Mapping[str, Any]) -> str:
    words = TYPE_WORDS[argument["type"]]
    if "minimum" in argument:
        return f"{words} of {argument['minimum']} or more"
    return words


class _Filler:
    """Finds the edit for each "auto", and notes what was assumed.

    Attributes:
        arguments: as given, by the Trainer's names.
        table: the keys of the release.
        key_settings: DeepSpeed's keys with values given for them.
        values: the file.
        notes: defaults that values came from, and keys that were left out.
        problems: what cannot be known.
        reported: arguments with a default that is noted.
        assumed: defaults that the value in hand needed.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        table: KeyTable,
        key_settings: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        self.arguments = arguments
        self.table = table
        self.key_settings = key_settings
        self.values = values
        self.notes: list[Problem] = []
        self.reported: set[str] = set()
        self.assumed: dict[str, Any] = {}
        self.problems = list(self._mismatches())

    def _mismatches(self) -> Iterator[Problem]:
        """Yield a problem for each key with another value than the argument that was given."""
        for name in self.arguments:
            if "may_differ" not in ARGUMENTS[name]:
                yield from self._mismatches_of(name)
        name = "gradient_accumulation_steps"
        if self.arguments.get(name, 1) != 1 and name not in self.values:
            reason = (
                f"left out Accelerate makes it 1, and the Trainer was given {self.arguments[name]}"
            )
            yield Problem("auto-mismatch", reason, f'add "{name}": "auto"', name)

    def _mismatches_of(self, name: str) -> Iterator[Problem]:
        argument = self.arguments[name]
        for path in ARGUMENTS[name].get("keys", ()):
            value = value_at(self.values, path.split("."), None)
            if value not in (None, "auto", argument):
                reason = (
                    f"{name}={show_value(argument)} was given, and the Trainer refuses two values"
                )
                fix = 'write "auto", or the same value in both places'
                yield Problem("auto-mismatch", reason, fix, path, value)

    def _get(self, name: str) -> Any:
        """Return the value of an argument: as given, from the file, or the default.

        A default is remembered as assumed.

        Raises:
            _UnknownArgumentError: there is none.
        """
        if name in self.arguments:
            return self.arguments[name]
        argument = ARGUMENTS[name]
        for path in argument.get("keys", ()):
            value = value_at(self.values, path.split("."), None)
            # A value of another type is the lint's to report.
            if value != "auto" and mismatch(value, argument) is None:
                return value
        if "default" not in argument:
            raise _UnknownArgumentError(argument["unknown"], argument["fix"])
        self.assumed[name] = argument["default"]
        return argument["default"]

    def edits(self, path: KeyPath) -> Iterator[Edit]:
        """Yield the edit of one "auto", or note why there is none."""
        name = dotted(path)
        key = self.table.get(list(map(str, path)), variant_of(self.values, path))
        if key is not None and key.knows_auto:
            return
        if name in self.key_settings:
            yield ReplaceValue(path, self.key_settings[name])
            return
        self.assumed = {}
        try:
            value = self._value(name)
        except _UnknownArgumentError as missing:
            self._add_unknown(name, missing.reason, missing.fix)
            return
        if value is not MISSING:
            self._note_assumed(name, value)
            yield ReplaceValue(path, value)
        elif key is not None:  # an unknown key is the lint's to report
            yield from self._without_value(path, key)

    def _without_value(self, path: KeyPath, key: Key) -> Iterator[Edit]:
        """Remove an "auto" that DeepSpeed drops, and note any other."""
        name = dotted(path)
        if read_by_model(name, self.table.release) and "." in name:
            self._note(
                name,
                "removed: Hugging Face does not fill it in, and DeepSpeed's "
                f"default{_default(key)} holds",
                f"give {name}=VALUE for another one",
            )
            yield RemoveMember(path)
        else:
            self._add_unknown(
                name, "Hugging Face does not fill it in", f"give {name}=VALUE, or remove it"
            )

    def _value(self, path: str) -> Any:
        """Return the value after Hugging Face has filled it in; MISSING where it leaves "auto"."""
        if path in _COMPUTED:
            return _COMPUTED[path](self)
        if path in _ARGUMENT_OF:
            return self._get(_ARGUMENT_OF[path])
        if path in _BY_HIDDEN_SIZE:
            return self._by_hidden_size(path)
        if path.startswith("zero_optimization.offload_") and path.endswith(".nvme_path"):
            return self._nvme_path(path.split(".")[1])
        return MISSING

    def batch_size(self) -> Any:
        """Return the samples of a step."""
        return (
            self._get("world_size")
            * self._get("per_device_train_batch_size")
            * self._get("gradient_accumulation_steps")
        )

    def betas(self) -> list[Any]:
        """Return the betas of Adam."""
        return [self._get("adam_beta1"), self._get("adam_beta2")]

    def _nvme_path(self, section: str) -> Any:
        if self._get(f"{section}_device") == "nvme":
            return self._get(f"{section}_nvme_path")
        return MISSING

    def warmup_steps(self) -> int:
        """Return the steps of the warm-up; below 1 the argument is a share of the run.

        DeepSpeed refuses 0, so the Trainer writes 1 at least.
        """
        ratio = self.arguments.get("warmup_ratio", 0)
        if ratio and not self.arguments.get("warmup_steps", 0):
            steps = ratio
        else:
            steps = self._get("warmup_steps")
        if 0 < steps < 1:
            share: float = self._get("max_steps") * steps
            return max(1, math.ceil(share))
        return max(1, int(steps))

    def _by_hidden_size(self, path: str) -> Any:
        """Return the value of a key of `_BY_HIDDEN_SIZE`; MISSING if the Trainer leaves "auto"."""
        if "stage3_" in path and not self._is_stage_3():
            return MISSING  # the Trainer leaves it, and DeepSpeed does not look
        size = self._get("hidden_size")
        if path.endswith("reduce_bucket_size"):
            return size * size
        if "prefetch" in path:
            return int(0.9 * size * size)
        return 10 * size

    def _is_stage_3(self) -> bool:
        stage = value_at(self.values, ("zero_optimization", "stage"))
        return stage is not MISSING and bool(self._get("zero_stage") == 3)

    def _note(self, path: str, reason: str, fix: str) -> None:
        self.notes.append(Problem("auto-resolved", reason, fix, path, "auto", severity="note"))

    def _note_assumed(self, path: str, value: Any) -> None:
        """Note each default once, at the first key that it decides."""
        new = {name: default for name, default in self.assumed.items() if name not in self.reported}
        self.reported.update(new)
        if not new:
            return
        defaults = " and ".join(f"{name}={show_value(default)}" for name, default in new.items())
        settings = " and ".join(f"{name}=VALUE" for name in new)
        noun, verb = ("defaults", "differ") if len(new) > 1 else ("default", "differs")
        self._note(
            path,
            f"filled in with {show_value(value)}, from Hugging Face's {noun} {defaults}",
            f"give {settings} if yours {verb}",
        )

    def _add_unknown(self, path: str, reason: str, fix: str) -> None:
        self.problems.append(Problem("auto-unknown", reason, fix, path, "auto"))


# Keys that no argument alone gives -> how Hugging Face computes them.
_COMPUTED: Final[Mapping[str, Callable[[_Filler], Any]]] = {
    "train_batch_size": _Filler.batch_size,
    "optimizer.params.betas": _Filler.betas,
    "scheduler.params.warmup_min_lr": lambda _: 0,
    "scheduler.params.warmup_num_steps": _Filler.warmup_steps,
}


def _placed(document: Document, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(placed(document, problem, at_top=False) for problem in problems)


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


def parsed_setting(word: str) -> tuple[str, Any]:
    """Split ``key=value``; a value that is no YAML stays text."""
    name, _, text = word.partition("=")
    try:
        return name, parse_scalar(text, name=COMMAND_LINE)
    except ConfigError:
        return name, text
