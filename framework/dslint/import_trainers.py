"""`import` of other trainers' files: Hugging Face's TrainingArguments, accelerate's config,
Lightning's CLI config.

What a run config has a key for is taken over, with the defaults of the other tool written down
where ours differ. The rest is named at the top of what is printed, with the reason
(`tables/coming_from.yaml`), unless it says what the tool does anyway
(`tables/trainer_defaults.json`). A DeepSpeed JSON that a file names or holds is imported too; where
it says "auto", the arguments beside it decide, as there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from framework.config import base
from framework.config.load import config_from_values
from framework.config.optimizer import SGD, Adam, AdamW
from framework.config.zero import Zero
from framework.dslint.facts import value_at
from framework.dslint.import_run import Imported, import_document
from framework.dslint.key_files import TABLES
from framework.dslint.lint import placed
from framework.dslint.other_tools import template_problem
from framework.dslint.readers import (
    Tool,
    foreign_problem,
    read_deepspeed_json,
    tool_of,
    with_last_of_duplicates,
)
from framework.errors import ConfigError, Problem, show_value
from framework.plan.render import merged
from framework.system.log import print_problem
from framework.text.document import YAML_ENDINGS, Document, parse_document, read_text

Values = dict[str, Any]
_DEFAULTS, _TABLES = (
    json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("trainer_defaults", "trainers")
)
_TITLES: Final[Mapping[Tool, str]] = {
    "transformers.TrainingArguments": "Hugging Face TrainingArguments",
    "lightning.Trainer": "Lightning Trainer",
    "accelerate": "accelerate Accelerator",
}
_OLD_NAMES: Final = {"evaluation_strategy": "eval_strategy"}


def read_arguments(path: Path, *, name: str) -> Document | None:
    """The document, if the file has the arguments of another trainer, in YAML or JSON.

    Raises:
        ConfigError: it cannot be read.
    """
    text = read_text(path, name=name)
    is_yaml = path.suffix.lower() in YAML_ENDINGS
    try:
        document = parse_document(text, name=name, is_json=not is_yaml)
    except ConfigError as error:
        found = with_last_of_duplicates(text, error, name=name, is_yaml=is_yaml)
        if found is not None:
            document = found
            for problem in error.problems:
                print_problem(
                    replace(
                        problem,
                        reason=f"{problem.reason}; the last one counts, as there",
                        fix="",
                        severity="note",
                    )
                )
        elif is_yaml:
            raise ConfigError(template_problem(text, file=name) or error.problems) from None
        else:
            return None  # DeepSpeed's own reader takes more than JSON
    if tool_of(document.value):
        return document
    foreign = foreign_problem(document)
    if foreign is not None:
        raise ConfigError(foreign)
    return None


def import_arguments(document: Document) -> Imported:
    """The run config that does what the arguments of another trainer say.

    Raises:
        ConfigError: a value is not one that the key here takes, or a DeepSpeed JSON that the file
            names cannot be imported.
    """
    tool = tool_of(document.value)
    assert tool is not None
    arguments = _Arguments(tool, document)
    for name, key in _TABLES["moves"][tool].items():
        arguments.move(name, key)
    _TAKERS[tool](arguments)
    return arguments.imported()


class Section(dict[str, Any]):
    """Keys of a section, which remember whether anything has asked for them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        self._asked.add(name)
        return super().get(name, default)

    def rest(self) -> dict[str, Any]:
        """Return what nothing has asked for, without what is empty."""
        return {
            name: value
            for name, value in self.items()
            if name not in self._asked and value not in (None, "", [], {})
        }


