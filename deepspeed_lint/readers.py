"""Who reads DeepSpeed JSON before DeepSpeed itself: Hugging Face's Trainer or Accelerate.

Those two read with `json.load`, fill in "auto" where they know the key, and stop at any other
"auto" with a ValueError (accelerate/utils/dataclasses.py
`DeepSpeedPlugin.deepspeed_config_process`, which the Trainer ends in as well). A file with "auto"
where the Trainer fills it in is taken for one of the Trainer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from deepspeed_lint.errors import MISSING, Problem
from deepspeed_lint.facts import dotted, leaves, read_by_model
from deepspeed_lint.key_files import TABLES, variant_of
from deepspeed_lint.keys import KeyTable
from deepspeed_lint.text.document import Document, KeyPath

Reader = Literal["deepspeed", "huggingface", "accelerate"]
NAMES: Final[Mapping[Reader, str]] = {
    "deepspeed": "DeepSpeed",
    "huggingface": "Hugging Face's Trainer",
    "accelerate": "Accelerate",
}
# The Trainer overwrites this key with save_on_each_node.
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
# Accelerate writes infinity into this key before it looks for "auto", and DeepSpeed itself takes
# any number.
_WRITTEN_OVER: Final = "steps_per_print"
# Both readers pass an optimizer from code, and let DeepSpeed take any.
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
    """Return the values as the reader gets them, and a problem for each place where `json.load`
    stops, or sees another number than DeepSpeed.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        if reader == "deepspeed":
            return document, []
        return document, [_not_json(document, reader, error)]
    differing = _differing_numbers(document, plain, table)
    if reader == "deepspeed":
        problems: list[Problem] = []
        for path, whole, number in differing:
            problems += _other_number(table, document, path, whole, number)
        return document, problems
    value = document.value
    for path, _, number in differing:
        value = _with_value(value, path, number)
    return replace(document, value=value), []


def _differing_numbers(
    document: Document, plain: Any, table: KeyTable
) -> list[tuple[KeyPath, int, float]]:
    """Return numbers that DeepSpeed and `json.load` read as different ones, where that matters."""
    return [
        (path, whole, number)
        for path, whole, number in _fractions(document.value, plain)
        if not read_by_model(dotted(path), table.release) and path != (_WRITTEN_OVER,)
    ]


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
    unknown = {problem.key for problem in problems if problem.kind == "unknown-key"}
    autos = {dotted(path) for path in _autos(values)} - unknown
    judged = []
    for problem in problems:
        if problem.kind not in _FROM_CODE and problem.key not in autos:
            judged.append(_for_json(problem))
    unread = tuple(f"{problem.key}." for problem in problems if problem.kind in _UNREAD_KINDS)
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
    """Yield path and both values of numbers, such as 1e2, that Hjson reads as int and JSON as
    float.
    """
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
