"""Imports and calls what a config names: ``package.module:name`` with keyword arguments.

Everything that can go wrong in the user's module becomes one problem that names the key, the reason and the line of
code.
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
from framework.errors import ConfigError, FrameworkError, Problem
from framework.text.typos import nearest


def load_target(path: str, *, key: str) -> Any:
    """Import ``package.module:name``; the current folder is searched as well.

    Raises:
        ConfigError: the module is not there or fails while it is imported, or has no such name.
    """

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError(Problem(kind=kind, key=key, value=path, reason=reason, fix=fix))

    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            fix = f"check the spelling, or start where {module_name.split('.')[0]} can be imported"
            raise refuse("target-not-found", f"there is no module {error.name}", fix) from error
        if error.name:
            fix = f"install {error.name}, or check its spelling"
            raise refuse("target-import-failed", f"importing it needs {error.name}{_place(error)}", fix) from error
        raise refuse("target-import-failed", f"importing it failed: {summary(error)}", "mend the module") from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` exits, perhaps with code 0
        raise refuse("target-import-failed", f"importing it failed: {summary(error)}", "mend the module") from error
    walked = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            guess = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            raise refuse(
                "target-not-found",
                f"{walked} has no {part}",
                f"did you mean '{guess}'?" if guess else "check the spelling",
            ) from error
        except Exception as error:  # modules that import on first use
            raise refuse(
                "target-import-failed", f"reading {part} failed: {summary(error)}", "mend the module"
            ) from error
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
    return ConfigError(
        Problem(
            kind="target-failed",
            key=f"{key}.target",
            value=path,
            reason=f"calling it failed: {summary(error)}",
            fix=f"check {key}.args and the code",
        )
    )


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
        raise ConfigError(
            Problem(
                kind="target-not-callable",
                key=f"{key}.target",
                value=f"a {type(function).__name__}",
                reason="it cannot be called",
                fix="name a class or a function",
            )
        )
    try:
        # A decorator may supply arguments that the function beneath it asks for: what is called counts.
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return
    try:
        signature.bind(*[None] * positional, **kwargs)
    except TypeError as error:
        raise ConfigError(
            Problem(
                kind="target-args",
                key=f"{key}.args",
                value=dict(kwargs),
                reason=str(error),
                fix=f"it takes {signature}",
            )
        ) from error


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
        raise ConfigError(
            Problem(
                kind="object-args",
                key=key,
                value=name,
                fix=fix,
                reason=f"it will be called as {name}{call}: {error.problems[0].reason}",
            )
        ) from error


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
