"""`train.py --deepspeed_config ds.json`: a run config and a DeepSpeed JSON describe one run together.

What either of them says holds; what both say must be the same, or the run is refused with both places named. What the
JSON leaves out or calls "auto" is the run config's to say, and DeepSpeed's or our default where it says nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from framework.config.load import Source, config_from_values
from framework.config.run_config import RunConfig, kind_of_default
from framework.dslint.import_run import Imported, import_document
from framework.errors import ConfigError, Problem
from framework.text.hjson import HjsonDocument, parse_hjson, read_hjson
from framework.text.read_text import MAX_BYTES

_LONGEST_NAME: Final = 300
_UNIONS: Final = ("optimizer", "scheduler", "precision")


def with_deepspeed_config(config: RunConfig, path: str | Path, *, source: Source | None = None) -> RunConfig:
    """The run config with what a DeepSpeed JSON decides.

    Args:
        config: the run config, as it was written.
        path: the DeepSpeed JSON; as DeepSpeed takes it, that may be the text itself in base64.
        source: where the run config's values came from; it is given a note for every key of the JSON without effect.

    Raises:
        ConfigError: the JSON cannot be imported, or contradicts the run config.
    """
    source = source or Source()
    document = _read(str(path))
    imported = import_document(document)
    notes = [_left_out(document, line) for line in imported.left_out]
    for note in sorted(notes, key=lambda note: (note.line, note.column)):
        source.add_note(note)
    written = config.model_dump(exclude_unset=True)
    clashes = [source.locate(problem) for problem in _clashes(written, imported, document)]
    if clashes:
        raise ConfigError(clashes)
    decided = {key.partition(".")[0] for key in imported.given}
    ours = {name: section for name, section in imported.values.items() if name in decided}
    return config_from_values(_over(ours, written), source=source)


def _read(path: str) -> HjsonDocument:
    """What is no file and reads as base64 of an object is the text itself (deepspeed/runtime/config.py
    `DeepSpeedConfig`).
    """
    if len(path) <= 2 * MAX_BYTES and not _exists(path):
        try:
            text = base64.b64decode(path, altchars=b"-_", validate=True).decode("utf-8")
        except ValueError:
            text = ""
        if text.lstrip().startswith("{"):
            return parse_hjson(text, name="--deepspeed_config (base64)")
    return read_hjson(Path(path), name=path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]}...")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name, or with a zero byte in it
        return False


def _clashes(written: Mapping[str, Any], imported: Imported, document: HjsonDocument) -> Iterator[Problem]:
    """Keys that both say, differently."""
    for key, theirs in imported.given.items():
        mine, decided = _at(written, key), _at(imported.values, key)
        if mine is not None and decided is not None and mine != decided:
            yield _clash(key, mine, f"{_place(document, theirs)} amounts to {decided}")
    for name in _UNIONS:
        mine = written.get(name, {})
        tags = [tag for tag in ("target", *kind_of_default(name)) if tag in mine]
        given = [key for key in imported.given if key.startswith(f"{name}.")]
        if tags and given and tags[0] not in imported.values[name]:
            yield _clash(
                f"{name}.{tags[0]}", mine[tags[0]], f"{_place(document, imported.given[given[0]])} names another one"
            )


def _left_out(document: HjsonDocument, line: str) -> Problem:
    key, _, rest = line.partition(": ")
    row, column = document.places.get(tuple(key.split(".")), (0, 0))
    return Problem(
        kind="key-left-out",
        severity="note",
        file=document.name,
        line=row,
        column=column,
        key=key,
        reason=f"left out of this run: {rest}",
        fix=f"remove {key}",
    )


def _clash(key: str, value: Any, reason: str) -> Problem:
    return Problem(kind="deepspeed-config-clash", key=key, value=value, reason=reason, fix="say it in one of the two")


def _place(document: HjsonDocument, key: str) -> str:
    line, _ = document.places.get(tuple(key.split(".")), (0, 0))
    return f"{key} in {document.name}:{line}" if line else f"{key} in {document.name}"


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; `above` wins."""
    found = dict(below)
    for name, value in above.items():
        under = found.get(name)
        found[name] = _over(under, value) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return found
