"""`ForeignArguments`: the arguments of another trainer on their way to a run config.

The module of each trainer takes the arguments one by one and puts what they mean under run-config
keys. Arguments that no module takes are listed as left out, with the reason from
`framework.config.other_words`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.lint import placed
from deepspeed_lint.text.document import Document
from framework.config.load import config_from_values
from framework.config.other_words import answers
from framework.errors import ConfigError, Problem, show_value
from framework.imports.deepspeed import Imported, import_document
from framework.imports.deepspeed_reader import Omission
from framework.imports.kind_of_file import Tool, read_deepspeed_json
from framework.plan.render import merged

Values = dict[str, Any]
_TABLES: Final = Path(__file__).parent / "tables"


def _read_table(name: str) -> Any:
    return json.loads((_TABLES / f"{name}.json").read_text(encoding="utf-8"))


# Trainer -> argument -> its default there; and the mappings that need no code.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = _read_table("trainer_defaults")
MAPPINGS: Final[Mapping[str, Any]] = _read_table("trainers")
_TITLES: Final[Mapping[Tool, str]] = {
    "transformers.TrainingArguments": "Hugging Face TrainingArguments",
    "lightning.Trainer": "Lightning Trainer",
    "accelerate": "accelerate Accelerator",
}
_OLD_NAMES: Final = {"evaluation_strategy": "eval_strategy"}
# What Lightning's strategy writes into a DeepSpeed JSON that leaves it out, from the loader and the
# Trainer's arguments.
_LIGHTNING_FILLS: Final = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}


# What command lines write for a truth value.
_TRUTH: Final = {
    "true": True,
    "yes": True,
    "1": True,
    "false": False,
    "no": False,
    "0": False,
    "": False,
}


class WatchedSection(dict[str, Any]):
    """A section of a file that remembers which of its keys have been looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._looked_up: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        self._looked_up.add(name)
        return super().get(name, default)

    def unread(self) -> dict[str, Any]:
        """Return the keys that have not been looked up, without empty ones."""
        return {
            name: value
            for name, value in self.items()
            if name not in self._looked_up and value not in (None, "", [], {})
        }


