"""Writing to a stream whose reader may have left: a terminal that was closed, an ssh that died, a
full disk.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any, Final, TextIO

_SECRET: Final = re.compile(
    r"((^|_)(api|access|private|secret|auth)_?(key|token)|(^|_)(secret|password|passwd|passphrase|credentials?)"
    r"|^(hf_|hub_|push_to_hub_)?token)$",
    re.IGNORECASE,
)


def masked(key: object, value: Any) -> Any:
    """The value of a key such as ``comet.api_key``, for a log: of a secret nothing but that there
    is one.
    """
    if value and _SECRET.search(str(key).rpartition(".")[2]):
        return "***"
    return value


def visible(text: str, *, keeps: str = "\n\t") -> str:
    """A text of unknown origin, with escapes such as ``\\x1b`` for what would steer a terminal or a
    page: control characters, marks that turn the direction of reading, separators of lines, and
    bytes that are no text. `keeps` stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keeps else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def write(stream: TextIO | None, text: str) -> None:
    """Write at once. That nobody reads any more is no reason to end, or to end differently.

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
    """Let what the stream holds, and whatever comes, go nowhere; else it is an error again, at exit
    at the latest.
    """
    with suppress(OSError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
