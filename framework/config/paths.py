"""Paths in a run config: ``~`` is the home folder of the user, ``$NAME`` is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator

_VARIABLE: Final = re.compile(r"\$(\{\w+\}|[A-Za-z_]\w*)")


def _with_home(value: Any) -> Any:
    """Replace a leading ``~`` by the home folder; other types are refused by pydantic."""
    if isinstance(value, str) and value.startswith("~"):
        return os.path.expanduser(value)  # noqa: PTH111 - pathlib raises for an unknown user
    return value


_AS_PATH: Final = BeforeValidator(_with_home)
PathText = Annotated[str, _AS_PATH]
"""A path, or a pattern of paths."""
OptionalPath = Annotated[str | None, _AS_PATH]


def unexpanded_paths(section: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of the paths of a config, and of the sections in it, that hold
    what only a shell replaces: ``$NAME``, or ``~`` and the name of an unknown user. `section` may
    be those sections of a config that could be read.
    """
    fields = getattr(type(section), "model_fields", {})
    for name, value in vars(section).items():
        if isinstance(value, BaseModel):
            yield from unexpanded_paths(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from unexpanded_paths(item, f"{prefix}{name}.{number}.")
        elif name in fields and _AS_PATH in fields[name].metadata and _is_unexpanded(value):
            yield f"{prefix}{name}", value


def _is_unexpanded(path: object) -> bool:
    if not isinstance(path, str):
        return False
    return path.startswith("~") or _VARIABLE.search(path) is not None
