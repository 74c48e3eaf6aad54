"""`check --resolve`: what Hugging Face's Trainer and Accelerate write where a DeepSpeed JSON says "auto".

The formulas are those of transformers (`HfTrainerDeepSpeedConfig`: `trainer_config_process`, `trainer_config_finalize`)
and accelerate (`Accelerator._prepare_deepspeed`, `DeepSpeedPlugin`). Where the two differ this follows the Trainer,
with one exception: the prefetch bucket is a whole number, as Accelerate writes it, because DeepSpeed refuses a
fraction.

The Trainer refuses a file that says another number than its argument, so a number in the file tells the argument too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from framework.dslint.facts import read_by_model
from framework.dslint.key_files import variant_of
from framework.dslint.keys import Key, KeyTable, load_table
from framework.errors import MISSING, Problem, UsageError, show_value
from framework.text.document import Document, KeyPath
from framework.text.edits import Edit, RemoveMember, ReplaceValue, apply_edits
from framework.text.typos import nearest

# The arguments of Hugging Face's Trainer and Accelerate that decide what "auto" becomes, and their defaults.


_COUNT, _NUMBER, _FLAG, _TEXT = "a whole number of 1 or more", "a number of 0 or more", "true or false", "text"
_STEPS: Final = "a whole number of 0 or more"
# Argument -> what it is, and its default in transformers' TrainingArguments or accelerate's DeepSpeedPlugin.
_DEFAULTS: Final[Mapping[str, tuple[str, Any]]] = {
    "learning_rate": (_NUMBER, 5e-5),
    "per_device_train_batch_size": (_COUNT, 8),
    "gradient_accumulation_steps": (_COUNT, 1),
    "max_grad_norm": (_NUMBER, 1.0),
    "adam_beta1": (_NUMBER, 0.9),
    "adam_beta2": (_NUMBER, 0.999),
    "adam_epsilon": (_NUMBER, 1e-8),
    "weight_decay": (_NUMBER, 0.0),
    "warmup_steps": (_NUMBER, 0),
    "warmup_ratio": (_NUMBER, 0.0),
    "fp16": (_FLAG, False),
    "bf16": (_FLAG, False),
    "save_on_each_node": (_FLAG, False),
    "zero_stage": (_STEPS, 2),
    "offload_optimizer_device": (_TEXT, "none"),
    "offload_param_device": (_TEXT, "none"),
    "zero3_save_16bit_model": (_FLAG, False),
}
# What has no default -> what it is, and how to say it.
_WITHOUT_DEFAULT: Final[Mapping[str, tuple[str, str, str]]] = {
    "hidden_size": (
        _COUNT,
        "it follows from the model's hidden size",
        "give hidden_size=N, the largest one in the model's config",
    ),
    "max_steps": (
        _COUNT,
        "it follows from the length of the run",
        "give max_steps=N, the optimizer steps of the whole run",
    ),
    "world_size": (
        _COUNT,
        "it follows from the number of devices",
        "give --num_gpus N, --hostfile FILE or world_size=N",
    ),
    "offload_optimizer_nvme_path": (_TEXT, "nobody knows the drive", "give offload_optimizer_nvme_path=/the/folder"),
    "offload_param_nvme_path": (_TEXT, "nobody knows the drive", "give offload_param_nvme_path=/the/folder"),
}
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "lr": "learning_rate",
    "num_training_steps": "max_steps",
    "total_num_steps": "max_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "num_processes": "world_size",
    "gradient_clipping": "max_grad_norm",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
}
# A number that stands in the file tells the argument. The Trainer refuses the two to differ, but for ZeRO's own.
_STATED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "learning_rate": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "max_grad_norm": ("gradient_clipping",),
    "adam_epsilon": ("optimizer.params.eps",),
    "weight_decay": ("optimizer.params.weight_decay",),
    "fp16": ("fp16.enabled",),
    "bf16": ("bf16.enabled",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "max_steps": ("scheduler.params.total_num_steps",),
    "zero_stage": ("zero_optimization.stage",),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device",),
    "offload_param_device": ("zero_optimization.offload_param.device",),
}
_MAY_DIFFER: Final = frozenset({"zero_stage", "offload_optimizer_device", "offload_param_device"})
_PRECISIONS: Final = ("no", "fp16", "bf16")


class UnknownArgumentError(Exception):
    """An argument that is needed, was not given, and has no default."""

    def __init__(self, name: str) -> None:
        _, self.reason, self.fix = _WITHOUT_DEFAULT[name]
        super().__init__(name)


@dataclass
class Arguments:
    """Known arguments of the training that a file is for.

    Attributes:
        given: from the command line, by the Trainer's names.
        in_file: the DeepSpeed JSON.
    """

    given: Mapping[str, Any]
    in_file: Mapping[str, Any]
    _assumed: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def stated(settings: Mapping[str, Any], in_file: Mapping[str, Any], world_size: int | None) -> Arguments:
        """Check the settings of a command line.

        Raises:
            UsageError: a name that nobody knows, or a value that cannot be.
        """
        given = {} if world_size is None else {"world_size": world_size}
        for name, value in settings.items():
            if name == "mixed_precision":
                if value not in _PRECISIONS:
                    raise UsageError(f"mixed_precision={show_value(value)}: known are {', '.join(_PRECISIONS)}")
                given |= {"fp16": value == "fp16", "bf16": value == "bf16"}
                continue
            argument = _OTHER_NAMES.get(name, name)
            if not is_argument(argument):
                raise UsageError(_unknown_name(name))
            if not _is(value, _wanted(argument)):
                raise UsageError(f"{name}={show_value(value)}: not {_wanted(argument)}")
            if given.get(argument, value) != value:
                raise UsageError(f"{name}={show_value(value)}: {argument} is {show_value(given[argument])} already")
            given[argument] = value
        return Arguments(given, in_file)

    def get(self, name: str) -> Any:
        """The value of an argument: as given, as the file tells, or the default, which is then remembered as assumed.

        Raises:
            UnknownArgumentError: there is none.
        """
        if name in self.given:
            return self.given[name]
        for path in _STATED_BY.get(name, ()):
            reported = self._in_file(path)
            if reported != "auto" and _is(reported, _wanted(name)):  # what is of another type is for the lint to name
                return reported
        if name not in _DEFAULTS:
            raise UnknownArgumentError(name)
        default = _DEFAULTS[name][1]
        self._assumed[name] = default
        return default

    def take_assumed(self) -> list[tuple[str, Any]]:
        """The defaults that were used since the last call."""
        assumed = list(self._assumed.items())
        self._assumed.clear()
        return assumed

    def mismatches(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Key, its value, argument and what was given, wherever file and command line say two things."""
        for name, stated in self.given.items():
            for path in _STATED_BY.get(name, ()) if name not in _MAY_DIFFER else ():
                reported = self._in_file(path)
                if reported not in (None, "auto") and reported != stated:
                    yield path, reported, name, stated

    def _in_file(self, path: str) -> Any:
        value: Any = self.in_file
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def is_argument(name: str) -> bool:
    """Check whether the Trainer or Accelerate has an argument of this name."""
    return name in _DEFAULTS or name in _WITHOUT_DEFAULT or name in _OTHER_NAMES or name == "mixed_precision"


