"""The arguments of Hugging Face's Trainer and Accelerate that decide what "auto" becomes, and their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from framework.errors import UsageError, show_value
from framework.text.typos import nearest

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
    """What is known of the training that a file is for.

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
    """Whether the Trainer or Accelerate has an argument of this name."""
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