@dataclass
class _Arguments:
    """Arguments on their way to a run config.

    Attributes:
        tool: whose they are.
        document: the file.
        found: sections of the run config.
        comments: run-config key -> what to say beside it.
        left_out: what is asked at the top.
        given: run-config key -> the argument that decided it.
    """

    tool: Tool
    document: Document
    found: Values = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _sections: dict[str, Section] = field(default_factory=dict)
    decided_by_json: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        values = self.document.value
        self.values: Values = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
        if self.tool == "lightning.Trainer":
            self.values = dict(values["trainer"])
        self.defaults = _DEFAULTS.get(self.tool, {})
        self._taken.update(_TABLES["not_for_a_run"].get(self.tool, ()))

    def take(self, name: str, default: Any = None) -> Any:
        """The value of an argument, or its default there."""
        self._taken.add(name)
        value = self.values.get(name)
        usual = self.defaults.get(name, default)
        if value is None:
            return usual
        if isinstance(usual, bool):
            return self._truth(name, value)
        if isinstance(usual, (int, float)) and not isinstance(value, (int, float)):
            try:
                return float(value)
            except (TypeError, ValueError):
                problem = Problem("wrong-type", "not a number", "write a number", name, value)
                raise ConfigError(self._placed(problem)) from None
        return value

    def _truth(self, name: str, value: Any) -> Any:
        """Return a truth value that is written as text, as command lines do, as one."""
        if not isinstance(value, str):
            return value
        if value.lower() in ("true", "yes", "1"):
            return True
        if value.lower() in ("false", "no", "0", ""):
            return False
        problem = Problem(
            "wrong-type", "neither true nor false", "write true or false", name, value
        )
        raise ConfigError(self._placed(problem))

    def section(self, name: str) -> Section:
        """Return the section that an argument holds; its keys that nothing asks for are named in
        the end.
        """
        value = self.take(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                self._placed(Problem("wrong-type", "not a section", "write keys", name, value))
            )
        found = self._sections[name] = Section(value or {})
        return found

    def is_given(self, name: str) -> bool:
        """Check whether the file says something else than its tool does anyway."""
        value = self.values.get(name)
        usual = self.defaults.get(name)
        return value not in (None, [], {}, "") and (value or usual) != usual

    def put(self, key: str, value: Any, name: str = "", comment: str = "") -> None:
        """Set a key of the run config, which an argument decided."""
        section, _, last = key.partition(".")
        self.found.setdefault(section, {})[last] = value
        if name:
            self.given[key] = name
        if comment:
            self.comments[key] = comment

    def drop(self, name: str, reason: str) -> None:
        """Name what is not taken over, where the file says it."""
        self._taken.add(name)
        if self.is_given(name):
            self.left_out.append(f"{name}: {show_value(self.values[name])} ({reason})")

    def move(self, name: str, key: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Take an argument over where it is given, or where its default is no default here."""
        value = self.take(name)
        if value is not None and value is not False and (value or name in self.values):
            self.put(key, change(value), name)

    def add_deepspeed(self, config: Any, name: str, refused: Refused | None = None) -> None:
        """Import the DeepSpeed JSON that an argument holds or names; what it calls "auto" stays the
        arguments'.

        Args:
            config: the JSON, or its path.
            name: the argument.
            refused: lists what the tool refuses of the two, from the values of the JSON.

        Raises:
            ConfigError: there is no such JSON; or the tool would not take it beside the arguments.
        """
        self._taken.add(name)
        if config is None:
            return
        document = self._deepspeed_json(config, name)
        if refused is None:
            problems = []
        else:
            problems = list(refused(self, document.value))
        if problems:
            raise ConfigError([self._placed(problem) for problem in problems])
        if self.tool == "lightning.Trainer":
            document = replace(document, value=_LIGHTNING_FILLS | document.value)
        its = import_document(document)
        decided = {key.partition(".")[0] for key in its.given}
        sections = {key: dict(section) for key, section in its.values.items() if key in decided}
        # "auto", and what the file leaves to the arguments.
        autos = [key for key in its.comments if "." in key and key not in its.given]
        for key in autos:
            name, _, last = key.partition(".")
            sections.get(name, {}).pop(last, None)
        for key, section in sections.items():
            self._give_way(key, section, autos, its.given)
        self.found = merged(
            self.found, {key: section for key, section in sections.items() if section}
        )
        filled = tuple(f"{key}: auto " for key in _LIGHTNING_FILLS)
        self.left_out += [line for line in its.left_out if not line.startswith(filled)]
        self.decided_by_json = {*its.given, *autos}

    def _deepspeed_json(self, config: Any, name: str) -> Document:
        if isinstance(config, Mapping):
            return Document(self.document.name, dict(config))
        path = Path(str(config))
        beside = Path(self.document.name).parent / path
        if beside.is_file() and not path.is_file():
            path = beside
        else:
            path = path
        document = read_deepspeed_json(path, name=str(path))
        if document is None:
            reason = "it is no DeepSpeed JSON"
            fix = "name the JSON"
            raise ConfigError(
                self._placed(Problem("not-deepspeed-json", reason, fix, name, config))
            )
        return document

    def _give_way(
        self, name: str, section: Values, autos: Sequence[str], theirs: Mapping[str, str]
    ) -> None:
        """Take out of a section what the JSON decides, and name what the file says otherwise."""
        own = self.found.get(name)
        if not isinstance(own, dict):
            return
        tags = ("kind", "target")
        is_another = any(own.get(tag) != section.get(tag) for tag in tags) and any(
            tag in section for tag in tags
        )
        for key, asked in list(own.items()):
            place = f"{name}.{key}"
            argument = self.given.get(place)
            differs = key in section and section[key] != asked
            if argument is not None and differs and self._gives(argument):
                its = theirs.get(place, "its value")
                if place in theirs:
                    amount = f"{its} = {show_value(section[key])}"
                else:
                    amount = show_value(section[key])
                line = (
                    f"{argument}: {show_value(self._value_of(argument))} (the DeepSpeed JSON "
                    f"wins, as there: {amount})"
                )
                if line not in self.left_out:
                    self.left_out.append(line)
            if is_another and place not in autos:
                del own[key]

    def _gives(self, argument: str) -> bool:
        """Check whether the file itself gives an argument, or a key of a section, that is not a
        tool's default.
        """
        return "." in argument or self.is_given(argument)

    def _value_of(self, argument: str) -> Any:
        value: Any = self.values
        for part in argument.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            else:
                value = None
        return value

    def imported(self) -> Imported:
        """The run config, checked."""
        for name in self.values:
            if name not in self._taken:
                self.drop(name, self._reason(name))
        for section, values in self._sections.items():
            for name, value in values.rest().items():
                reason = _TABLES["of_sections"].get(
                    f"{section}.{name}", f"no key of {section} that is read here"
                )
                self.left_out.append(f"{section}.{name}: {show_value(value)} ({reason})")
        try:
            config_from_values(self.found)
        except ConfigError as error:
            raise ConfigError(
                [self._in_their_words(problem) for problem in error.problems]
            ) from None
        return Imported(self.found, self.comments, tuple(self.left_out), self.given)

    def _reason(self, name: str) -> str:
        answer = answers()[_TITLES[self.tool]].get(name)
        if answer is None:
            return f"not an argument of {self.tool} that is known here"
        kind, _, reason = answer.partition(": ")
        if kind in ("cannot", "not needed", "not a key"):
            return reason
        return f"see {answer.partition('|')[0].strip()}"

    def _in_their_words(self, problem: Problem) -> Problem:
        key = self.given.get(problem.key, problem.key)
        return self._placed(Problem(problem.kind, problem.reason, problem.fix, key, problem.value))

    def _placed(self, problem: Problem) -> Problem:
        return placed(self.document, problem, at_top=False)


Refused = Callable[[_Arguments, Mapping[str, Any]], Iterator[Problem]]


@cache
def answers() -> dict[str, dict[str, str]]:
    """Tool -> argument -> answer, as docs show them; arguments that share an answer have it
    each.
    """
    tables = yaml.safe_load((TABLES / "coming_from.yaml").read_text(encoding="utf-8"))
    return {
        tool: {name.strip(): answer for names, answer in rows.items() for name in names.split(",")}
        for tool, rows in tables.items()
    }


def _run_name(text: str) -> str:
    """Make a name of a run from any text."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:100] or "run"


# Hugging Face's TrainingArguments.

_SINKS: Final = ("tensorboard", "wandb", "mlflow", "trackio", "comet_ml")


def _hugging_face(them: _Arguments) -> None:
    out = Path(str(them.take("output_dir") or "runs/run"))
    them.put("run.name", _run_name(str(them.take("run_name") or out.name)), "output_dir")
    if str(out.parent) != ".":
        them.put("run.output_dir", str(out.parent), "output_dir")
    model = them.values.get("model_name_or_path")
    if model:  # of transformers' own scripts
        them.put(
            "model.target",
            "transformers:AutoModel.from_pretrained",
            comment="the class of your task, AutoModelFor...",
        )
        them.put("model.args", {"pretrained_model_name_or_path": model}, "model_name_or_path")
        them._taken.add("model_name_or_path")
    _hf_optimizer(them)
    _hf_schedule(them)
    if them.take("max_steps") > 0:
        them.put("training.max_steps", them.take("max_steps"), "max_steps")
        them.drop("num_train_epochs", "max_steps wins, as there")
    else:
        epochs = float(them.take("num_train_epochs"))
        whole = max(1, round(epochs))
        if whole == epochs:
            comment = ""
        else:
            comment = f"{epochs:g} there; whole epochs here, or training.max_steps"
        them.put("training.max_epochs", whole, "num_train_epochs", comment)
    _every(them, "logging", "training.log_every")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        them.move(name, "training.recompute_every", lambda _: 1)
    if them.take("label_smoothing_factor"):
        them.put(
            "task.label_smoothing", them.take("label_smoothing_factor"), "label_smoothing_factor"
        )
        them.put("task.kind", "classification")
    precision = next((name for name in ("bf16", "fp16") if them.take(name)), None)
    them._taken |= {"bf16", "fp16"}
    if precision:
        if them.take("deepspeed"):
            halves = {"dtype": precision}
        else:
            halves = {"dtype": "autocast", "compute_dtype": precision}
        for key, value in halves.items():
            them.put(f"precision.{key}", value, precision)
    elif them.take("tf32"):
        them.put("precision.matmul", "high", "tf32")
    _compile(
        them,
        {name: them.take(f"torch_compile_{name}") for name in ("backend", "mode")},
        "torch_compile",
    )
    _hf_cadences(them)
    if "group_by_length" in (
        them.take("train_sampling_strategy"),
        them.take("group_by_length") and "group_by_length",
    ):
        them.put("data.bucket_steps", 50)  # there too a window of 50 batches is sorted
    _without_data(them)
    named = them.take("report_to")
    for sink in [named] if isinstance(named, str) else named or []:
        if sink in _SINKS and sink != "tensorboard":
            them.put(f"monitors.{sink.removesuffix('_ml')}", True, "report_to")
    them.move(
        "resume_from_checkpoint",
        "checkpoint.resume",
        lambda value: "auto" if value is True else str(value),
    )
    if them.is_given("fsdp"):
        them.put("zero.stage", 2 if "shard_grad_op" in str(them.take("fsdp")) else 3, "fsdp")
    them.add_deepspeed(them.take("deepspeed"), "deepspeed", _hf_mismatches)
    clip = them.take("max_grad_norm")
    is_left_out = (
        them.take("deepspeed") is not None and "training.clip_grad_norm" not in them.decided_by_json
    )
    if is_left_out and clip != 1.0:
        reason = "the DeepSpeed JSON has no gradient_clipping, and DeepSpeed clips at 1.0 then"
        them.left_out.append(f"max_grad_norm: {show_value(clip)} ({reason})")
        them.put("training.clip_grad_norm", 1.0, "max_grad_norm")


def _hf_mismatches(them: _Arguments, config: Mapping[str, Any]) -> Iterator[Problem]:
    """List what transformers/integrations/deepspeed.py `HfTrainerDeepSpeedConfig` refuses: values
    of the JSON, but for "auto", that are not the arguments', given or by default.
    """
    micro = them.take("per_device_train_batch_size")
    steps = them.take("gradient_accumulation_steps")
    betas = [them.take("adam_beta1"), them.take("adam_beta2")]
    rate = them.take("learning_rate")
    length = them.take("max_steps")
    pairs: list[tuple[str, Any, str]] = [
        ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
        ("gradient_clipping", them.take("max_grad_norm"), "max_grad_norm"),
        ("optimizer.params.lr", rate, "learning_rate"),
        ("optimizer.params.betas", betas, "adam_beta1"),
        ("optimizer.params.eps", them.take("adam_epsilon"), "adam_epsilon"),
        ("optimizer.params.weight_decay", them.take("weight_decay"), "weight_decay"),
        ("scheduler.params.warmup_max_lr", rate, "learning_rate"),
        ("fp16.enabled", bool(them.take("fp16") or them.take("fp16_full_eval")), "fp16"),
        ("bf16.enabled", bool(them.take("bf16") or them.take("bf16_full_eval")), "bf16"),
    ]
    if not them.take("auto_find_batch_size"):
        pairs.insert(0, ("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"))
    if length > 0:
        pairs.append(("scheduler.params.total_num_steps", length, "max_steps"))
    warmup = float(them.take("warmup_steps") or them.values.get("warmup_ratio") or 0)
    if warmup >= 1 or warmup == 0 or length > 0:
        if warmup >= 1 or not warmup:
            number = int(warmup)
        else:
            number = math.ceil(warmup * length)
        pairs.append(("scheduler.params.warmup_num_steps", max(1, number), "warmup_steps"))
    for key, value, argument in pairs:
        theirs = value_at(config, key.split("."), None)
        if theirs not in (None, "auto") and theirs != value:
            yield _disagreement(
                key, theirs, argument, value, "the Trainer refuses values that mismatch"
            )
    whole = config.get("train_batch_size")
    if (
        isinstance(whole, int)
        and isinstance(micro, int)
        and isinstance(steps, int)
        and whole % max(1, micro * steps)
    ):
        reason = "the Trainer refuses values that mismatch, whatever the number of devices"
        yield _disagreement("train_batch_size", whole, "per_device_train_batch_size", micro, reason)


def _disagreement(key: str, theirs: Any, argument: str, value: Any, reason: str) -> Problem:
    words = (
        f"given or by default, it differs: the DeepSpeed JSON has {key} = "
        f"{show_value(theirs)}, and {reason}"
    )
    return Problem(
        "sources-disagree", words, 'write one value in both, or "auto" in the JSON', argument, value
    )


def _compile(them: _Arguments, options: Mapping[str, Any], name: str) -> None:
    """Options of torch.compile, each of which turns it on."""
    given = {option: value for option, value in options.items() if value}
    if given:
        them.put("training.compile", given, name)


def _without_data(them: _Arguments) -> None:
    """Options of the loader wait for data of the user's own: they are no data."""
    loader = them.found.pop("data", {})
    options = {name: value for name, value in loader.items() if value}
    if options:
        text = ", ".join(f"{name}: {value}" for name, value in options.items())
        them.left_out.append(f"for your data section: {text}")


def _hf_optimizer(them: _Arguments) -> None:
    name = str(them.take("optim"))
    kind = _TABLES["optim"].get(name)
    if kind is None:
        them.left_out.append(f"optim: {name} (name its class as optimizer.target; this is adamw)")
        kind = {"kind": "adamw"}
    rate = float(them.take("learning_rate"))
    decay = float(them.take("weight_decay"))
    betas = [them.take("adam_beta1"), them.take("adam_beta2")]
    eps = them.take("adam_epsilon")
    for key, value in kind.items():
        them.put(f"optimizer.{key}", value, "optim")
    if "target" in kind:
        args: Values = {"lr": rate, "weight_decay": decay}
        if "Adam" in kind["target"]:
            args |= {"betas": betas, "eps": eps}
        them.put("optimizer.args", args, "learning_rate")
        return
    them.put("optimizer.lr", rate, "learning_rate")
    them.put("optimizer.weight_decay", decay, "weight_decay")
    if decay:
        them.put("optimizer.weight_decay_on", "matrices", comment="as there: not biases and norms")
    if kind["kind"] == "adamw":
        them.put("optimizer.betas", betas, "adam_beta1")
        them.put("optimizer.eps", eps, "adam_epsilon")


def _hf_schedule(them: _Arguments) -> None:
    name = str(them.take("lr_scheduler_type"))
    kind = _TABLES["lr_scheduler_type"].get(name)
    if kind is None:
        them.left_out.append(
            f"lr_scheduler_type: {name} (name one as scheduler.target; this is cosine)"
        )
        kind = "cosine"
    them.put("scheduler.kind", kind, "lr_scheduler_type")
    warmup = float(them.take("warmup_steps") or them.values.get("warmup_ratio") or 0)
    steps = them.take("max_steps")
    them._taken.add("warmup_ratio")
    if name in ("constant", "reduce_lr_on_plateau"):  # there too warm-up means nothing to them
        warmup = 0
    if 0 < warmup < 1 and steps > 0:
        warmup = -(-warmup * steps // 1)
    if 0 < warmup < 1:
        them.left_out.append(
            f"warmup: {warmup:g} of the steps (`plan` says how many; set scheduler.warmup_steps)"
        )
    elif warmup or name == "inverse_sqrt":
        them.put("scheduler.warmup_steps", int(warmup) or 10_000, "warmup_steps")
    options = them.take("lr_scheduler_kwargs") or {}
    for option, value in options.items():
        ours = _TABLES["lr_scheduler_kwargs"].get(option)
        if ours:
            them.put(f"scheduler.{ours}", value, "lr_scheduler_kwargs")
        elif option not in ("num_warmup_steps", "num_training_steps"):
            them.left_out.append(
                f"lr_scheduler_kwargs.{option}: {show_value(value)} (no key of this schedule)"
            )
    if name == "reduce_lr_on_plateau":
        plateau = {"kind": "reduce_on_plateau", "factor": options.get("factor", 0.1)}
        them.found["callbacks"] = [plateau | {"patience": options.get("patience", 10)}]


def _every(them: _Arguments, prefix: str, key: str) -> None:
    """Steps between two of something; a share of the run has no key."""
    strategy = str(them.take(f"{prefix}_strategy"))
    every = them.take(f"{prefix}_steps")
    if strategy != "steps" or every is None:
        return
    if every < 1:
        them.left_out.append(
            f"{prefix}_steps: {every:g} of the run (set {key} to a number of steps)"
        )
    else:
        them.put(key, int(every), f"{prefix}_steps")


def _hf_cadences(them: _Arguments) -> None:
    if them.take("eval_strategy") == "steps" and them.take("eval_steps") is None:
        them.values["eval_steps"] = them.take("logging_steps")  # as there
    for prefix, section in (("eval", "evaluation"), ("save", "checkpoint")):
        strategy = them.take(f"{prefix}_strategy")
        if strategy == "epoch":
            them.put(f"{section}.every_epochs", 1, f"{prefix}_strategy")
        elif strategy == "no":
            them.put(f"{section}.at_end", False, f"{prefix}_strategy")
        _every(them, prefix, f"{section}.every_steps")
        them._taken.add(f"{prefix}_steps")
    if them.take("eval_strategy") != "no":
        them.move("per_device_eval_batch_size", "evaluation.batch_size")
    them._taken.add("per_device_eval_batch_size")
    keep = them.take("save_total_limit")
    if keep:
        them.put("checkpoint.keep_last", keep, "save_total_limit")
    elif them.take("save_strategy") != "no":
        them.left_out.append(
            "save_total_limit: none (all are kept there; here checkpoint.keep_last, 3)"
        )
    metric = them.take("metric_for_best_model")
    best = them.take("load_best_model_at_end")
    if metric or best:
        metric = str(metric or "loss").removeprefix("eval_")
        them.put("checkpoint.keep_best", f"eval/{metric}", "metric_for_best_model")
        greater = them.take("greater_is_better")
        if greater is None:
            greater = not metric.endswith("loss")
        else:
            greater = greater
        them.put("checkpoint.best_is", "max" if greater else "min", "greater_is_better")


# accelerate's config file.


def _accelerate(them: _Arguments) -> None:
    inner = them.section("deepspeed_config")
    processes = them.take("num_processes", 1)
    machines = them.take("num_machines", 1)
    if processes > 1:
        if machines > 1:
            hosts = f"-H HOSTFILE, {machines} hosts"
        else:
            hosts = f"--num_gpus {processes}"
        them.left_out.append(
            f"num_processes: {processes} (at the start: ./launch.sh train FILE {hosts})"
        )
    precision = {"bf16": "bf16", "fp16": "fp16"}.get(str(them.take("mixed_precision", "no")))
    if precision:
        if inner:
            halves = {"dtype": precision}
        else:
            halves = {"dtype": "autocast", "compute_dtype": precision}
        for key, value in halves.items():
            them.put(f"precision.{key}", value, "mixed_precision")
    _accelerate_deepspeed(them, inner)
    fsdp = them.section("fsdp_config")
    if fsdp:
        way = str(
            fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", "FULL_SHARD"))
        ).upper()
        them.put(
            "zero.stage",
            {"SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0, "3": 0}.get(way, 3),
            "fsdp_config",
        )
        if fsdp.get("fsdp_offload_params"):
            _offload(them, "offload_param", "cpu", None, "fsdp_config")
            _offload(them, "offload_optimizer", "cpu", None, "fsdp_config")
        if fsdp.get("fsdp_activation_checkpointing"):
            them.put("training.recompute_every", 1, "fsdp_config")
    old = them.take("dynamo_backend")
    dynamo = them.section("dynamo_config")
    backend = str(dynamo.get("dynamo_backend", old) or "no").lower()
    if backend != "no":
        options = {name: dynamo.get(f"dynamo_use_{name}") for name in ("fullgraph", "dynamic")}
        if dynamo.get("dynamo_use_regional_compilation"):
            per = "block"
        else:
            per = None
        _compile(
            them,
            options | {"backend": backend, "mode": dynamo.get("dynamo_mode"), "per": per},
            "dynamo_config",
        )
    if them.take("use_cpu"):
        them.left_out.append("use_cpu: true (the environment variable DS_ACCELERATOR=cpu)")


# accelerate/utils/dataclasses.py `DeepSpeedPlugin._deepspeed_config_checks`.
_NOT_BESIDE_A_FILE: Final[Mapping[str, str]] = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


def _accelerate_deepspeed(them: _Arguments, inner: Section) -> None:
    stage = inner.get("zero_stage")
    if stage is None and inner and inner.get("deepspeed_config_file") is None:
        stage = 2  # accelerate/utils/dataclasses.py `DeepSpeedPlugin`
    if stage is not None:
        them.put("zero.stage", stage, "deepspeed_config.zero_stage")
    for name, key in (
        ("gradient_accumulation_steps", "batch.accumulation_steps"),
        ("gradient_clipping", "training.clip_grad_norm"),
    ):
        value = inner.get(name)
        if value not in (None, "auto"):
            them.put(key, value, f"deepspeed_config.{name}")
    for name in ("optimizer", "param"):
        device = inner.get(f"offload_{name}_device", "none")
        nvme = inner.get(f"offload_{name}_nvme_path")
        if device not in (None, "none"):
            _offload(
                them, f"offload_{name}", device, nvme, f"deepspeed_config.offload_{name}_device"
            )
    saves_whole = inner.get("zero3_save_16bit_model")
    if saves_whole is not None and stage == 3:
        key = "zero.stage3_gather_16bit_weights_on_model_save"
        them.put(key, saves_whole, "deepspeed_config.zero3_save_16bit_model")
    them.add_deepspeed(inner.get("deepspeed_config_file"), "deepspeed_config", _beside_a_file)
    hostfile = inner.get("deepspeed_hostfile")
    if hostfile:
        them.left_out.append(
            "deepspeed_config.deepspeed_hostfile (at the start: ./launch.sh train FILE -H "
            f"{hostfile})"
        )


def _beside_a_file(them: _Arguments, config: Mapping[str, Any]) -> Iterator[Problem]:
    """List what Accelerate refuses beside a `deepspeed_config_file`: its own keys for what the JSON
    says.
    """
    inner = them.values["deepspeed_config"]
    reason = "Accelerate refuses the key beside deepspeed_config_file, where it would be ignored"
    for name, key in _NOT_BESIDE_A_FILE.items():
        if inner.get(name) is not None:
            theirs = value_at(config, key.split("."), None)
            place = f"deepspeed_config.{name}"
            words = f"{reason}; the DeepSpeed JSON has {key} = {show_value(theirs)}"
            yield Problem(
                "sources-disagree", words, "remove it, and write it in the JSON", place, inner[name]
            )
    precision = them.values.get("mixed_precision")
    if precision is not None:
        theirs = next(
            (
                name
                for name in ("bf16", "fp16")
                if value_at(config, [name, "enabled"], None) is True
            ),
            "neither",
        )
        words = f"{reason}; the DeepSpeed JSON enables {theirs}"
        yield Problem(
            "sources-disagree",
            words,
            "remove it, and write it in the JSON",
            "mixed_precision",
            precision,
        )


def _offload(them: _Arguments, name: str, device: str, nvme_path: str | None, given: str) -> None:
    where = {"device": device} | (
        {"nvme_path": nvme_path} if device == "nvme" and nvme_path else {}
    )
    them.put(f"zero.{name}", where, given)


# What its strategy writes into a DeepSpeed JSON that leaves it out, from the loader and the
# Trainer's arguments.
_LIGHTNING_FILLS: Final = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}

# Lightning's CLI config: trainer, seed, and the classes of optimizer and schedule.

_STRATEGY: Final = re.compile(
    r"deepspeed(?:_stage_(?P<stage>[123]))?(?P<offload>_offload)?(?P<nvme>_nvme)?"
)
_TORCHS: Final[Mapping[str, type[base.Section]]] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}
_STRATEGY_CLASS: Final = "lightning.DeepSpeedStrategy"
_KNOBS: Final = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
)


