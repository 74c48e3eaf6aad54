"""Files are replaced completely or not at all.

A symbolic link stays a link: the file that it leads to is replaced. Permissions stay as well.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from deepspeed_lint.errors import ConfigError


def replace_text(path: Path, text: str, *, name: str) -> None:
    """Replace or create a file; `name` is its name in messages.

    Raises:
        ConfigError: it cannot be written; it is as it was.
    """
    try:
        _replace(path.resolve(), text)
    # RuntimeError: a loop of links, in Python 3.12 and older
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError.of(
            "file-not-written", f"cannot be written ({reason})", "name another file", file=name
        ) from error


def _replace(path: Path, text: str) -> None:
    mode = None
    if path.exists():
        if not path.is_file():
            raise OSError("it is no file to write to")
        mode = path.stat().st_mode & 0o7777
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("x", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            new.chmod(mode)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
