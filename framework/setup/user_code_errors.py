"""Errors of the user's own code, each in one line with the place in that code."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from typing import Final

from framework.errors import ConfigError

# Calls the user's code, so that its frames are in every traceback.
_CALLER: Final = str(Path(__file__).with_name("user_code.py"))


def import_failed(error: BaseException, module_name: str, path: str, *, key: str) -> ConfigError:
    """Return the problem of a target with a module that was not imported."""
    missing = None
    if isinstance(error, ModuleNotFoundError):
        missing = error.name
    if not missing:
        reason = f"importing it failed: {summary(error)}"
        return ConfigError.of("target-import-failed", reason, "correct the module", key, path)
    if module_name == missing or module_name.startswith(f"{missing}."):
        reason = f"there is no module {missing}"
        fix = f"check the spelling, or start where {module_name.split('.')[0]} can be imported"
        return ConfigError.of("target-not-found", reason, fix, key, path)
    reason = f"importing it needs {missing}{_place(error)}"
    fix = f"install {missing}, or check its spelling"
    return ConfigError.of("target-import-failed", reason, fix, key, path)


def call_failed(error: BaseException, path: str, *, key: str) -> ConfigError:
    """Return the problem of a target that raised when it was called."""
    reason = f"calling it failed: {summary(error)}"
    fix = f"check {key}.args and the code"
    return ConfigError.of("target-failed", reason, fix, f"{key}.target", path)


def summary(error: BaseException) -> str:
    """Return an exception in one line, with the innermost place in the code."""
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
    else:
        message = str(error)
    text = type(error).__name__
    message = " ".join(message.split())[:300]
    if message:
        text += f": {message}"
    return text + _place(error)


def _place(error: BaseException) -> str:
    """Return the place where an error was raised, as `` (file:line)``; frames of `user_code` and of
    the import machinery do not count.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_import = frame.filename.startswith("<frozen ") or frame.filename == importlib.__file__
        if not is_import and frame.filename != _CALLER:
            return f" ({frame.filename}:{frame.lineno})"
    return ""