def _lightning(them: _Arguments) -> None:
    seed = them.document.value.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool):
        them.put("run.seed", seed, "seed_everything")
    is_deepspeed, config = _lightning_strategy(them)
    _lightning_precision(them, is_deepspeed=is_deepspeed)
    devices = them.take("devices")
    nodes = them.take("num_nodes")
    if devices not in ("auto", 1, "1", None) or nodes > 1:
        if nodes > 1:
            hosts = f"-H HOSTFILE, {nodes} hosts"
        else:
            hosts = f"--num_gpus {devices}"
        them.left_out.append(f"devices: {devices} (at the start: ./launch.sh train FILE {hosts})")
    them.drop("accelerator", "DeepSpeed's accelerator of this machine, or DS_ACCELERATOR")
    steps = them.take("max_steps")
    epochs = them.take("max_epochs")
    if steps > 0:
        them.put("training.max_steps", steps, "max_steps")
        them.drop("max_epochs", "max_steps is the length here; the first to come is there")
    elif epochs != -1:
        them.put(
            "training.max_epochs",
            epochs or 1000,
            "max_epochs",
            "" if epochs else "the default there",
        )
    if them.take("fast_dev_run"):
        them.put("training.max_steps", int(them.take("fast_dev_run")), "fast_dev_run")
    clip = them.take("gradient_clip_val")
    them.put(
        "training.clip_grad_norm",
        clip or 0,
        "gradient_clip_val",
        "" if clip else "there is no clipping there",
    )
    them.put("training.log_every", them.take("log_every_n_steps") or 50, "log_every_n_steps")
    them.move("deterministic", "training.deterministic", bool)
    every = them.take("val_check_interval")
    if isinstance(every, int):
        batches = them.take("accumulate_grad_batches") or 1
        if batches > 1:
            note = f"{every} batches there, of which a step takes {batches}"
        else:
            note = ""
        them.put(
            "evaluation.every_steps", max(1, round(every / batches)), "val_check_interval", note
        )
    else:
        them.put(
            "evaluation.every_epochs",
            them.take("check_val_every_n_epoch") or 1,
            "check_val_every_n_epoch",
        )
        if isinstance(every, float) and every != 1.0:
            them.left_out.append(
                f"val_check_interval: {every:g} of an epoch (set evaluation.every_steps)"
            )
    if them.take("enable_checkpointing") is False:
        them.put("checkpoint.at_end", False, "enable_checkpointing")
    else:
        them.put("checkpoint.every_epochs", 1, comment="as there by itself")
    if them.take("enable_progress_bar") is False:
        them.put("monitors.progress", "off", "enable_progress_bar")
    _lightning_classes(them)
    them.add_deepspeed(config, "strategy", _lightning_refuses)


