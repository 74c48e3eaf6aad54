"""`check --fix` and `check --resolve -o`: changes files, whole or not at all.

A symbolic link is written through: the file that it leads to changes, and the link stays one.
Permissions stay as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from framework.config.deepspeed_words import OWNED, SHARED, TYPED
from framework.config.fixes import fixed_run_config
from framework.dslint.fixes import fixed_text, safe_edits
from framework.dslint.readers import parse_deepspeed_json
from framework.errors import StorageError
from framework.system.files import refuse_foreign, replace_text
from framework.text.document import Document, document_of, read_text
from framework.text.edits import Edit, RenameKey, ReplaceValue, edited, unified_diff

_MOST_EDITS: Final = 100
_SECTION: Final = "deepspeed"


def fix_file(file: str, *, release: str | None = None) -> str:
    """Mend what has one safe answer, in place; returns the change as a unified diff, empty when
    there was none.

    Raises:
        ConfigError: the file cannot be read.
        StorageError: it cannot be written; it is then as it was.
    """
    path = Path(file)
    before = read_text(path, name=file)
    document = parse_deepspeed_json(before, path, name=file)
    if document:
        after = fixed_text(document, release=release)
    else:
        after = _fixed_passed_keys(
            fixed_run_config(before, path, name=file), path, name=file, release=release
        )
    if after == before:
        return ""
    write_file(path, after, name=file)
    return unified_diff(before, after, file)


def _fixed_passed_keys(text: str, path: Path, *, name: str, release: str | None) -> str:
    """Fix the keys under `deepspeed:` as those of DeepSpeed JSON, as far as no typed section
    decides the result.
    """
    for _ in range(_MOST_EDITS):
        document = document_of(text, path, name=name)
        if isinstance(document.value, dict):
            passed = document.value.get(_SECTION)
        else:
            passed = None
        if not isinstance(passed, dict):
            break
        found = (_in_run_config(edit) for edit in safe_edits(Document("", passed), release=release))
        attempts = (edited(document, [edit]) for edit in found if edit is not None)
        after = next((attempt for attempt in attempts if attempt is not None), None)
        if after is None:
            break
        text = after
    return text


def _in_run_config(edit: Edit) -> Edit | None:
    """The same edit of a run config; None for what would say what a typed section says."""
    if isinstance(edit, RenameKey):
        after = ".".join(map(str, (*edit.path[:-1], edit.name)))
        if after in TYPED or (after in OWNED and after not in SHARED):
            return None
    elif not isinstance(edit, ReplaceValue):
        return None
    return replace(edit, path=(_SECTION, *edit.path))


def write_file(path: Path, text: str, *, name: str, marks: Sequence[bytes] = ()) -> None:
    """Replace a file, or make it; after a StorageError it is as it was. `marks`: one that is there
    has one of them, or is left alone.
    """
    try:
        if marks:
            refuse_foreign(path, marks=marks)
        real = path.resolve()
        if real.exists() and not real.is_file():
            raise StorageError(f"{name}: it is no file to write to; name one [file-not-written]")
        if real.exists():
            mode = real.stat().st_mode & 0o7777
        else:
            mode = None
        replace_text(real, text, mode=mode)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: a loop of links, in Python 3.12 and older
        stated = getattr(error, "strerror", None) or error
        raise StorageError(f"{name}: cannot be written ({stated}) [file-not-written]") from error
