"""Imports and calls what a config names: ``package.module:name`` with keyword arguments.

Whatever goes wrong in the user's module becomes one problem that names the key, the reason and the line of code.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from framework.config.base import Factory
from framework.errors import ConfigError, FrameworkError
from framework.text.typos import nearest


def load_target(path: str, *, key: str) -> Any:
    """Import ``package.module:name``; the current folder is searched as well.

    Raises:
        ConfigError: the module is not there or fails while it is imported, or has no such name.
    """

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError.of(kind, reason, fix, key, path)

    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` exits, perhaps with code 0
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not missing:
            raise refuse("target-import-failed", f"importing it failed: {summary(error)}", "mend the module") from error
        if module_name == missing or module_name.startswith(f"{missing}."):
            fix = f"check the spelling, or start where {module_name.split('.')[0]} can be imported"
            raise refuse("target-not-found", f"there is no module {missing}", fix) from error
        fix = f"install {missing}, or check its spelling"
        raise refuse("target-import-failed", f"importing it needs {missing}{_place(error)}", fix) from error
    walked = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            guess = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            fix = f"did you mean '{guess}'?" if guess else "check the spelling"
            raise refuse("target-not-found", f"{walked} has no {part}", fix) from error
        except Exception as error:  # modules that import on first use
            reason = f"reading {part} failed: {summary(error)}"
            raise refuse("target-import-failed", reason, "mend the module") from error
        walked = f"{walked}.{part}"
    return found


def call_factory(factory: Factory, *, key: str) -> Any:
    """Import and call.

    Raises:
        ConfigError: it cannot be imported, does not take these arguments, or fails.
    """
    function = load_target(factory.path, key=f"{key}.target")
    check_arguments(function, factory.kwargs, key=key)
    try:
        return function(**factory.kwargs)
    except FrameworkError:
        raise
    except (Exception, SystemExit) as error:
        raise call_failed(error, factory.path, key=key) from error


def call_failed(error: BaseException, path: str, *, key: str) -> ConfigError:
    """The problem of a target that was called and raised."""
    reason, fix = f"calling it failed: {summary(error)}", f"check {key}.args and the code"
    return ConfigError.of("target-failed", reason, fix, f"{key}.target", path)


def takes(function: Any, kwargs: Mapping[str, Any], *, positional: int = 0) -> bool:
    """Check whether it can be called with these keyword arguments after `positional` others; True where nobody can
    tell.
    """
    try:
        check_arguments(function, kwargs, key="", positional=positional)
    except ConfigError:
        return False
    return True


def check_arguments(function: Any, kwargs: Mapping[str, Any], *, key: str, positional: int = 0) -> None:
    """Refuse something that cannot be called with these keyword arguments (after `positional` others)."""
    if not callable(function):
        value, fix = f"a {type(function).__name__}", "name a class or a function"
        raise ConfigError.of("target-not-callable", "it cannot be called", fix, f"{key}.target", value)
    try:
        # A decorator may supply arguments that the function beneath it asks for: what is called counts.
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return
    try:
        signature.bind(*[None] * positional, **kwargs)
    except TypeError as error:
        raise ConfigError.of("target-args", str(error), f"it takes {signature}", f"{key}.args", dict(kwargs)) from error


def check_handed_over(function: Any, *, key: str, call: str, fix: str, num_values: int = 0) -> None:
    """Refuse an object from Python that cannot be called with so many values and nothing else.

    Args:
        function: a callable.
        key: the argument that it was handed over as.
        call: the call as it will be, such as ``(outputs, targets)``.
        fix: what to hand over instead.
        num_values: how many values the call has.
    """
    try:
        check_arguments(function, {}, key=key, positional=num_values)
    except ConfigError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        reason = f"it will be called as {name}{call}: {error.problems[0].reason}"
        raise ConfigError.of("object-args", reason, fix, key, name) from error


def summary(error: BaseException) -> str:
    """An exception in one line, with the innermost place in the code."""
    stated = error.msg if isinstance(error, SyntaxError) and error.filename else str(error)
    text = " ".join(stated.split())[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''}{_place(error)}"


def _place(error: BaseException) -> str:
    """Format the place where an error was raised, as `` (file:line)``; frames of the import machinery are left out."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
