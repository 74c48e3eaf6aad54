"""Documents: plain values with the place and the extent of every key, read from YAML or JSON within
fixed bounds.

PyYAML composes the node tree (no Python objects are ever constructed from tags) and we build the
values ourselves, because its loaders drop line numbers and duplicate keys, read `1e-3` as a string,
and expand nested aliases without bound. `deepspeed_lint.text.hjson` reads DeepSpeed's own files.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

import yaml

from deepspeed_lint.errors import ConfigError, Problem

MAX_BYTES: Final = 1_000_000
MAX_VALUES: Final = 50_000
MAX_DEPTH: Final = 50
MAX_DUPLICATES: Final = 100
PIPE_SECONDS: Final = 10.0
WRITER_SECONDS: Final = 0.5
COMMAND_LINE: Final = "command line"
YAML_ENDINGS: Final = (".yaml", ".yml")
BYTE_ORDER_MARK: Final = "\ufeff"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9_]*)\Z")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?\Z")
_MAX_DIGITS: Final = 30
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_COMMA: Final = re.compile(r"(?:\s|#[^\r\n]*)*,")
_SPECIAL: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf"), float("inf")),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}

KeyPath = tuple[str | int, ...]
Syntax = Literal["yaml", "json", "hjson"]


class Span(NamedTuple):
    """The extent of one member in the text, in characters: ``text[start:end]``.

    Attributes:
        key: the key as it is written, with its quotes; None for an element of a list and for the
            whole document.
        value: the value as it is written, without the blanks around it.
        comma: offset of the comma that follows; None if no comma does.
    """

    key: tuple[int, int] | None
    value: tuple[int, int]
    comma: int | None = None

    @property
    def start(self) -> int:
        """Offset of its key, or of its value if it has none."""
        if self.key is None:
            return self.value[0]
        return self.key[0]


@dataclass
class Document:
    """Plain values, and where each of them stands.

    Attributes:
        name: file name as the user gave it.
        value: nested dicts, lists and scalars.
        places: path of a key -> (line, column), both 1-based; the path of a value is the path of
            its key.
        texts: path of a number or truth value -> how it is written; not for Hjson.
        text: what was read, character for character.
        spans: path -> extent in the text; ``()`` is the whole document, to the end of the text
            where it has no braces. YAML: only members of sections, and none of what an alias stands
            for.
        syntax: what the text was read as.
    """

    name: str
    value: Any = None
    places: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)
    text: str = ""
    spans: dict[KeyPath, Span] = field(default_factory=dict)
    syntax: Syntax = "yaml"

    @property
    def is_empty(self) -> bool:
        """Check whether nothing was written but comments."""
        return self.value is None and not self.places


def at(value: Any, path: Sequence[str | int]) -> Any:
    """Return the value at a path that is there, in plain values."""
    for part in path:
        value = value[part]
    return value


def is_setting(word: str) -> bool:
    """Check whether a word of a command line is meant as ``key=value`` (a path such as
    ``sweeps/lr=3.yaml`` is not).
    """
    return "=" in word and "/" not in word.partition("=")[0]


def read_text(path: Path, *, name: str) -> str:
    """Read the text of a config file, character for character: a byte order mark and carriage
    returns are in it.

    Of any file at most a megabyte is read, for a few seconds. A pipe is read, because shells hand
    over the output of a command as one (``check <(envsubst < x.json)``).

    Raises:
        ConfigError: it is not there, not text, too large, or nothing that can be read to an end.
    """

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError.of(kind, reason, fix, file=name)

    try:
        data = _read_bytes(path, refuse)
    except FileNotFoundError:
        if path.is_symlink():
            raise refuse(
                "config-not-found", "it is a link to a file that is not there", "repair the link"
            ) from None
        raise refuse("config-not-found", "there is no such file", "check the path") from None
    except OSError as error:
        raise refuse(
            "config-unreadable", f"cannot be read ({error.strerror})", "check the file"
        ) from None
    except ValueError:  # Python refuses such a path before the system sees it
        raise refuse("config-not-found", "a path holds no zero byte", "check the path") from None
    return _decoded(data, refuse)


def _decoded(data: bytes, refuse: Callable[[str, str, str], ConfigError]) -> str:
    if len(data) > MAX_BYTES:
        raise refuse(
            "config-too-large",
            f"more than {MAX_BYTES:,} bytes",
            "a config is a few kilobytes of text",
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(
            "config-not-text", f"byte {error.start} is not UTF-8 text", "save the file as UTF-8"
        ) from None
    if "\0" in text:
        raise refuse("config-not-text", "it holds zero bytes", "name a text file")
    return text


def _read_bytes(path: Path, refuse: Callable[[str, str, str], ConfigError]) -> bytes:
    """Read a file or a pipe, one byte more than is allowed at most."""
    mode = path.stat().st_mode
    # Nothing else is even opened: some devices act on that.
    if stat.S_ISDIR(mode):
        reason = "this is a folder"
        raise refuse("config-unreadable", reason, "name a .yaml or .json file in it")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        reason = "it is a device or a socket, and no file"
        raise refuse("config-unreadable", reason, "name a .yaml or .json file")
    # Without O_NONBLOCK, opening a pipe waits for its writer, perhaps for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if stat.S_ISFIFO(mode):
            return _read_pipe(stream.fileno(), refuse)
        return stream.read(MAX_BYTES + 1)


def _read_pipe(descriptor: int, refuse: Callable[[str, str, str], ConfigError]) -> bytes:
    """Read a pipe to its end; a writer may open a named pipe a moment after its reader."""
    data = b""
    begin = time.monotonic()
    fix = "write the text to a file"
    while len(data) <= MAX_BYTES:
        waited = time.monotonic() - begin
        part = _read_part(descriptor, MAX_BYTES + 1 - len(data))
        if part == b"" and data:
            break
        if part == b"" and waited > WRITER_SECONDS:
            raise refuse("config-unreadable", "a pipe that no program writes to", fix)
        if waited > PIPE_SECONDS:
            raise refuse(
                "config-unreadable", f"a pipe that did not end within {PIPE_SECONDS:g} s", fix
            )
        if part:
            data += part
        else:
            time.sleep(0.005)
    return data


def _read_part(descriptor: int, most: int) -> bytes | None:
    """Return what a pipe holds; None if it has a writer that has written nothing yet."""
    try:
        return os.read(descriptor, most)
    except BlockingIOError:
        return None


def read_document(path: Path, *, name: str) -> Document:
    """Read a config file; errors as in `read_text` and `parse_document`."""
    return document_of(read_text(path, name=name), path, name=name)


def document_of(text: str, path: Path, *, name: str) -> Document:
    """Parse a text that was read from a path, as JSON if the path ends so, else as YAML."""
    return parse_document(text, name=name, is_json=path.suffix == ".json")


def parse_document(text: str, *, name: str, is_json: bool = False) -> Document:
    """Parse YAML (or JSON) text.

    Raises:
        ConfigError: it is neither, or too large; the problem names line and column.
    """
    return _NodeReader(name, text, "json" if is_json else "yaml").read()


def parse_scalar(text: str, *, name: str = "") -> Any:
    """Return the value of one ``key=value`` override: any YAML value on one line."""
    return parse_document(text, name=name).value


class Builder:
    """A document while it is read, and what is wrong with it."""

    too_many = f"more than {MAX_VALUES:,} values"

    def __init__(self, name: str, text: str, syntax: Syntax) -> None:
        self.document = Document(name, text=text, syntax=syntax)
        self.problems: list[Problem] = []
        self.num_values = 0

    def problem(self, kind: str, place: tuple[int, int], reason: str, fix: str) -> Problem:
        """Build a problem of this document."""
        return Problem(kind, reason, fix, file=self.document.name, line=place[0], column=place[1])

    def stop(self, kind: str, place: tuple[int, int], reason: str, fix: str) -> NoReturn:
        """Raise the problems so far, and this one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError([*self.problems, self.problem(kind, place, reason, fix)])

    def count(self, depth: int, place: tuple[int, int]) -> None:
        """Count one more value, and stop beyond the bounds of size and depth."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self.stop("config-too-large", place, self.too_many, "make it smaller")
        if depth > MAX_DEPTH:
            self.stop(
                "config-too-deep", place, f"nested more than {MAX_DEPTH} levels", "flatten it"
            )

    def add_duplicate(self, path: KeyPath, place: tuple[int, int]) -> None:
        """Add the problem of a key that is there already."""
        reason = f"the key is already set in line {self.document.places[path][0]}"
        problem = self.problem("duplicate-key", place, reason, "keep one of the two")
        self.problems.append(replace(problem, key=".".join(map(str, path))))
        if len(self.problems) >= MAX_DUPLICATES:
            raise ConfigError(self.problems)


class _NodeReader(Builder):
    """Reads YAML, and finds the places in JSON."""

    too_many = f"{Builder.too_many} (nested aliases?)"

    def read(self) -> Document:
        """Return the document; raises ConfigError with all problems."""
        document = self.document
        text = document.text.removeprefix(BYTE_ORDER_MARK)
        self.offset = len(document.text) - len(text)
        is_json = document.syntax == "json"
        json_value = None
        if is_json:
            json_value = self._json_value(text)
            # What PyYAML reads with the same places: no tabs, no halves of UTF-16 pairs.
            text = _SURROGATE.sub(r"\\u003f", text.replace("\t", " "))
        try:
            self._check_bounds(text)
            root = yaml.compose(text, Loader=_LOADER)
        except yaml.YAMLError as error:
            from deepspeed_lint.text.syntax_errors import describe_syntax_error

            place, reason, fix = describe_syntax_error(error, text, is_json=is_json)
            self.stop("config-syntax", place, reason, fix)
        if root is not None:
            document.places[()] = _place(root.start_mark)
            document.spans[()] = Span(None, self._extent(root))
            document.value = self._value(root, ())
            if self.problems:
                raise ConfigError(self.problems)
        if is_json:
            document.value = json_value
        return document

    def _json_value(self, text: str) -> Any:
        """Parse the values as JSON: escapes such as \\ud83d\\ude00 differ in YAML, which finds the
        places.
        """
        if not text.strip():
            self.stop("config-syntax", (0, 0), "the file is empty", "write at least {}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            fix = (
                "check commas, quotes and brackets; comments and trailing commas need a .yaml file"
            )
            self.stop(
                "config-syntax", (error.lineno, error.colno), f"not valid JSON: {error.msg}", fix
            )
        except RecursionError:
            self.stop(
                "config-too-deep", (0, 0), f"nested more than {MAX_DEPTH} levels", "flatten it"
            )
        except ValueError:  # Python reads no integer of more than 4,300 digits
            self.stop(
                "config-syntax", (0, 0), "a number of thousands of digits", "write a smaller one"
            )
        if _SURROGATE.search(text):
            self._check_surrogates(value)
        return value

    def _check_surrogates(self, value: Any) -> None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self.stop(
                "config-syntax",
                (0, 0),
                "half of a UTF-16 pair is no text",
                "write the character itself",
            )

    def _check_bounds(self, text: str) -> None:
        """Check size, depth and tags before composing, which is recursive, in C."""
        depth = 0
        num_nodes = 0
        event: Any  # PyYAML's types allow for events without a place; the parser makes none
        for event in yaml.parse(text, Loader=_LOADER):
            depth += _step_of_depth(event)
            if isinstance(event, yaml.NodeEvent):
                num_nodes += 1
            self.num_values = num_nodes // 2  # a value has at most one key
            self.count(depth, (event.start_mark.line + 1, 0))
            self._refuse_tag(event)
        self.num_values = 0

    def _refuse_tag(self, event: Any) -> None:
        tag = getattr(event, "tag", None)
        if tag:
            reason = f"the tag {tag.replace('tag:yaml.org,2002:', '!!')} is not allowed"
            fix = "write a plain value; text may stand in quotes"
            self.stop("config-syntax", _place(event.start_mark), reason, fix)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count(len(path), (node.start_mark.line + 1, 0))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return self._elements(node, path)
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text: str = node.value
        if node.style in ("'", '"', "|", ">"):
            return text
        if len(text) > _MAX_DIGITS and _INT.match(text):
            reason = f"a number of {len(text)} digits"
            self.stop("wrong-value", _place(node.start_mark), reason, "write a smaller one")
        value = _plain(text)
        if isinstance(value, (bool, int, float)):
            self.document.texts[path] = text
        return value

    def _elements(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        elements = [((*path, index), child) for index, child in enumerate(node.value)]
        for here, child in elements:
            self.document.places[here] = _place(child.start_mark)
        return [self._value(child, here) for here, child in elements]

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _place(key_node.start_mark)
            key = self._key(key_node)
            here = (*path, key)
            if key in values:
                self.add_duplicate(here, place)
                continue
            self.document.places[here] = place
            self._add_span(node, key_node, value_node, here)
            values[key] = self._value(value_node, here)
        return values

    def _key(self, node: yaml.Node) -> str:
        place = _place(node.start_mark)
        if not isinstance(node, yaml.ScalarNode):
            self.stop("config-syntax", place, "a key must be a word", "write key: value")
        if node.value == "<<" and not node.style:  # plain: None or empty, by loader
            reason = "merge keys (<<) are not supported"
            self.stop("config-syntax", place, reason, "write the keys out")
        key: str = node.value
        return key

    def _add_span(
        self, node: yaml.MappingNode, key_node: yaml.Node, value_node: yaml.Node, path: KeyPath
    ) -> None:
        """Note the extents of a member of `node`, but not of what an alias stands for."""
        key_extent = self._extent(key_node)
        value_extent = self._extent(value_node)
        # the value of an alias stands before its key
        if path[:-1] in self.document.spans and value_extent >= key_extent:
            comma = self._comma_after(value_extent[1]) if node.flow_style else None
            self.document.spans[path] = Span(key_extent, value_extent, comma)

    def _comma_after(self, end: int) -> int | None:
        match = _COMMA.match(self.document.text, end)
        if match is None:
            return None
        return match.end() - 1

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        return node.start_mark.index + self.offset, node.end_mark.index + self.offset


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _step_of_depth(event: yaml.Event) -> int:
    if isinstance(event, yaml.CollectionStartEvent):
        return 1
    if isinstance(event, yaml.CollectionEndEvent):
        return -1
    return 0


def _plain(text: str) -> Any:
    """Return the value of an unquoted scalar: null, a boolean, a number as YAML 1.2 and JSON read
    it, or a string.
    """
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text
