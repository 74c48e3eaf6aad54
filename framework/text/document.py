"""Reads YAML or JSON text into plain values together with the place of every key, within fixed bounds.

PyYAML composes the node tree (no Python objects are ever constructed from tags) and we build the values ourselves,
because its loaders drop line numbers and duplicate keys, read `1e-3` as a string, and expand nested aliases without
bound.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from framework.errors import ConfigError, Problem, show_value

# Reads the text of a config, whatever stands at its path: never more than a megabyte, and never longer than a few
# seconds. A path may lead to a pipe that nobody writes to, to a device without an end, or to a folder. A pipe is
# read, because shells hand over the output of a command as one (``check <(envsubst < x.json)``), but nobody waits for
# one that stays silent.


MAX_BYTES: Final = 1_000_000
PIPE_SECONDS: Final = 10.0
WRITER_SECONDS: Final = 0.5


def read_text(path: Path, *, name: str) -> str:
    """The text of a config file, character for character: a byte order mark and carriage returns are in it.

    Raises:
        ConfigError: it is not there, not text, too large, or nothing that can be read to an end.
    """

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError.of(kind=kind, file=name, reason=reason, fix=fix)

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
        raise ConfigError.of(kind="config-unreadable", file=name, reason=reason, fix="name a .yaml or .json file")
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
    return ConfigError.of(kind="config-unreadable", file=name, reason=reason, fix="write the text to a file")


MAX_VALUES: Final = 50_000
MAX_DEPTH: Final = 50

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9_]*)\Z")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?\Z")
_MAX_DIGITS: Final = 30
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SPECIAL: Final[Mapping[str, Any]] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
# What libyaml (or PyYAML) says -> what to do about it; anything else gets the general advice.
_ADVICE: Final[Mapping[str, tuple[str, str]]] = {
    "mapping values are not allowed": ("a colon that no key can have here", "check the indentation, or quote the text"),
    "found another document": ("a second document starts here", "keep one document per file"),
    "cannot start any token": ("this character cannot start a value", "put the text in quotes"),
    "found undefined alias": ("the alias has no anchor", "write the value out, or quote a text that starts with *"),
    "alphabetic or numeric": ("a * or & that starts no alias or anchor", "put the text in quotes"),
}

COMMAND_LINE: Final = "command line"
YAML_ENDINGS: Final = (".yaml", ".yml")

KeyPath = tuple[str | int, ...]


@dataclass
class Document:
    """Plain values, and where each of them stands.

    Attributes:
        name: file name as the user gave it.
        value: nested dicts, lists and scalars.
        places: path of a key -> (line, column), both 1-based; the path of a value is the path of its key.
        texts: path of a number or truth value -> how it is written, where that is not how it would be shown.
    """

    name: str
    value: Any = None
    places: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Check whether nothing was written but comments."""
        return self.value is None and not self.places


def read_document(path: Path, *, name: str) -> Document:
    """Read a config file (at most 1 MB, UTF-8, YAML or JSON).

    Raises:
        ConfigError: it is not there, not text, too large, or not YAML/JSON; the problem names line and column.
    """
    return document_of(read_text(path, name=name), path, name=name)


def document_of(text: str, path: Path, *, name: str) -> Document:
    """The document of a text that was read from a path, whose ending says YAML or JSON."""
    return parse_document(text.removeprefix("\ufeff"), name=name, is_json=path.suffix == ".json")


def parse_document(text: str, *, name: str, is_json: bool = False) -> Document:
    """Parse YAML (or JSON) text."""
    document = Document(name)
    value = _json_value(text, name) if is_json else None
    try:
        node = _compose(_json_as_yaml(text) if is_json else text, name)
    except yaml.YAMLError as error:
        raise ConfigError(_layout_problem(error, name) if is_json else _syntax_problem(error, name, text)) from None
    if node is not None:
        builder = _Builder(document)
        document.value = builder.build(node, ())
        if builder.problems:
            raise ConfigError(builder.problems)
    if is_json:
        document.value = value
    return document


def _compose(text: str, name: str) -> yaml.Node | None:
    """The node tree. A flat walk over the events comes first and stops early: composing is recursive, in C."""
    depth = 0
    event: Any  # PyYAML's types allow for events without a place; the parser makes none
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(too_deep(name, line))
        if number > 4 * MAX_VALUES:
            raise ConfigError(_too_many(name, line))
        tag = getattr(event, "tag", None)
        if tag is not None:
            written = tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError.of(
                kind="config-syntax",
                file=name,
                line=line,
                column=column,
                reason=f"the tag {written} is not allowed",
                fix="write a plain value; text may stand in quotes",
            )
    return yaml.compose(text, Loader=_LOADER)


def compose_text(text: str, *, is_json: bool) -> yaml.Node | None:
    """The node tree of a text that `parse_document` has read, for the places of its keys and values."""
    return yaml.compose(_json_as_yaml(text) if is_json else text, Loader=_LOADER)


def _json_as_yaml(text: str) -> str:
    """JSON text that PyYAML reads with the same places: no tabs, no halves of UTF-16 pairs."""
    return _SURROGATE.sub(r"\\u003f", text.replace("\t", " "))


def is_setting(word: str) -> bool:
    """Check whether a word of a command line is meant as ``key=value`` (a path such as ``sweeps/lr=3.yaml`` is not)."""
    return "=" in word and "/" not in word.partition("=")[0]