def _wanted(argument: str) -> str:
    return (_DEFAULTS.get(argument) or _WITHOUT_DEFAULT[argument])[0]


def _unknown_name(name: str) -> str:
    known = [*_DEFAULTS, *_WITHOUT_DEFAULT, "mixed_precision"]
    guess = nearest(name, known)
    return f"{name}: not an argument of the Trainer; " + (
        f"did you mean {guess}?" if guess else f'known are {", ".join(known)}, and the DeepSpeed keys that are "auto"'
    )


def _is(value: Any, wanted: str) -> bool:
    if wanted == _FLAG:
        return isinstance(value, bool)
    if wanted == _TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return False
    if wanted == _NUMBER:
        return 0 <= value < float("inf")
    return isinstance(value, int) and value >= (1 if wanted == _COUNT else 0)


# Keys that take the value of one argument -> the argument.
_PLAIN: Final[Mapping[str, str]] = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "max_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "checkpoint.use_node_local_storage": "save_on_each_node",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
}
_BY_HIDDEN_SIZE: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


@dataclass(frozen=True)
class Resolution:
    """A DeepSpeed JSON without "auto".

    Attributes:
        text: the file with the values filled in; everything else stands as it stood.
        notes: values that came from a default, and keys that were left out.
        problems: what nobody can know from the file and the arguments given; the text then still holds "auto".
    """

    text: str
    notes: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()


