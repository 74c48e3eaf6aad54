"""A dict that remembers what was asked of it: handed to DeepSpeed's own parser, it tells which keys
that parser reads.

A key that is asked for with `.get` shows its default; one asked for with `[]` and missing is
required. What a parser does only for an enabled section is seen only when the probe enables that
section.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

NO_DEFAULT: Final = object()
# Getters that stand between the parser and the dict: the function that calls them is the one that
# reads the key.
_GETTERS: Final = ("get_scalar_param", "get_list_param", "get_dict_param")


@dataclass
class Read:
    """One key that was asked for."""

    path: str
    default: Any = NO_DEFAULT
    source: str = ""


@dataclass
class Log:
    """Everything that was asked of one recorder and of the sections in it, in the order of the
    first question.
    """

    reads: dict[str, Read] = field(default_factory=dict)

    def add(self, path: str, default: Any = NO_DEFAULT) -> None:
        """Note a question; the first source is kept, and the first default that any question
        shows.
        """
        read = self.reads.setdefault(path, Read(path, source=_asker()))
        if read.default is NO_DEFAULT:
            read.default = default


def _asker() -> str:
    """``runtime/config.py:get_gradient_clipping``: the innermost function of DeepSpeed on the
    stack.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        _, inside, file = frame.f_code.co_filename.rpartition("/deepspeed/")
        if (
            inside
            and frame.f_code.co_name not in _GETTERS
            and not frame.f_code.co_name.startswith("<")
        ):
            # Python 3.11
            return f"{file}:{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
        frame = frame.f_back
    return ""


class _Keys(Sequence[Any]):
    """What `.keys()` answers: `name in section.keys()` is a question as well."""

    def __init__(self, owner: Recorder) -> None:
        self._owner, self._names = owner, list(dict.keys(owner))

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)


class Recorder(dict[str, Any]):
    """A config whose reads are logged under dotted paths; sections inside it are recorders too."""

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[Any] = (),
        *,
        path: str = "",
        log: Log | None = None,
    ) -> None:
        self.path, self.log = path, Log() if log is None else log
        dict.__init__(self, values)
        for name, value in list(dict.items(self)):
            if type(value) is dict:
                dict.__setitem__(self, name, Recorder(value, path=self._at(name), log=self.log))

    def _at(self, name: Any) -> str:
        return f"{self.path}.{name}" if self.path else str(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self.log.add(self._at(name), default)
        return dict.get(self, name, default)

    def pop(self, name: Any, *default: Any) -> Any:
        self.log.add(self._at(name), *default)
        return dict.pop(self, name, *default)

    def __getitem__(self, name: Any) -> Any:
        self.log.add(self._at(name))
        return dict.__getitem__(self, name)

    def __contains__(self, name: object) -> bool:
        self.log.add(self._at(name))
        return dict.__contains__(self, name)

    def keys(self) -> Any:
        return _Keys(self)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __copy__(self) -> Recorder:
        return Recorder(dict(dict.items(self)), path=self.path, log=self.log)

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self.__copy__()
