"""Reads manifests and remembers the line of everything in them, so that a finding can say where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from framework.errors import MISSING, ConfigError, Problem, Severity
from framework.text.read_text import read_text

KeyPath = tuple[str | int, ...]
# More than any job has; aliases of aliases would make billions.
_MOST_NODES: Final = 50_000


@dataclass(frozen=True)
class Manifest:
    """One object of a file: its value, and the line of each path in it."""

    value: Mapping[str, Any]
    file: str
    lines: Mapping[KeyPath, int]

    @property
    def kind(self) -> str:
        """As written; empty if it is not text."""
        kind = self.value.get("kind")
        return kind if isinstance(kind, str) else ""

    @property
    def name(self) -> str:
        """``metadata.name``; empty if there is none."""
        name = Part(self).get("metadata", "name")
        return name if isinstance(name, str) else ""


@dataclass(frozen=True)
class Part:
    """A place in a manifest. Reading is tolerant: what is not there, or of another type, is nothing."""

    manifest: Manifest
    path: KeyPath = ()

    def get(self, *keys: str | int) -> Any:
        """The value below; None if there is none."""
        value: Any = self.manifest.value
        for key in (*self.path, *keys):
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
                value = value[key]
            else:
                return None
        return value

    def at(self, *keys: str | int) -> Part:
        """The place below."""
        return Part(self.manifest, (*self.path, *keys))

    def mapping(self, *keys: str | int) -> Mapping[str, Any]:
        """The mapping below; an empty one if there is none."""
        value = self.get(*keys)
        return value if isinstance(value, Mapping) else {}

    def items(self, *keys: str | int) -> list[Part]:
        """The mappings in the list below."""
        value = self.get(*keys)
        values = value if isinstance(value, list) else []
        return [self.at(*keys, index) for index, item in enumerate(values) if isinstance(item, Mapping)]

    def words(self, *keys: str | int) -> list[str]:
        """The text of the list below."""
        value = self.get(*keys)
        return [str(item) for item in value] if isinstance(value, list) else []

    def problem(self, kind: str, *keys: str | int, reason: str, fix: str, severity: Severity = "error") -> Problem:
        """Something wrong with the value below, at its line or at the one of what should hold it."""
        path = (*self.path, *keys)
        line = next(
            (self.manifest.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.manifest.lines),
            0,
        )
        where = f"{self.manifest.kind}/{self.manifest.name} {_dotted(path)}".strip()
        value = self.get(*keys)
        return Problem(
            kind=f"k8s-{kind}",
            file=self.manifest.file,
            line=line,
            key=where,
            value=MISSING if value is None else value,
            reason=reason,
            fix=fix,
            severity=severity,
        )


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def read_manifests(files: Iterable[str]) -> list[Manifest]:
    """All objects of these files, those of a List one by one.

    Raises:
        ConfigError: a file cannot be read, or is not YAML.
    """
    return [found for file in files for found in parse_manifests(read_text(Path(file), name=file), name=file)]


def parse_manifests(text: str, *, name: str) -> list[Manifest]:
    """All objects of a text; `name` is the file to name in problems.

    Raises:
        ConfigError: it is not YAML, a key stands twice, or it holds something other than objects.
    """
    found: list[Manifest] = []
    try:
        roots: Iterator[yaml.Node | None] = yaml.compose_all(text, Loader=yaml.SafeLoader)
        for root in roots:
            if root is None:  # nothing between two separators
                continue
            lines = dict(_lines(root, name))
            value = yaml.constructor.SafeConstructor().construct_document(root)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise _refusal(name, root.start_mark.line + 1, "an object is a mapping with apiVersion and kind")
            found += _unlisted(Manifest(value, name, lines))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 0
        raise _refusal(name, line, f"it is not YAML: {getattr(error, 'problem', None) or 'unreadable'}") from None
    except (RecursionError, ValueError):  # too deep for the parser; a date such as 2020-13-45
        raise _refusal(name, 0, "it is not YAML that a manifest would hold") from None
    return found


def _unlisted(manifest: Manifest) -> Iterator[Manifest]:
    if manifest.kind != "List":
        yield manifest
        return
    for item in Part(manifest).items("items"):
        depth = len(item.path)
        lines = {path[depth:]: line for path, line in manifest.lines.items() if path[:depth] == item.path}
        yield Manifest(item.mapping(), manifest.file, lines)


def _lines(root: yaml.Node, name: str) -> Iterator[tuple[KeyPath, int]]:
    """Path and line of everything, without recursion; a key that stands twice is refused, for only one of them would
    count.
    """
    waiting: list[tuple[KeyPath, yaml.Node]] = [((), root)]
    count = 0
    while waiting:
        path, node = waiting.pop()
        count += 1
        if count > _MOST_NODES:
            raise _refusal(name, node.start_mark.line + 1, f"it has more than {_MOST_NODES} values")
        if not path:
            yield path, node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                yield (*path, index), child.start_mark.line + 1
                waiting.append(((*path, index), child))
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, child in node.value:
                if str(key.value) in seen:
                    raise _refusal(
                        name, key.start_mark.line + 1, f"the key {key.value} stands twice", kind="duplicate-key"
                    )
                seen.add(str(key.value))
                yield (*path, key.value), key.start_mark.line + 1
                waiting.append(((*path, key.value), child))


def _refusal(name: str, line: int, reason: str, *, kind: str = "not-yaml") -> ConfigError:
    fix = "keep one of them" if kind == "duplicate-key" else "compare with what `launch k8s` prints"
    return ConfigError(Problem(kind=f"k8s-{kind}", file=name, line=line, reason=reason, fix=fix))
