"""Reads the text of a config, whatever stands at its path: never more than a megabyte, and never longer than a few
seconds.

A path may lead to a pipe that nobody writes to, to a device without an end, or to a folder. A pipe is read, because
shells hand over the output of a command as one (``check <(envsubst < x.json)``), but nobody waits for one that stays
silent.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path
from typing import Final

from framework.errors import ConfigError, Problem

MAX_BYTES: Final = 1_000_000
PIPE_SECONDS: Final = 10.0
WRITER_SECONDS: Final = 0.5


def read_text(path: Path, *, name: str) -> str:
    """The text of a config file, character for character: a byte order mark and carriage returns are in it.

    Raises:
        ConfigError: it is not there, not text, too large, or nothing that can be read to an end.
    """

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError(Problem(kind=kind, file=name, reason=reason, fix=fix))

    try:
        data = _read(path, name)
    except FileNotFoundError:
        if path.is_symlink():
            reason = "it is a link to a file that is not there"
            raise refuse("config-not-found", reason, "mend the link") from None
        raise refuse("config-not-found", "there is no such file", "check the path") from None
    except IsADirectoryError:
        raise refuse("config-unreadable", "this is a folder", "name a .yaml or .json file in it") from None
    except OSError as error:
        raise refuse("config-unreadable", f"cannot be read ({error.strerror})", "check the file") from None
    except ValueError:  # Python refuses such a path before the system sees it
        raise refuse("config-not-found", "a path holds no zero byte", "check the path") from None
    if len(data) > MAX_BYTES:
        raise refuse("config-too-large", f"more than {MAX_BYTES:,} bytes", "a run config is a few kilobytes of text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("config-not-text", f"byte {error.start} is not UTF-8 text", "save the file as UTF-8") from None
    if "\0" in text:
        raise refuse("config-not-text", "it holds zero bytes", "name a text file")
    return text


def _read(path: Path, name: str) -> bytes:
    """At most one byte more than is allowed."""
    kind = path.stat().st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):  # not even opened: some devices act on that
        reason = "it is a device or a socket, and no file"
        raise ConfigError(Problem(kind="config-unreadable", file=name, reason=reason, fix="name a .yaml or .json file"))
    # Without O_NONBLOCK, opening a pipe waits for its writer, perhaps for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return _read_pipe(descriptor, name)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def _read_pipe(descriptor: int, name: str) -> bytes:
    """All that comes; a writer may open a named pipe a moment after its reader."""
    data, begin = b"", time.monotonic()
    while len(data) <= MAX_BYTES:
        waited = time.monotonic() - begin
        try:
            part = os.read(descriptor, MAX_BYTES + 1 - len(data))
        except BlockingIOError:  # there is a writer, and nothing from it yet
            if waited > PIPE_SECONDS:
                raise _silent(name, f"a pipe that did not end within {PIPE_SECONDS:g} s") from None
            select.select([descriptor], [], [], PIPE_SECONDS - waited)
            continue
        data += part
        if not part and data:
            return data
        if not part and waited > WRITER_SECONDS:
            raise _silent(name, "a pipe that nobody writes to")
        if not part:
            time.sleep(0.02)
        elif waited > PIPE_SECONDS:
            raise _silent(name, f"a pipe that did not end within {PIPE_SECONDS:g} s")
    return data


def _silent(name: str, reason: str) -> ConfigError:
    return ConfigError(Problem(kind="config-unreadable", file=name, reason=reason, fix="write the text to a file"))
