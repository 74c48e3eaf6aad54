"""What a file is, a run config, DeepSpeed JSON or another tool's config, and who reads DeepSpeed
JSON first.

Before DeepSpeed itself that may be Hugging Face's Trainer or Accelerate. Those two read with
`json.load`, fill in "auto" where they know the key, and stop at any other "auto" with a ValueError
(accelerate/utils/dataclasses.py `DeepSpeedPlugin.deepspeed_config_process`, which the Trainer ends
in as well). A file with "auto" where the Trainer fills it in is taken for one of the Trainer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from framework.dslint.facts import dotted, leaves, read_by_model
from framework.dslint.key_files import TABLES, variant_of
from framework.dslint.keys import KeyTable, load_table
from framework.dslint.other_tools import other_tool, other_tool_problem, template_problem
from framework.errors import MISSING, ConfigError, Problem
from framework.text.document import YAML_ENDINGS, Document, KeyPath, read_text
from framework.text.hjson import parse_hjson

Reader = Literal["deepspeed", "huggingface", "accelerate"]
NAMES: Final[Mapping[Reader, str]] = {
    "deepspeed": "DeepSpeed",
    "huggingface": "Hugging Face's Trainer",
    "accelerate": "Accelerate",
}
# The Trainer overwrites it with save_on_each_node.
_NODE_LOCAL: Final = "checkpoint.use_node_local_storage"
# transformers/integrations/deepspeed.py `trainer_config_process` and `trainer_config_finalize`, and
# what Accelerate adds: their arguments, each with its type, its default in transformers'
# TrainingArguments or accelerate's DeepSpeedPlugin, and the keys that take its value; and the keys
# with a value that is computed.
_HUGGING_FACE: Final[Mapping[str, Any]] = json.loads(
    (TABLES / "huggingface.json").read_text(encoding="utf-8")
)
ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = _HUGGING_FACE["arguments"]


def _filled_keys() -> Iterator[str]:
    yield from _HUGGING_FACE["computed"]
    for argument in ARGUMENTS.values():
        yield from argument.get("keys", ())


FILLED: Final = frozenset(_filled_keys()) - {_NODE_LOCAL}
# accelerate/accelerator.py `_prepare_deepspeed`: of a `DummyOptim` it knows the rate and the decay
# only.
_NOT_BY_ACCELERATE: Final = frozenset({"optimizer.params.betas", "optimizer.params.eps"})
# Accelerate writes infinity there before it looks for "auto", and DeepSpeed itself takes any
# number.
_WRITTEN_OVER: Final = "steps_per_print"
# They pass an optimizer, and allow DeepSpeed any.
_FROM_CODE: Final = frozenset({"optimizer-from-code", "offload-needs-cpu-optimizer"})
_UNREAD_KINDS: Final = ("unknown-key", "dotted-key")


def _autos(values: Any) -> Iterator[KeyPath]:
    """Return the keys with the value "auto"; the readers do not look into lists."""
    if isinstance(values, Mapping):
        for path, value in leaves(values):
            if value == "auto":
                yield path


def reader_of(document: Document) -> tuple[Reader, Problem | None]:
    """Return who a file is for, and a note with the key that shows it."""
    for path in _autos(document.value):
        if dotted(path) in FILLED:
            return "huggingface", _assumed_reader(document, path)
    return "deepspeed", None


def _assumed_reader(document: Document, path: KeyPath) -> Problem:
    reason = f"taken for a file of {NAMES['huggingface']}, which fills it in"
    fix = "give --for deepspeed or --for accelerate for another reader"
    line, column = document.places.get(path, (0, 0))
    return Problem(
        "reader-assumed",
        reason,
        fix,
        dotted(path),
        "auto",
        document.name,
        line,
        column,
        severity="note",
    )


def as_read(
    document: Document, text: str, reader: Reader, table: KeyTable
) -> tuple[Document, list[Problem]]:
    """Return the values as the reader gets them, and where `json.load` stops or sees other numbers
    than DeepSpeed.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        if reader == "deepspeed":
            return document, []
        return document, [_not_json(document, reader, error)]
    differing = [
        (path, whole, number)
        for path, whole, number in _fractions(document.value, plain)
        if not read_by_model(dotted(path), table.release) and path != (_WRITTEN_OVER,)
    ]
    if reader == "deepspeed":
        problems: list[Problem] = []
        for path, whole, number in differing:
            problems += _other_number(table, document, path, whole, number)
        return document, problems
    value = document.value
    for path, _, number in differing:
        value = _with_value(value, path, number)
    return replace(document, value=value), []


def _not_json(document: Document, reader: Reader, error: Exception) -> Problem:
    line = getattr(error, "lineno", 1)
    column = getattr(error, "colno", 1)
    reason = f"{NAMES[reader]} reads with json.load, which stops here"
    fix = "write plain JSON, without comments, commas too many or a byte order mark"
    return Problem("not-json", reason, fix, "", MISSING, document.name, line, column)


def judged_for(problems: list[Problem], values: Mapping[str, Any], reader: Reader) -> list[Problem]:
    """Return the problems that a file has for its reader.

    Args:
        problems: what DeepSpeed's rules found; dropped is what the reader takes care of.
        values: the file.
        reader: who reads it first; what it refuses itself is added.
    """
    if reader == "deepspeed":
        return problems
    unread = tuple(f"{problem.key}." for problem in problems if problem.kind in _UNREAD_KINDS)
    unknown = {problem.key for problem in problems if problem.kind == "unknown-key"}
    autos = {dotted(path) for path in _autos(values)} - unknown
    judged = [
        _for_json(problem)
        for problem in problems
        if problem.kind not in _FROM_CODE and problem.key not in autos
    ]
    for key in sorted(autos):
        if not _is_filled(key, reader) and not key.startswith(unread):
            judged.append(_auto(key, reader))
    return judged + list(_missing_sections(values, reader))


