"""Writing to a stream whose reader may have left: a terminal that was closed, an ssh connection that died, a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def write(stream: TextIO | None, text: str) -> None:
    """Write at once. That nobody reads any more is no reason to end, or to end differently.

    Args:
        stream: such as `sys.stderr`; None where the process was started without.
        text: with its line ends.
    """
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        leave(stream)


def leave(stream: TextIO) -> None:
    """Let what the stream still holds, and whatever comes, go nowhere; else it would be an error again, at the latest at exit."""
    with suppress(OSError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
