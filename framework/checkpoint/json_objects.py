"""JSON objects beside weights and in the header of safetensors files, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_LONGEST_HEADER: Final = 100_000_000  # the format's


def read_object(file: Path, *, is_header: bool = False) -> dict[str, Any] | None:
    """Read the JSON object in a file, or in its header: after the length at its beginning. None
    if it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            size = -1
            if is_header:
                size = int.from_bytes(stream.read(8), "little")
            if size >= _LONGEST_HEADER:
                return None
            content = json.loads(stream.read(size))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