@dataclass
class ForeignArguments:
    """Arguments of another trainer, and the run config that they become.

    Attributes:
        tool: the trainer.
        document: the file.
        sections: sections of the run config.
        comments: run-config key -> comment beside it.
        left_out: arguments that are not taken over, for the top of the file.
        not_taken: keys of a DeepSpeed JSON that a run config cannot express.
        sources: run-config key -> the argument that decided it.
        decided_by_json: run-config keys that a DeepSpeed JSON beside the arguments decided, or has
            as "auto".
    """

    tool: Tool
    document: Document
    sections: Values = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    left_out: list[Omission] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    not_taken: tuple[Problem, ...] = ()
    decided_by_json: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)
    _watched: dict[str, WatchedSection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = self.document.value
        self.values: Values = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
        if self.tool == "lightning.Trainer":
            self.values = dict(values["trainer"])
        self.defaults = DEFAULTS.get(self.tool, {})
        self._taken.update(MAPPINGS["not_for_a_run"].get(self.tool, ()))

    # ---- arguments

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or its default in the trainer.

        Raises:
            ConfigError: the default is a number or a truth value, and the value is not.
        """
        self._taken.add(name)
        value = self.values.get(name)
        trainer_default = self.defaults.get(name, default)
        if value is None:
            return trainer_default
        if isinstance(trainer_default, bool):
            return self._truth(name, value)
        is_numeric = isinstance(trainer_default, (int, float))
        if is_numeric and not isinstance(value, (int, float)):
            return self._number(name, value)
        return value

    def _number(self, name: str, value: Any) -> float:
        """Convert text to a number. ConfigError for other text."""
        try:
            return float(value)
        except (TypeError, ValueError):
            problem = Problem("wrong-type", "not a number", "write a number", name, value)
            raise ConfigError(self._placed(problem)) from None

    def _truth(self, name: str, value: Any) -> Any:
        """Convert text such as "yes", which command lines write, to a truth value; other values
        pass. ConfigError for other text.
        """
        if not isinstance(value, str):
            return value
        if value.lower() in _TRUTH:
            return _TRUTH[value.lower()]
        problem = Problem(
            "wrong-type", "neither true nor false", "write true or false", name, value
        )
        raise ConfigError(self._placed(problem))

    def take_section(self, name: str) -> WatchedSection:
        """Return the section that an argument holds; keys not looked up are listed as left out.
        ConfigError for a value that is not a section.
        """
        value = self.take(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                self._placed(Problem("wrong-type", "not a section", "write keys", name, value))
            )
        section = WatchedSection(value or {})
        self._watched[name] = section
        return section

    def mark_taken(self, *names: str) -> None:
        """Keep arguments out of the list of what is left out."""
        self._taken.update(names)

    def is_set(self, name: str) -> bool:
        """Check whether the file sets an argument to something else than its default."""
        value = self.values.get(name)
        default = self.defaults.get(name)
        return value not in (None, [], {}, "") and (value or default) != default

    def leave_out(self, name: str, reason: str) -> None:
        """List an argument as left out, if the file sets it."""
        self._taken.add(name)
        if self.is_set(name):
            self.omit(name, show_value(self.values[name]), reason)

    def omit(self, key: str, shown: str | None, reason: str) -> None:
        """List an argument, or a key of a section, as left out."""
        self.left_out.append(Omission(key, shown, reason))

    # ---- keys of the run config

    def put(self, key: str, value: Any, argument: str = "", comment: str = "") -> None:
        """Set a key of the run config, which an argument decided."""
        section, _, last = key.partition(".")
        self.sections.setdefault(section, {})[last] = value
        if argument:
            self.sources[key] = argument
        if comment:
            self.comments[key] = comment

    def move(self, name: str, key: str, convert: Callable[[Any], Any] | None = None) -> None:
        """Put the value of an argument, given or its default in the trainer, under a key; None,
        False, and an empty default are skipped.
        """
        value = self.take(name)
        if value is None or value is False or not (value or name in self.values):
            return
        if convert is not None:
            value = convert(value)
        self.put(key, value, name)

    def put_half_precision(self, dtype: str, argument: str, *, with_deepspeed: bool) -> None:
        """Put fp16 or bf16: DeepSpeed casts the weights, the other trainers use autocast."""
        if with_deepspeed:
            self.put("precision.dtype", dtype, argument)
        else:
            self.put("precision.dtype", "autocast", argument)
            self.put("precision.compute_dtype", dtype, argument)

    def put_compile(self, options: Mapping[str, Any], argument: str) -> None:
        """Put the options of torch.compile; any of them turns it on."""
        set_options = {name: value for name, value in options.items() if value}
        if set_options:
            self.put("training.compile", set_options, argument)

    def put_offload(self, name: str, device: str, nvme_path: str | None, argument: str) -> None:
        """Put ``zero.offload_optimizer`` or ``zero.offload_param``."""
        offload = {"device": device}
        if device == "nvme" and nvme_path:
            offload["nvme_path"] = nvme_path
        self.put(f"zero.{name}", offload, argument)

    # ---- a DeepSpeed JSON beside the arguments

    def add_deepspeed(
        self, config: Any, argument: str, find_conflicts: FindConflicts | None = None
    ) -> None:
        """Import the DeepSpeed JSON that an argument holds or names.

        Where the JSON has "auto" or leaves a key out, the arguments decide.

        Args:
            config: the JSON, its path, or None.
            argument: the argument that holds or names it.
            find_conflicts: yields what the trainer refuses of the JSON beside its arguments.

        Raises:
            ConfigError: there is no such JSON, or the trainer refuses it beside the arguments.
        """
        self._taken.add(argument)
        if config is None:
            return
        document = self._deepspeed_json(config, argument)
        if find_conflicts is not None:
            self._refuse_all(find_conflicts(self, document.value))
        if self.tool == "lightning.Trainer":
            document = replace(document, value=_LIGHTNING_FILLS | document.value)
        self._join(import_document(document, partly=True))

    def _refuse_all(self, problems: Iterable[Problem]) -> None:
        """Raise ConfigError for the problems, at their places, if there are any."""
        placed_problems = list(map(self._placed, problems))
        if placed_problems:
            raise ConfigError(placed_problems)

    def _join(self, imported: Imported) -> None:
        """Merge the import of a DeepSpeed JSON into the sections; it wins over the arguments."""
        autos = [key for key in imported.comments if "." in key and key not in imported.sources]
        sections = _decided_sections(imported, autos)
        for name, section in sections.items():
            self._give_way(name, section, autos, imported.sources)
        self.sections = merged(
            self.sections, {name: section for name, section in sections.items() if section}
        )
        self.left_out += itertools.filterfalse(_is_filled_by_lightning, imported.left_out)
        self.not_taken = imported.not_taken
        self.decided_by_json = {*imported.sources, *autos}

    def _deepspeed_json(self, config: Any, argument: str) -> Document:
        """Return the DeepSpeed JSON that an argument holds or names by a path, from the current
        folder or from the file's. ConfigError if it is something else.
        """
        if isinstance(config, Mapping):
            return Document(self.document.name, dict(config))
        path = Path(str(config))
        beside_the_file = Path(self.document.name).parent / path
        if beside_the_file.is_file() and not path.is_file():
            path = beside_the_file
        document = read_deepspeed_json(path, name=str(path))
        if document is not None:
            return document
        reason = "it is no DeepSpeed JSON"
        problem = Problem("not-deepspeed-json", reason, "name the JSON", argument, config)
        raise ConfigError(self._placed(problem))

    def _give_way(
        self,
        name: str,
        json_section: Values,
        autos: Sequence[str],
        json_sources: Mapping[str, str],
    ) -> None:
        """List the arguments of a section that the JSON overrides.

        Where the JSON has another kind or target, the section loses its other keys.
        """
        section = self.sections.get(name)
        if not isinstance(section, dict):
            return
        is_another_kind = _is_another_kind(section, json_section)
        for key, value in list(section.items()):
            place = f"{name}.{key}"
            if key in json_section and json_section[key] != value:
                argument = self.sources.get(place)
                self._note_overridden(argument, json_section[key], json_sources.get(place))
            if is_another_kind and place not in autos:
                del section[key]

    def _note_overridden(self, argument: str | None, json_value: Any, json_key: str | None) -> None:
        """List an argument that the file sets as left out, for the value of the JSON."""
        if argument is None or not self._sets(argument):
            return
        if json_key is None:
            amount = show_value(json_value)
        else:
            amount = f"{json_key} = {show_value(json_value)}"
        shown = show_value(self._value_of(argument))
        omission = Omission(argument, shown, f"the DeepSpeed JSON wins, as there: {amount}")
        if omission not in self.left_out:
            self.left_out.append(omission)

    def _sets(self, argument: str) -> bool:
        """Check whether the file sets an argument, or a key of a section, beyond its default."""
        return "." in argument or self.is_set(argument)

    def _value_of(self, argument: str) -> Any:
        """Return the value of an argument, or of a dotted key in a section, or None."""
        value: Any = self.values
        for part in argument.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            else:
                value = None
        return value

    # ---- the result

    def imported(self) -> Imported:
        """Check the run config and return it.

        Raises:
            ConfigError: a value is not one that its key takes.
        """
        self._leave_out_rest()
        try:
            config_from_values(self.sections)
        except ConfigError as error:
            raise ConfigError(
                [self._under_its_argument(problem) for problem in error.problems]
            ) from None
        left_out = tuple(self.left_out)
        return Imported(self.sections, self.comments, left_out, self.sources, self.not_taken)

    def _leave_out_rest(self) -> None:
        """List the arguments, and keys of sections, that have not been taken."""
        for name in self.values:
            if name not in self._taken:
                self.leave_out(name, self._reason(name))
        for name, section in self._watched.items():
            self._leave_out_unread(name, section)

    def _leave_out_unread(self, name: str, section: WatchedSection) -> None:
        for key, value in section.unread().items():
            reason = MAPPINGS["of_sections"].get(
                f"{name}.{key}", f"no key of {name} that is read here"
            )
            self.omit(f"{name}.{key}", show_value(value), reason)

    def _reason(self, name: str) -> str:
        """Return why an argument has no key, or what to see, by the table of other words."""
        answer = answers()[_TITLES[self.tool]].get(name)
        if answer is None:
            return f"not an argument of {self.tool} that is known here"
        kind, _, reason = answer.partition(": ")
        if kind in ("cannot", "not needed", "not a key"):
            return reason
        return f"see {answer.partition('|')[0].strip()}"

    def _under_its_argument(self, problem: Problem) -> Problem:
        key = self.sources.get(problem.key, problem.key)
        return self._placed(Problem(problem.kind, problem.reason, problem.fix, key, problem.value))

    def _placed(self, problem: Problem) -> Problem:
        return placed(self.document, problem, at_top=False)


FindConflicts = Callable[[ForeignArguments, Mapping[str, Any]], Iterator[Problem]]


def _is_filled_by_lightning(omission: Omission) -> bool:
    return omission.key in _LIGHTNING_FILLS and omission.shown == "auto"


def _decided_sections(imported: Imported, autos: Sequence[str]) -> dict[str, Values]:
    """Return the sections in which a DeepSpeed JSON decides something, without its "auto" keys."""
    sections = {name: dict(values) for name, values in imported.decided_values().items()}
    for key in autos:
        section, _, last = key.partition(".")
        sections.get(section, {}).pop(last, None)
    return sections


def _is_another_kind(section: Values, json_section: Values) -> bool:
    """Check whether the DeepSpeed JSON names another optimizer or schedule than the arguments."""
    tags = ("kind", "target")
    if not any(tag in json_section for tag in tags):
        return False
    return any(section.get(tag) != json_section.get(tag) for tag in tags)


def disagreement(
    key: str, json_value: Any, argument: str, value: Any, reason: str, fix: str
) -> Problem:
    """Build the problem of a key of a DeepSpeed JSON that contradicts an argument; `reason` ends
    the sentence.
    """
    message = f"the DeepSpeed JSON has {key} = {show_value(json_value)}, and {reason}"
    return Problem("sources-disagree", message, fix, argument, value)


def refused_beside_json(argument: str, value: Any, reason: str) -> Problem:
    """Build the problem of an argument that the trainer does not take beside a DeepSpeed JSON."""
    return Problem(
        "sources-disagree", reason, "remove it, and write it in the JSON", argument, value
    )


def launch_options(num_gpus: Any, num_nodes: Any) -> str:
    """Return the options of ``dsf train`` for several nodes, or else for devices."""
    if num_nodes > 1:
        return f"-H HOSTFILE, {num_nodes} hosts"
    return f"--num_gpus {num_gpus}"