def _for_json(problem: Problem) -> Problem:
    """Return the problem with the fix for a file that is read with `json.load`."""
    if problem.kind == "comment-key":
        return replace(problem, fix="remove it: plain JSON has no comments")
    return problem


def _is_filled(key: str, reader: Reader) -> bool:
    if reader == "accelerate" and key in _NOT_BY_ACCELERATE:
        return False
    return key == _WRITTEN_OVER or key in FILLED


def _auto(key: str, reader: Reader) -> Problem:
    """Return the problem of an "auto" that the reader does not fill in."""
    if key == _NODE_LOCAL and reader == "huggingface":
        reason = "the Trainer fills it in with save_on_each_node only, and stops at it otherwise"
        return Problem("auto-value", reason, "write true or false", key, "auto", severity="warning")
    if reader == "accelerate":
        reason = "Accelerate does not fill it in, and stops at it"
    else:
        reason = "the Trainer does not fill it in, and Accelerate stops at it"
    return Problem("auto-value", reason, "write the value, or remove the key", key, "auto")


def _missing_sections(values: Mapping[str, Any], reader: Reader) -> Iterator[Problem]:
    """Check the sections that `DeepSpeedPlugin.__post_init__` needs in a file."""
    key = "zero_optimization"
    if key not in values:
        fix = f'add "{key}": {{"stage": 0}}, or the stage that you want'
        yield Problem(
            "zero-section-missing", f"{NAMES[reader]} refuses a file without it", fix, key
        )
    key = "gradient_accumulation_steps"
    if key not in values:
        reason = f"left out it is 1, whatever {key} {NAMES[reader]} is given"
        yield Problem(
            "accumulation-left-out", reason, f'add "{key}": "auto"', key, severity="warning"
        )


def _other_number(
    table: KeyTable, document: Document, path: KeyPath, whole: int, number: float
) -> list[Problem]:
    """Warn of a number that is whole for DeepSpeed alone, where the key takes whole numbers."""
    key = table.get(list(map(str, path)), variant_of(document.value, path))
    if key is None or "integer" not in key.types or "number" in key.types:
        return []
    reason = (
        "DeepSpeed reads a whole number; json.load, as in Hugging Face's Trainer, makes "
        f"it {number}"
    )
    return [
        Problem("loose-type", reason, f"write {whole}", dotted(path), whole, severity="warning")
    ]


def _fractions(
    hjson_value: Any, json_value: Any, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, int, float]]:
    """Find numbers, such as 1e2, that are whole to Hjson and have a fraction to JSON."""
    if isinstance(hjson_value, Mapping) and isinstance(json_value, Mapping):
        for name in hjson_value.keys() & json_value.keys():
            yield from _fractions(hjson_value[name], json_value[name], (*path, name))
    elif isinstance(hjson_value, int) and isinstance(json_value, float):
        yield path, hjson_value, json_value


def _with_value(values: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy of the values with another one at a path."""
    if not path:
        return value
    return {**values, path[0]: _with_value(values[path[0]], path[1:], value)}


# Which kind of file it is: a run config, DeepSpeed JSON, or a config of another tool.

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
    try:
        document = parse_hjson(text, name=name)
    except ConfigError as error:
        raise ConfigError(template_problem(text, file=name) or error.problems) from None
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
        return [name for name in load_table().children() if name in values and name not in IN_BOTH]
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping) and "type" in optimizer:
        return ["type"]
    return []


def assumption(document: Document, *, as_run_config: bool) -> Iterator[Problem]:
    """Note what a file was taken for, if it has keys of both kinds."""
    values = document.value
    if not isinstance(values, Mapping):
        return
    our_keys = [name for name in values if name in OURS]
    deepspeed_keys = _deepspeed_keys(values)
    if not our_keys or not deepspeed_keys:
        return
    if as_run_config:
        taken = "a run config"
        other = deepspeed_keys[0]
    else:
        taken = "DeepSpeed JSON"
        other = our_keys[0]
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


def tool_of(values: Any) -> Tool | None:
    """Return the trainer these arguments belong to, or None."""
    if not isinstance(values, Mapping) or (OURS - _OTHER_TRAINERS_SECTIONS) & values.keys():
        return None
    if other_tool(values, OURS) is not None:
        return None
    trainer = values.get("trainer")
    if isinstance(trainer, Mapping) and _LIGHTNING_KEYS & trainer.keys():
        return "lightning.Trainer"
    if _ACCELERATE_KEYS & values.keys() or {"mixed_precision", "num_processes"} <= values.keys():
        return "accelerate"
    if len(_TRAINER_KEYS & values.keys()) > 1 and not _DEEPSPEED_KEYS & values.keys():
        return "transformers.TrainingArguments"
    return None


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
    if any(problem.kind != "duplicate-key" for problem in error.problems):
        return None
    try:
        if is_yaml:
            values = yaml.safe_load(text)
        else:
            values = json.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    document = Document(name, values, text=text)
    if foreign_problem(document) is not None:
        return document
    return None