def parse_scalar(text: str, *, name: str) -> Any:
    """The value of one ``key=value`` override: any YAML value on one line."""
    return parse_document(text, name=name).value


def _syntax_problem(error: yaml.YAMLError, name: str, text: str) -> Problem:
    mark, began = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    stated = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML")
    reason, fix = next(
        (advice for words, advice in _ADVICE.items() if words in stated),
        (f"not valid YAML: {stated}", "check indentation, colons and quotes"),
    )
    if mark is None:
        return Problem(kind="config-syntax", file=name, reason=reason, fix=fix)
    line = dict(enumerate(text.split("\n"))).get(mark.line, "")
    if "\t" in line[: mark.column + 1]:
        reason, fix = "a tab stands where only spaces may", "indent with spaces"
    elif began is not None and began.line != mark.line:
        reason += f" (in what began in line {began.line + 1})"
    return Problem(kind="config-syntax", file=name, line=mark.line + 1, column=mark.column + 1, reason=reason, fix=fix)


def _layout_problem(error: yaml.YAMLError, name: str) -> Problem:
    """Valid JSON that PyYAML cannot walk, for example a key of more than 1,024 characters."""
    mark = getattr(error, "problem_mark", None)
    return Problem(
        kind="config-syntax",
        file=name,
        line=mark.line + 1 if mark else 0,
        column=mark.column + 1 if mark else 0,
        reason=f"a layout that cannot be read: {getattr(error, 'problem', None) or 'an odd character'}",
        fix="lay it out as `python -m json.tool` does",
    )


def too_deep(name: str, line: int = 0) -> Problem:
    """Build the problem of nesting beyond `MAX_DEPTH`."""
    return Problem(
        kind="config-too-deep", file=name, line=line, reason=f"nested more than {MAX_DEPTH} levels", fix="flatten it"
    )


def _too_many(name: str, line: int) -> Problem:
    return Problem(
        kind="config-too-large",
        file=name,
        line=line,
        reason=f"more than {MAX_VALUES:,} values (nested aliases?)",
        fix="make it smaller",
    )


def _json_value(text: str, name: str) -> Any:
    """YAML finds the places, JSON decides the values: escapes such as \\ud83d\\ude00 differ between the two."""
    problem = Problem(kind="config-syntax", file=name, reason="the file is empty", fix="write at least {}")
    if not text.strip():
        raise ConfigError(problem)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            replace(
                problem,
                line=error.lineno,
                column=error.colno,
                reason=f"not valid JSON: {error.msg}",
                fix="check commas, quotes and brackets; comments and trailing commas need a .yaml file",
            )
        ) from None
    except RecursionError:
        raise ConfigError(too_deep(name)) from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        reason = "a number of thousands of digits"
        raise ConfigError(replace(problem, reason=reason, fix="write a smaller one")) from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                replace(problem, reason="half of a UTF-16 pair is no text", fix="write the character itself")
            ) from None
    return value


class _Builder:
    """Walks a node tree once, counting what it builds."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.num_values = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ConfigError(_too_many(self.document.name, node.start_mark.line + 1))
        if len(path) > MAX_DEPTH:
            raise ConfigError(too_deep(self.document.name, node.start_mark.line + 1))
        if not path:
            self._mark(path, node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._element(child, (*path, index)) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        value = self._scalar(node)
        if isinstance(value, (bool, int, float)) and show_value(value) != node.value:
            self.document.texts[path] = node.value
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._stop("config-syntax", key_node, "a key must be a word", "write key: value")
            key = key_node.value
            if key == "<<" and not key_node.style:  # plain: None or empty, by loader
                self._stop("config-syntax", key_node, "merge keys (<<) are not supported", "write the keys out")
            place = (*path, key)
            if key in values:
                first = self.document.places[place][0]
                self._add(
                    "duplicate-key",
                    key_node,
                    f"the key is already set in line {first}",
                    "keep one of the two",
                    key=".".join(map(str, place)),
                )
                continue
            self._mark(place, key_node)
            values[key] = self.build(value_node, place)
        return values

    def _element(self, node: yaml.Node, path: KeyPath) -> Any:
        self._mark(path, node)
        return self.build(node, path)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.style in ("'", '"', "|", ">"):
            return text
        if len(text) > _MAX_DIGITS and _INT.match(text):
            self._stop("wrong-value", node, f"a number of {len(text)} digits", "write a smaller one")
        return _plain(text)

    def _mark(self, path: KeyPath, node: yaml.Node) -> None:
        self.document.places[path] = (node.start_mark.line + 1, node.start_mark.column + 1)

    def _add(self, kind: str, node: yaml.Node, reason: str, fix: str, *, key: str = "") -> None:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        self.problems.append(
            Problem(kind=kind, file=self.document.name, line=line, column=column, key=key, reason=reason, fix=fix)
        )

    def _stop(self, kind: str, node: yaml.Node, reason: str, fix: str) -> Any:
        self._add(kind, node, reason, fix)
        raise ConfigError(self.problems)


def at(value: Any, path: KeyPath) -> Any:
    """Return the value at a path that is there, in plain values."""
    for part in path:
        value = value[part]
    return value


def _plain(text: str) -> Any:
    """An unquoted scalar: null, a boolean, a number as YAML 1.2 and JSON read it, or a string."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text