def _lightning_strategy(them: _Arguments) -> tuple[bool, Any]:
    """Take the strategy over, by name or by class: whether it is a DeepSpeed strategy, and its
    DeepSpeed JSON.
    """
    strategy = them.take("strategy")
    if isinstance(strategy, Mapping):
        options = Section(strategy.get("init_args") or {})
        name = str(strategy.get("class_path", "")).rpartition(".")[2]
    else:
        options = Section({})
        name = str(strategy)
    found = _STRATEGY.fullmatch(name)
    if found is not None:
        where = "nvme" if found["nvme"] else "cpu"
        options["stage"] = int(found["stage"] or 2)
        if found["offload"]:
            options |= {"offload_optimizer": True, "offload_optimizer_device": where}
            options |= {"offload_parameters": found["stage"] == "3", "offload_params_device": where}
    if found is not None or name == "DeepSpeedStrategy":
        config = options.pop("config", None)
        if config is None:
            _lightning_deepspeed(them, options)
        else:  # pytorch_lightning/strategies/deepspeed.py: "All defaults will be ignored if a config is passed in"
            for option, value in options.items():
                them.left_out.append(
                    f"strategy.{option}: {show_value(value)} (the strategy's config wins, as there)"
                )
        return True, config
    if name.lower().startswith("fsdp"):
        them.put(
            "zero.stage",
            2 if "SHARD_GRAD_OP" in str(options.get("sharding_strategy")) else 3,
            "strategy",
        )
        if options.get("cpu_offload"):
            _offload(them, "offload_param", "cpu", None, "strategy")
        options.get("sharding_strategy")
    elif name not in ("auto", "ddp", "single_device") and not name.startswith(
        ("ddp_", "DDPStrategy")
    ):
        them.left_out.append(f"strategy: {name} (see zero.stage and parallel)")
    for option, value in options.rest().items():
        them.left_out.append(
            f"strategy.{option}: {show_value(value)} (see the keys of zero and parallel)"
        )
    return False, None


