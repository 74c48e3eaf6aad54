"""Where the bytes of a checkpoint's files go while they are written: to disk (`NewFile`), or first to memory
(`StagedFiles`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from framework.system.files import FileRecord


class SaveStream(Protocol):
    """What a file of a checkpoint is written to: the methods that `torch.save` calls, and two ways to end."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append; returns the number of bytes."""
        ...

    def flush(self) -> None:
        """Nothing is held back."""
        ...

    def close(self) -> FileRecord | None:
        """It is complete; what it holds, or None where somebody else finds out."""
        ...

    def abandon(self) -> None:
        """It will not be complete."""
        ...


OpenFile = Callable[[Path], SaveStream]
