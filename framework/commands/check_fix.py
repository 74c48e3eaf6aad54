"""`check --fix` and `check --resolve -o`: files are changed completely or not at all.

A symbolic link stays a link: the file that it leads to is replaced. Permissions stay as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from deepspeed_lint.fixes import fixed_text, lines_to_change, safe_edits
from deepspeed_lint.text.document import Document, document_of, read_text
from deepspeed_lint.text.edits import Edit, RenameKey, ReplaceValue, unified_diff
from framework.config.deepspeed_words import OWNED, SHARED, TYPED
from framework.config.edits import edited
from framework.config.fixes import fixed_run_config
from framework.errors import StorageError
from framework.imports.kind_of_file import parse_deepspeed_json
from framework.system.files import refuse_foreign, replace_text

_MOST_EDITS: Final = 100
_SECTION: Final = "deepspeed"


def fix_file(file: str, *, release: str | None = None) -> str:
    """Fix in place what has one safe answer; returns the change as a unified diff, empty if there
    is none. Hjson stays as it is: what is returned are the lines to change in it.

    Raises:
        ConfigError: the file cannot be read.
        StorageError: the file cannot be written; it is then as it was.
    """
    path = Path(file)
    before = read_text(path, name=file)
    document = parse_deepspeed_json(before, path, name=file)
    if document:
        by_hand = lines_to_change(document, release=release)
        if by_hand:
            return "\n".join(by_hand)
        after = fixed_text(document, release=release)
    else:
        after = fixed_run_config(before, path, name=file)
        after = _fixed_passed_keys(after, path, name=file, release=release)
    if after == before:
        return ""
    write_file(path, after, name=file)
    return unified_diff(before, after, file)


def _fixed_passed_keys(text: str, path: Path, *, name: str, release: str | None) -> str:
    """Fix the keys under `deepspeed:` as in DeepSpeed JSON, unless a typed section decides the
    result.
    """
    for _ in range(_MOST_EDITS):
        after = _with_one_fix(document_of(text, path, name=name), release=release)
        if after is None:
            break
        text = after
    return text


def _with_one_fix(document: Document, *, release: str | None) -> str | None:
    """Return the text with the first fix that can be made, or None without one."""
    if not isinstance(document.value, dict):
        return None
    section = document.value.get(_SECTION)
    if not isinstance(section, dict):
        return None
    edits = map(_in_run_config, safe_edits(Document("", section), release=release))
    texts = (edited(document, [edit]) for edit in edits if edit is not None)
    return next((text for text in texts if text is not None), None)


def _in_run_config(edit: Edit) -> Edit | None:
    """Return an edit of the section as one of the run config, or None if it would set what a typed
    section sets.
    """
    if isinstance(edit, RenameKey):
        after = ".".join(map(str, (*edit.path[:-1], edit.name)))
        if after in TYPED or (after in OWNED and after not in SHARED):
            return None
    elif not isinstance(edit, ReplaceValue):
        return None
    return replace(edit, path=(_SECTION, *edit.path))


def _mode_of(path: Path, name: str) -> int | None:
    """Return the permissions of a file, None if there is none; StorageError for what is no file."""
    if not path.exists():
        return None
    if not path.is_file():
        raise StorageError(f"{name}: it is no file to write to; name one [file-not-written]")
    return path.stat().st_mode & 0o7777


def write_file(path: Path, text: str, *, name: str, marks: Sequence[bytes] = ()) -> None:
    """Replace or create a file.

    Args:
        path: of the file.
        text: its contents.
        name: of the file in messages.
        marks: a present file without any of these is not replaced.

    Raises:
        StorageError: the file cannot be written, or has no mark; it is as it was.
    """
    try:
        if marks:
            refuse_foreign(path, marks=marks)
        real = path.resolve()
        replace_text(real, text, mode=_mode_of(real, name))
    # RuntimeError: a loop of links, in Python 3.12 and older
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{name}: cannot be written ({reason}) [file-not-written]") from error