def _lightning_refuses(them: _Arguments, config: Mapping[str, Any]) -> Iterator[Problem]:
    """List what Lightning, or DeepSpeed below it, refuses of the two:
    pytorch_lightning/strategies/deepspeed.py `_format_batch_size_and_grad_accum_config`,
    lightning_fabric's `_format_precision_config`.
    """
    key = "gradient_accumulation_steps"
    if key in config:
        reason = "Lightning refuses the key there, as accumulate_grad_batches sets it"
        value = them.take("accumulate_grad_batches")
        yield _disagreement(key, config[key], "accumulate_grad_batches", value, reason)
    asked = str(them.take("precision") or "32-true")
    half, other = ("bf16", "fp16") if asked.startswith("bf16") else ("fp16", "bf16")
    if (
        asked.startswith(("bf16", "16"))
        and half not in config
        and value_at(config, [other, "enabled"], None) is True
    ):
        reason = f"Lightning adds {half} to it, of which DeepSpeed refuses the two"
        yield _disagreement(f"{other}.enabled", True, "precision", asked, reason)


def _lightning_deepspeed(them: _Arguments, options: Values) -> None:
    defaults = _DEFAULTS[_STRATEGY_CLASS]
    asked = {**{name: value for name, value in defaults.items() if value is not None}, **options}
    stage = int(asked["stage"])
    them.put("zero.stage", stage, "strategy")
    ours = Zero()
    for name in _KNOBS if stage else ():
        if not (name == "allgather_bucket_size" and stage == 3) and asked[name] != getattr(
            ours, name
        ):
            them.put(f"zero.{name}", asked[name], "strategy")
    if asked["offload_optimizer"]:
        _offload(
            them,
            "offload_optimizer",
            asked["offload_optimizer_device"],
            asked["nvme_path"],
            "strategy",
        )
    if asked["offload_parameters"]:
        _offload(
            them, "offload_param", asked["offload_params_device"], asked["nvme_path"], "strategy"
        )
    known = {
        *_KNOBS,
        "stage",
        "offload_optimizer",
        "offload_optimizer_device",
        "offload_parameters",
    }
    known |= {"offload_params_device", "nvme_path"}
    for name, value in options.items():
        if name not in known and value != defaults.get(name):
            them.left_out.append(
                f"strategy.{name}: {show_value(value)} (see the keys of zero, precision and "
                "deepspeed)"
            )


