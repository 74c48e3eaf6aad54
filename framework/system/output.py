"""Output to a stream that may be closed or full: a closed terminal, a dead ssh, a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

from deepspeed_lint.errors import masked as masked
from deepspeed_lint.errors import painted_for
from deepspeed_lint.errors import visible as visible


def write(stream: TextIO | None, text: str) -> None:
    """Write at once; a stream that is closed or full is left, without an error.

    Args:
        stream: such as `sys.stderr`; None where the process was started without.
        text: with its line ends; its other control characters become visible.
    """
    if stream is None:
        return
    try:
        stream.write(painted_for(stream, visible(text)))
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
