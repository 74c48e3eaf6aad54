"""What a file is, a run config, DeepSpeed JSON or another tool's config, and who reads DeepSpeed
JSON first.

Before DeepSpeed itself that may be Hugging Face's Trainer or Accelerate. Those two read with
`json.load`, fill in "auto" where they know the key, and stop at any other "auto" with a ValueError
(accelerate/utils/dataclasses.py `DeepSpeedPlugin.deepspeed_config_process`, which the Trainer ends
in as well). A file that says "auto" where the Trainer fills it in is taken for one of the
Trainer's.
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
# The Trainer writes it over with save_on_each_node, whatever stands there.
_NODE_LOCAL: Final = "checkpoint.use_node_local_storage"
# transformers/integrations/deepspeed.py `trainer_config_process` and `trainer_config_finalize`, and
# what Accelerate adds: their arguments, each with its type, its default in transformers'
# TrainingArguments or accelerate's DeepSpeedPlugin, and the keys that take its value; and the keys
# whose value is computed.
_HUGGING_FACE: Final[Mapping[str, Any]] = json.loads(
    (TABLES / "huggingface.json").read_text(encoding="utf-8")
)
ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = _HUGGING_FACE["arguments"]
FILLED: Final = frozenset(
    (
        *_HUGGING_FACE["computed"],
        *(key for argument in ARGUMENTS.values() for key in argument.get("keys", ())),
    )
) - {_NODE_LOCAL}
# accelerate/accelerator.py `_prepare_deepspeed`: of a `DummyOptim` it knows the rate and the decay
# only.
_NOT_BY_ACCELERATE: Final = frozenset({"optimizer.params.betas", "optimizer.params.eps"})
# Accelerate writes infinity there before it looks for "auto", and DeepSpeed itself takes any
# number.
_WRITTEN_OVER: Final = "steps_per_print"
# They pass an optimizer, and allow DeepSpeed any.
_FROM_CODE: Final = frozenset({"optimizer-from-code", "offload-needs-cpu-optimizer"})


def _autos(values: Any) -> Iterator[KeyPath]:
    """Keys of sections whose value is "auto"; nobody looks into lists."""
    return (
        path
        for path, value in leaves(values if isinstance(values, Mapping) else {})
        if value == "auto"
    )


def reader_of(document: Document) -> tuple[Reader, Problem | None]:
    """Return who a file is for, and the note that says by which key that was seen."""
    path = next((path for path in _autos(document.value) if dotted(path) in FILLED), None)
    if path is None:
        return "deepspeed", None
    reason = f"taken for a file of {NAMES['huggingface']}, which fills it in"
    fix = "give --for deepspeed or --for accelerate for another reader"
    place = document.places.get(path, (0, 0))
    return "huggingface", Problem(
        "reader-assumed", reason, fix, dotted(path), "auto", document.name, *place, severity="note"
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
        place = getattr(error, "lineno", 1), getattr(error, "colno", 1)
        reason = f"{NAMES[reader]} reads with json.load, which stops here"
        fix = "write plain JSON, without comments, commas too many or a byte order mark"
        return document, [Problem("not-json", reason, fix, "", MISSING, document.name, *place)]
    odd = [
        (path, whole, number)
        for path, whole, number in _fractions(document.value, plain)
        if not read_by_model(dotted(path), table.release) and path != (_WRITTEN_OVER,)
    ]
    if reader == "deepspeed":
        return document, [
            problem for found in odd for problem in _other_number(table, document, *found)
        ]
    value = document.value
    for path, _, number in odd:
        value = _with(value, path, number)
    return replace(document, value=value), []


def judged_for(problems: list[Problem], values: Mapping[str, Any], reader: Reader) -> list[Problem]:
    """Return what DeepSpeed's rules found, without what the reader sees to, and with what it
    refuses itself.
    """
    if reader == "deepspeed":
        return problems
    inside = tuple(
        f"{problem.key}." for problem in problems if problem.kind in ("unknown-key", "dotted-key")
    )
    autos = {dotted(path) for path in _autos(values)}
    autos -= {problem.key for problem in problems if problem.kind == "unknown-key"}
    kept = [
        replace(problem, fix="remove it: plain JSON has no comments")
        if problem.kind == "comment-key"
        else problem
        for problem in problems
        if problem.kind not in _FROM_CODE and problem.key not in autos
    ]
    left = (
        key for key in sorted(autos) if not _is_filled(key, reader) and not key.startswith(inside)
    )
    return kept + [_auto(key, reader) for key in left] + list(_sections(values, reader))


def _is_filled(key: str, reader: Reader) -> bool:
    return key in (_WRITTEN_OVER, *FILLED) and not (
        reader == "accelerate" and key in _NOT_BY_ACCELERATE
    )


def _auto(key: str, reader: Reader) -> Problem:
    if key == _NODE_LOCAL and reader == "huggingface":
        reason = "the Trainer fills it in with save_on_each_node only, and stops at it otherwise"
        return Problem("auto-value", reason, "write true or false", key, "auto", severity="warning")
    who = "Accelerate" if reader == "accelerate" else "the Trainer"
    reason = (
        f"{who} does not fill it in, and{'' if reader == 'accelerate' else ' Accelerate'} "
        "stops at it"
    )
    return Problem("auto-value", reason, "write the value, or remove the key", key, "auto")


def _sections(values: Mapping[str, Any], reader: Reader) -> Iterator[Problem]:
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
) -> Iterator[Problem]:
    key = table.get(list(map(str, path)), variant_of(document.value, path))
    if key is not None and "integer" in key.types and "number" not in key.types:
        reason = (
            "DeepSpeed reads a whole number; json.load, as in Hugging Face's Trainer, makes "
            f"it {number}"
        )
        yield Problem(
            "loose-type", reason, f"write {whole}", dotted(path), whole, severity="warning"
        )


def _fractions(one: Any, other: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int, float]]:
    """Places of numbers, such as 1e2, that are whole to Hjson and have a fraction to JSON."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in one.keys() & other.keys():
            yield from _fractions(one[name], other[name], (*path, name))
    elif isinstance(one, int) and isinstance(other, float):
        yield path, one, other


