"""What a file is: a run config, DeepSpeed JSON, or a config of another tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from deepspeed_lint.check import parse_config
from deepspeed_lint.keys import load_table
from deepspeed_lint.text.document import YAML_ENDINGS, Document, read_text
from framework.errors import MISSING, ConfigError, Problem
from framework.imports.other_tools import other_tool, other_tool_problem

Tool = Literal["transformers.TrainingArguments", "lightning.Trainer", "accelerate"]
_TOOLS: Final[Mapping[Tool, tuple[str, str]]] = {
    "transformers.TrainingArguments": ("trainer-config", "Hugging Face's Trainer"),
    "lightning.Trainer": ("trainer-config", "Lightning"),
    "accelerate": ("accelerate-config", "Hugging Face's Accelerate"),
}
_ACCELERATE_KEYS: Final = frozenset({"compute_environment", "distributed_type", "deepspeed_config"})
_TRAINER_KEYS: Final = frozenset(
    {
        "output_dir",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "num_train_epochs",
        "learning_rate",
        "eval_strategy",
        "evaluation_strategy",
        "save_strategy",
        "save_steps",
        "logging_steps",
        "lr_scheduler_type",
    }
)
_LIGHTNING_KEYS: Final = frozenset(
    {
        "max_epochs",
        "max_steps",
        "devices",
        "accelerator",
        "strategy",
        "precision",
        "num_nodes",
    }
)
_DEEPSPEED_KEYS: Final = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
)
IN_BOTH: Final = frozenset({"optimizer", "scheduler", "checkpoint"})
# Sections that only a run config has. A test holds them against RunConfig.
OURS: Final = frozenset(
    {
        "run",
        "model",
        "data",
        "task",
        "batch",
        "precision",
        "zero",
        "parallel",
        "training",
        "evaluation",
        "monitors",
        "callbacks",
        "profile",
        "supervision",
        "deepspeed",
    }
)
# Sections of ours that other trainers have, too.
_OTHER_TRAINERS_SECTIONS: Final = frozenset({"model", "data", "deepspeed"})


def read_deepspeed_json(path: Path, *, name: str) -> Document | None:
    """Read a file if it is DeepSpeed JSON; None if it is a run config.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.suffix.lower() in YAML_ENDINGS:
        return None
    return parse_deepspeed_json(read_text(path, name=name), path, name=name)


def parse_deepspeed_json(text: str, path: Path, *, name: str) -> Document | None:
    """Parse a text that has been read, as `read_deepspeed_json` does.

    YAML files are run configs. Anything else is DeepSpeed JSON unless more of its keys are a run
    config's own.
    """
    if path.suffix.lower() in YAML_ENDINGS:
        return None
    document = parse_config(text, name=name)
    if is_run_config(document.value):
        return None
    return document


def is_run_config(values: Any) -> bool:
    """Check whether these values are a run config rather than DeepSpeed's own."""
    if not isinstance(values, Mapping):
        return False
    num_ours = len(OURS & values.keys())
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping):
        num_ours += len({"kind", "target"} & optimizer.keys())
    return num_ours > len(_deepspeed_keys(values))


def _deepspeed_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys that only DeepSpeed has.

    The key table is loaded only where one of ours is there as well.
    """
    if OURS & values.keys():
        of_deepspeed = values.keys() - IN_BOTH
        return [name for name in load_table().children() if name in of_deepspeed]
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping) and "type" in optimizer:
        return ["type"]
    return []


def assumption(document: Document, *, as_run_config: bool) -> Iterator[Problem]:
    """Note what a file was taken for, if it has keys of both kinds."""
    values = document.value
    if not isinstance(values, Mapping):
        return
    if as_run_config:
        taken = "a run config"
        other = _first_of_deepspeeds(values)
    else:
        taken = "DeepSpeed JSON"
        other = _first_of_ours(values)
    if not other:
        return
    reason = f"the file was taken for {taken}, and this key is of the other kind"
    fix = "keep the keys of one kind in one file"
    line, column = document.places.get((other,), (0, 0))
    yield Problem(
        "kind-of-file-assumed",
        reason,
        fix,
        other,
        MISSING,
        document.name,
        line,
        column,
        severity="note",
    )


def _first_of_ours(values: Mapping[str, Any]) -> str:
    """Return the first key of ours in a file with keys of both kinds; empty for other files."""
    our_keys = [name for name in values if name in OURS]
    if our_keys and _deepspeed_keys(values):
        return our_keys[0]
    return ""


def _first_of_deepspeeds(values: Mapping[str, Any]) -> str:
    """Return the first key of DeepSpeed's in a file with keys of both kinds, but for those that
    are meant as ours; empty for other files.
    """
    if not OURS & values.keys():
        return ""
    for name in _deepspeed_keys(values):
        if not _is_plain_switch(name, values):
            return name
    return ""


def _is_plain_switch(name: str, values: Mapping[str, Any]) -> bool:
    """Check whether a name of DeepSpeed's is meant as a key of ours of the same name."""
    from framework.config.explain import is_plain_switch

    return is_plain_switch(name, values[name])


def tool_of(values: Any) -> Tool | None:
    """Return the trainer these arguments belong to, or None."""
    if not isinstance(values, Mapping) or (OURS - _OTHER_TRAINERS_SECTIONS) & values.keys():
        return None
    if other_tool(values, OURS) is not None:
        return None
    for tool, is_met in _MARKS.items():
        if is_met(values):
            return tool
    return None


def _is_of_lightning(values: Mapping[str, Any]) -> bool:
    trainer = values.get("trainer")
    return isinstance(trainer, Mapping) and not _LIGHTNING_KEYS.isdisjoint(trainer)


def _is_of_accelerate(values: Mapping[str, Any]) -> bool:
    names = values.keys()
    return bool(_ACCELERATE_KEYS & names) or {"mixed_precision", "num_processes"} <= names


def _is_of_transformers(values: Mapping[str, Any]) -> bool:
    names = values.keys()
    return len(_TRAINER_KEYS & names) > 1 and _DEEPSPEED_KEYS.isdisjoint(names)


# The first that is met decides.
_MARKS: Final[Mapping[Tool, Callable[[Mapping[str, Any]], bool]]] = {
    "lightning.Trainer": _is_of_lightning,
    "accelerate": _is_of_accelerate,
    "transformers.TrainingArguments": _is_of_transformers,
}


def foreign_problem(document: Document) -> Problem | None:
    """Return the problem of a config of another tool, which has some of DeepSpeed's settings under
    names of its own.
    """
    values = document.value
    if not isinstance(values, Mapping):
        return None
    name = other_tool(values, OURS)
    if name is not None:
        return other_tool_problem(name, values, file=document.name)
    trainer = tool_of(values)
    if trainer is None:
        return None
    kind, tool = _TOOLS[trainer]
    fix = "`import` prints the run config that it amounts to"
    reason = f"this is a config of {tool}, neither a run config nor DeepSpeed JSON"
    return Problem(kind, reason, fix, "", MISSING, document.name, 1, 1)


def with_last_of_duplicates(
    text: str, error: ConfigError, *, name: str, is_yaml: bool
) -> Document | None:
    """Read a file with duplicate keys as its tool does, which takes the last of them.

    Returns:
        The document; None for a file that is not another tool's, or with other errors.
    """
    if {problem.kind for problem in error.problems} != {"duplicate-key"}:
        return None
    read = yaml.safe_load if is_yaml else json.loads
    try:
        values = read(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    document = Document(name, values, text=text)
    if foreign_problem(document) is not None:
        return document
    return None