def resolve(
    document: Document, settings: Mapping[str, Any], *, world_size: int | None = None, release: str | None = None
) -> Resolution:
    """Fill in every "auto" of a file.

    Args:
        document: what was read.
        settings: arguments by the Trainer's or Accelerate's names, ``hidden_size``, or DeepSpeed's own dotted keys.
        world_size: ranks.
        release: DeepSpeed's version; left out: the newest known.

    Raises:
        UsageError: a setting that means nothing here.
    """
    table, values = load_table(release), document.value if isinstance(document.value, Mapping) else {}
    autos = [path for path, value in _leaves(values) if value == "auto"]
    keys = {
        name: value for name, value in settings.items() if not is_argument(name) and ("." in name or name in values)
    }
    for name, value in keys.items():
        if tuple(name.split(".")) not in autos:
            raise UsageError(f'{name}: --resolve fills in "auto" only, and the file has none there')
        if not _is_json(value):
            raise UsageError(f"{name}={show_value(value)}: JSON has no such number")
    arguments = Arguments.stated({name: settings[name] for name in settings if name not in keys}, values, world_size)
    filler = _Filler(arguments, table, keys, values)
    return filler.resolution(document, autos)


class _Filler:
    """Finds the edit for each "auto", and says what was assumed."""

    def __init__(
        self, arguments: Arguments, table: KeyTable, keys: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        self.arguments, self.table, self.keys, self.values = arguments, table, keys, values
        self.notes: list[Problem] = []
        self.reported: set[str] = set()
        self.problems = [_mismatch(*found) for found in arguments.mismatches()]
        steps = arguments.given.get("gradient_accumulation_steps", 1)
        if steps != 1 and "gradient_accumulation_steps" not in values:
            self.problems.append(
                replace(
                    _mismatch("gradient_accumulation_steps", 1, "gradient_accumulation_steps", steps),
                    value=MISSING,
                    fix='add "gradient_accumulation_steps": "auto"',
                    reason=f"left out Accelerate makes it 1, and the Trainer was given {steps}",
                )
            )

    def resolution(self, document: Document, autos: Sequence[KeyPath]) -> Resolution:
        edits = [edit for path in autos for edit in self._edits(path)]
        notes, problems = (
            tuple(_placed(document, problem) for problem in found) for found in (self.notes, self.problems)
        )
        if problems:
            return Resolution(document.text, problems=problems)
        return Resolution(apply_edits(document, edits) if edits else document.text, notes)

    def _edits(self, path: KeyPath) -> Iterator[Edit]:
        dotted = ".".join(map(str, path))
        key = self.table.get(list(map(str, path)), variant_of(self.values, path))
        if key is not None and "auto" in (key.default, *key.enum, *key.examples):
            return  # DeepSpeed itself knows what it means
        if dotted in self.keys:
            yield ReplaceValue(path, self.keys[dotted])
            return
        self.arguments.take_assumed()
        try:
            value = self._value(dotted)
        except UnknownArgumentError as missing:
            self._unknown(dotted, missing.reason, missing.fix)
            return
        if value is not MISSING:
            self._note_assumed(dotted, value)
            yield ReplaceValue(path, value)
        elif read_by_model(dotted, self.table.release) and key is not None and "." in dotted:
            self._note(
                dotted,
                f"removed: Hugging Face does not fill it in, and DeepSpeed's default{_default(key)} holds",
                f"give {dotted}=VALUE for another one",
            )
            yield RemoveMember(path)
        elif key is not None:
            self._unknown(dotted, "Hugging Face does not fill it in", f"give {dotted}=VALUE, or remove it")
        # An unknown key is for the lint to name.

    def _value(self, path: str) -> Any:
        """Return the value after Hugging Face has filled it in; MISSING where it leaves "auto"."""
        get = self.arguments.get
        if path in _PLAIN:
            return get(_PLAIN[path])
        if path == "train_batch_size":
            return get("world_size") * get("per_device_train_batch_size") * get("gradient_accumulation_steps")
        if path == "optimizer.params.betas":
            return [get("adam_beta1"), get("adam_beta2")]
        if path == "scheduler.params.warmup_min_lr":
            return 0
        if path == "scheduler.params.warmup_num_steps":
            ratio = self.arguments.given.get("warmup_ratio", 0)
            by_ratio = ratio and not self.arguments.given.get("warmup_steps", 0)
            steps = ratio if by_ratio else get("warmup_steps")
            # below 1 it is a share of the run; DeepSpeed refuses 0, so the Trainer writes 1 at least
            return max(1, math.ceil(get("max_steps") * steps) if 0 < steps < 1 else int(steps))
        if path in _BY_HIDDEN_SIZE:
            return self._by_hidden_size(path)
        if path.startswith("zero_optimization.offload_") and path.endswith(".nvme_path"):
            section = path.split(".")[1]
            return get(f"{section}_nvme_path") if get(f"{section}_device") == "nvme" else MISSING
        return MISSING

    def _by_hidden_size(self, path: str) -> Any:
        if "stage3_" in path and self._stage() != 3:
            return MISSING  # the Trainer leaves it, and DeepSpeed does not look
        size = self.arguments.get("hidden_size")
        if path.endswith("reduce_bucket_size"):
            return size * size
        return int(0.9 * size * size) if "prefetch" in path else 10 * size

    def _stage(self) -> Any:
        """Left out, it is DeepSpeed's 0; only "auto" becomes Accelerate's 2."""
        section = self.values.get("zero_optimization")
        return self.arguments.get("zero_stage") if isinstance(section, Mapping) and "stage" in section else 0

    def _note(self, path: str, reason: str, fix: str) -> None:
        problem = Problem(kind="auto-resolved", key=path, value="auto", reason=reason, fix=fix, severity="note")
        self.notes.append(problem)

    def _note_assumed(self, path: str, value: Any) -> None:
        """Say each default once, at the first key that it decides."""
        new = {name: default for name, default in self.arguments.take_assumed() if name not in self.reported}
        self.reported.update(new)
        if new:
            listed = " and ".join(f"{name}={show_value(default)}" for name, default in new.items())
            many = "s" if len(new) > 1 else ""
            self._note(
                path,
                f"filled in with {show_value(value)}, from Hugging Face's default{many} {listed}",
                f"give {' and '.join(f'{name}=VALUE' for name in new)} if yours differ{'' if many else 's'}",
            )

    def _unknown(self, path: str, reason: str, fix: str) -> None:
        self.problems.append(Problem(kind="auto-unknown", key=path, value="auto", reason=reason, fix=fix))


def _mismatch(path: str, value: Any, name: str, stated: Any) -> Problem:
    return Problem(
        kind="auto-mismatch",
        key=path,
        value=value,
        reason=f"{name}={show_value(stated)} was given, and the Trainer refuses two values",
        fix='write "auto", or the same value in both places',
    )


def _default(key: Key) -> str:
    return "" if key.default is MISSING else f" {show_value(key.default)}"


def _placed(document: Document, problem: Problem) -> Problem:
    line, column = document.places.get(tuple(problem.key.split(".")), (0, 0))
    return replace(problem, file=document.name, line=line, column=column)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _leaves(values: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Values of sections; HF and DeepSpeed know no "auto" inside of a list."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