def _with(values: Any, path: KeyPath, value: Any) -> Any:
    if path:
        return {**values, path[0]: _with(values[path[0]], path[1:], value)}
    return value


# Run configs and DeepSpeed JSON told apart.

Tool = Literal["transformers.TrainingArguments", "lightning.Trainer", "accelerate"]
_TOOLS: Final[Mapping[Tool, tuple[str, str]]] = {
    "transformers.TrainingArguments": ("trainer-config", "Hugging Face's Trainer"),
    "lightning.Trainer": ("trainer-config", "Lightning"),
    "accelerate": ("accelerate-config", "Hugging Face's Accelerate"),
}
_ACCELERATES: Final = frozenset({"compute_environment", "distributed_type", "deepspeed_config"})
_TRAINERS: Final = {
    *(
        "output_dir",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "num_train_epochs",
        "learning_rate",
    ),
    *(
        "eval_strategy",
        "evaluation_strategy",
        "save_strategy",
        "save_steps",
        "logging_steps",
        "lr_scheduler_type",
    ),
}
_LIGHTNINGS: Final = {
    "max_epochs",
    "max_steps",
    "devices",
    "accelerator",
    "strategy",
    "precision",
    "num_nodes",
}
IN_BOTH: Final = frozenset({"optimizer", "scheduler", "checkpoint"})
# Sections that only a run config has. A test holds them against RunConfig.
OURS: Final = frozenset(
    (
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
    )
) | {"deepspeed"}


def read_deepspeed_json(path: Path, *, name: str) -> Document | None:
    """The document if the file is DeepSpeed JSON, None if it is a run config.

    Raises:
        ConfigError: it cannot be read.
    """
    is_yaml = path.suffix.lower() in YAML_ENDINGS
    if is_yaml:
        return None
    return parse_deepspeed_json(read_text(path, name=name), path, name=name)


def parse_deepspeed_json(text: str, path: Path, *, name: str) -> Document | None:
    """As `read_deepspeed_json`, of a text that has been read.

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
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping):
        kinds = {"kind", "target"} & optimizer.keys()
    else:
        kinds = set()
    return len(OURS & values.keys()) + len(kinds) > len(_deepspeeds(values))


def _deepspeeds(values: Mapping[str, Any]) -> list[str]:
    """Keys that only DeepSpeed has; which are asked only where one of ours is there as well."""
    if not OURS & values.keys():
        if isinstance(values.get("optimizer"), Mapping) and "type" in values["optimizer"]:
            return ["type"]
        return []
    return [name for name in load_table().children() if name in values and name not in IN_BOTH]


def assumption(document: Document, *, as_run_config: bool) -> Iterator[Problem]:
    """A note on what a file was taken for, where it has keys of both kinds."""
    values = document.value
    if not isinstance(values, Mapping):
        return
    ours = [name for name in values if name in OURS]
    theirs = _deepspeeds(values)
    if ours and theirs:
        taken, other = ("a run config", theirs[0]) if as_run_config else ("DeepSpeed JSON", ours[0])
        reason = f"the file was taken for {taken}, and this key is of the other kind"
        fix = "keep the keys of one kind in one file"
        place = document.places.get((other,), (0, 0))
        yield Problem(
            "kind-of-file-assumed",
            reason,
            fix,
            other,
            MISSING,
            document.name,
            *place,
            severity="note",
        )


def tool_of(values: Any) -> Tool | None:
    """Return the trainer whose arguments these are; None where they are those of none."""
    if not isinstance(values, Mapping) or (OURS - {"model", "data", "deepspeed"}) & values.keys():
        return None
    if other_tool(values, OURS) is not None:
        return None
    if isinstance(values.get("trainer"), Mapping) and _LIGHTNINGS & values["trainer"].keys():
        return "lightning.Trainer"
    if _ACCELERATES & values.keys() or {"mixed_precision", "num_processes"} <= values.keys():
        return "accelerate"
    is_deepspeeds = values.keys() & {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
    }
    is_theirs = len(_TRAINERS & values.keys()) > 1 and not is_deepspeeds
    return "transformers.TrainingArguments" if is_theirs else None


def foreign_problem(document: Document) -> Problem | None:
    """Return the problem of a config of another tool with some of DeepSpeed's settings under names
    of its own.
    """
    values = document.value
    if not isinstance(values, Mapping):
        return None
    name = other_tool(values, OURS)
    if name is not None:
        return other_tool_problem(name, values, file=document.name)
    found = tool_of(values)
    if found is None:
        return None
    kind, tool = _TOOLS[found]
    fix = "`import` prints the run config that it amounts to"
    reason = f"this is a config of {tool}, neither a run config nor DeepSpeed JSON"
    return Problem(kind, reason, fix, "", MISSING, document.name, 1, 1)


def with_last_of_duplicates(
    text: str, error: ConfigError, *, name: str, is_yaml: bool
) -> Document | None:
    """Return a file of another tool as that tool reads it, the last of keys that are given twice;
    None for other files, and other errors.
    """
    if any(problem.kind != "duplicate-key" for problem in error.problems):
        return None
    try:
        values = (yaml.safe_load if is_yaml else json.loads)(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    document = Document(name, values, text=text)
    if foreign_problem(document) is not None:
        return document
    return None