def _lightning_precision(them: _Arguments, *, is_deepspeed: bool) -> None:
    asked = str(them.take("precision") or "32-true")
    if asked.startswith("bf16"):
        half = "bf16"
    elif asked.startswith("16"):
        half = "fp16"
    else:
        half = None
    if half is None:
        if not asked.startswith("32"):
            them.left_out.append(
                f"precision: {asked} (a run computes in fp32, fp16, bf16 or autocast)"
            )
        return
    if is_deepspeed:
        them.put("precision.dtype", half, "precision")
        return
    them.put("precision.dtype", "autocast", "precision")
    them.put("precision.compute_dtype", half, "precision")
    if asked.endswith("true"):
        them.comments["precision.dtype"] = (
            f"{asked} has no fp32 weights there; dtype: {half} keeps them in the optimizer"
        )


def _lightning_classes(them: _Arguments) -> None:
    values = them.document.value
    for name, key in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
        section = values.get(name)
        if isinstance(section, str):
            section = {"class_path": section}
        if not isinstance(section, Mapping):
            continue
        module, _, last = str(section.get("class_path", "")).rpartition(".")
        args = dict(section.get("init_args", {}))
        if module == "torch.optim":
            kind = _TORCHS.get(last)
        else:
            kind = None
        if kind is not None and args.keys() <= kind.model_fields.keys():
            # torch's rate
            them.found[key] = {"kind": kind.model_fields["kind"].default, "lr": 1e-3, **args}
        elif not module:
            them.left_out.append(
                f"{name}: {show_value(section)} (name its class, with its module, as {key}.target)"
            )
        else:
            them.found[key] = {"target": f"{module}:{last}", "args": args}
            if key == "scheduler":
                them.comments[key] = (
                    "stepped after every step here; after every epoch there by itself"
                )
    for name in ("model", "data"):
        if values.get(name) is not None:
            them.left_out.append(
                f"{name} (name its nn.Module, dataset and loss: docs/tutorials/from-lightning.md)"
            )
    read = {"trainer", "seed_everything", "optimizer", "lr_scheduler", "model", "data"}
    for name, value in values.items():
        if name not in read and value not in (None, "", [], {}):
            them.left_out.append(f"{name}: {show_value(value)} (no key that is read here)")


_TAKERS: Final[Mapping[Tool, Callable[[_Arguments], None]]] = {
    "transformers.TrainingArguments": _hugging_face,
    "accelerate": _accelerate,
    "lightning.Trainer": _lightning,
}
