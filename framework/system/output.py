"""Output to a stream that may be closed or full: a closed terminal, a dead ssh, a full disk."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any, Final, TextIO

_KEYS: Final = r"(^|_)(api|access|private|secret|auth)_?(key|token)"
_PASSWORDS: Final = r"(^|_)(secret|password|passwd|passphrase|credentials?)"
_TOKENS: Final = r"^(hf_|hub_|push_to_hub_)?token"
_SECRET: Final = re.compile(f"({_KEYS}|{_PASSWORDS}|{_TOKENS})$", re.IGNORECASE)


def masked(key: object, value: Any) -> Any:
    """Return the value of a key such as ``comet.api_key`` for a log, and asterisks for a secret."""
    if value and _SECRET.search(str(key).rpartition(".")[2]):
        return "***"
    return value


def visible(text: str, *, keeps: str = "\n\t") -> str:
    """Return a text of unknown origin with escapes such as ``\\x1b`` for unprintable characters.

    These could control a terminal or a page: control characters, marks that change the direction of
    reading, separators of lines, and bytes that are not text. The characters of `keeps` stay.
    """
    if text.isascii() and text.isprintable():
        return text
    characters = []
    for character in text:
        if character.isprintable() or character in keeps:
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(characters)


def write(stream: TextIO | None, text: str) -> None:
    """Write at once; a stream that is closed or full is left, without an error.

    Args:
        stream: such as `sys.stderr`; None where the process was started without.
        text: with its line ends; its other control characters become visible.
    """
    if stream is None:
        return
    try:
        stream.write(visible(text))
        stream.flush()
    except OSError:
        leave(stream)


def leave(stream: TextIO) -> None:
    """Discard the content of a stream's buffer, and all that is written to it later.

    Otherwise the next write, or the flush at exit, would be an error again.
    """
    with suppress(OSError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
