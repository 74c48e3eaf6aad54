"""Documents out of text files and JSON lines, piece by piece, so that memory does not grow with the
input.

*.jsonl, *.ndjson        one JSON object per line; its text field is a document
*.json, *.csv, ...       rows of a table: refused, unless --format is given, for the marks between
                         them would be learnt as text
any other file           one document, or one per paragraph with `blank_lines_split`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Final, Literal

from framework.errors import ConfigError, Problem

# Small enough for many pieces in a batch, which a library tokenizer spreads over the cores.
_CHUNK_BYTES: Final = 1 << 16
# A JSON line or a paragraph is held whole; without an end of lines a file of 100 GB would be one.
LONGEST_LINE_BYTES: Final = 1 << 28
_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
}
_SHOWN_FIELDS: Final = 5
_ROWS: Final = frozenset(
    {".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".orc", ".avro", ".xlsx"}
)
_ROWS_INSIDE: Final = (b"PAR1", b"ARROW1")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
Format = Literal["auto", "text", "jsonl"]


@dataclass(frozen=True)
class TextPiece:
    """A part of a document.

    Attributes:
        text: bytes; with `ReadOptions.utf8`, UTF-8 and whole characters.
        num_bytes: size of the whole document.
        starts: it is the document's first piece.
        ends: it is the document's last piece.
    """

    text: bytes
    num_bytes: int
    starts: bool = True
    ends: bool = True


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading files.

    Attributes:
        utf8: refuse text that is not UTF-8, and cut long documents only where a byte-level BPE
            would cut as well.
        json_field: name of the text in JSON lines.
        blank_lines_split: a blank line ends a document of a plain file.
        form: of all files, regardless of their names; ``auto``: by their names.
    """

    utf8: bool
    json_field: str = "text"
    blank_lines_split: bool = False
    form: Format = "auto"


def is_json_lines(path: str, form: Format = "auto") -> bool:
    """Check whether a file is read as JSON lines."""
    if form == "auto":
        return Path(path).suffix.lower() in (".jsonl", ".ndjson")
    return form == "jsonl"


def files_in_folders(paths: Sequence[str]) -> list[str]:
    """Return the paths with each folder replaced by its ``*.txt`` in the order of their names;
    links are not followed.

    Raises:
        ConfigError: kind ``text-not-a-file``, for each folder without one, and ``text-unreadable``.
    """
    files = []
    problems = []
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 - pathlib raises if the name cannot be one
            files.append(path)
            continue
        texts = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.endswith(".txt") and entry.is_file(follow_symlinks=False):
                        texts.append(entry.path)
        except OSError as error:
            problems.append(_unreadable(path, error))
            continue
        if not texts:
            reason = "it is a folder without a *.txt of its own"
            fix = f"name the files in it, for example {path}/*/*.txt"
            problems.append(Problem("text-not-a-file", reason, fix, file=path))
        files += sorted(texts)
    if problems:
        raise ConfigError(problems)
    return files


def input_size(paths: Sequence[str], form: Format = "auto") -> int:
    """Return the size of all files in bytes.

    Raises:
        ConfigError: every file that is missing, a folder, unreadable or compressed, or rows of a
            table (``text-rows``).
    """
    problems = []
    for path in paths:
        problem = _problem_of(path, form)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return sum(Path(path).stat().st_size for path in paths)


def _problem_of(path: str, form: Format) -> Problem | None:
    """Return why a file cannot be read as text, by its kind, name and first bytes, or None."""
    problem = partial(Problem, file=path)
    try:
        # A path with a NUL byte raises here, and is false in pathlib.
        mode = os.stat(path).st_mode  # noqa: PTH116
        if S_ISDIR(mode):
            return problem(
                "text-not-a-file",
                "it is a folder",
                f"name the files in it, for example {path}/*.txt",
            )
        if not S_ISREG(mode):
            return problem(
                "text-not-a-file",
                "it is no regular file, and it is read twice",
                "write it to a file first",
            )
        with Path(path).open("rb") as stream:
            head = stream.read(8)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return problem("text-not-found", "there is no such file", "name an existing one")
    except OSError as error:
        return _unreadable(path, error)
    if form == "auto" and (Path(path).suffix.lower() in _ROWS or head.startswith(_ROWS_INSIDE)):
        return problem(
            "text-rows",
            "it holds rows of a table, and the marks between them would be learnt as text",
            'write its text as JSON lines, {"text": "..."}; or say --format jsonl for what is JSON '
            "lines already, --format text to take it as it is",
        )
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return problem("text-compressed", f"it is compressed with {name}", "unpack it first")
    return None


def carriage_returns(paths: Sequence[str], form: Format = "auto") -> list[str]:
    """List the plain files with first lines that end as on Windows: the carriage returns would be
    learnt as text.
    """
    files = []
    for path in paths:
        with suppress(OSError), Path(path).open("rb") as stream:  # `read_documents` reports it
            if not is_json_lines(path, form) and b"\r\n" in stream.read(_CHUNK_BYTES):
                files.append(path)
    return files


def read_documents(paths: Iterable[str], options: ReadOptions) -> Iterator[TextPiece]:
    """Yield every document of every file, in order.

    Raises:
        ConfigError: at the first place that cannot be read: kinds ``text-unreadable``,
            ``text-not-utf8``, ``text-bad-json``, ``text-no-field``, ``text-line-too-long``.
    """
    for path in paths:
        try:
            with Path(path).open("rb") as stream:
                if is_json_lines(path, options.form):
                    yield from _json_lines(stream, path, options)
                elif options.blank_lines_split:
                    yield from _paragraphs(stream, path, options)
                else:
                    yield from _whole_file(stream, path, options)
        except OSError as error:
            raise ConfigError(_unreadable(path, error)) from error


def _whole_file(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[TextPiece]:
    """Yield a file as one document, in pieces; the last one, which ends it, may be empty."""
    start = _skip_byte_order_mark(stream)
    position = start
    num_bytes = os.fstat(stream.fileno()).st_size - start
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        rest += chunk
        cut = len(rest)
        if options.utf8:
            cut = _place_to_cut(rest)
            _check_utf8(rest[:cut], path, position=position)
        yield TextPiece(rest[:cut], num_bytes, starts=position == start, ends=False)
        position += cut
        rest = rest[cut:]
    if options.utf8:
        _check_utf8(rest, path, position=position)
    yield TextPiece(rest, num_bytes, starts=position == start)


def _skip_byte_order_mark(stream: BinaryIO) -> int:
    """Go to the beginning of the text, after the mark that Windows puts before it; returns the
    position.
    """
    if stream.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK:
        return stream.seek(len(_BYTE_ORDER_MARK))
    return stream.seek(0)


def _place_to_cut(text: bytes) -> int:
    """Return the place to cut a text at: after the last line end that a non-blank follows, or else
    before the last single blank between non-blanks.

    GPT-2's pattern, which byte-level BPE splits by, never joins text across such a place: the
    tokens are the same as in the uncut text. Text without one is cut between two characters.
    """
    for mark, num_kept in ((b"\n", 1), (b" ", 0)):  # bytes of the mark before the cut
        place = text.rfind(mark, 0, len(text) - 1)
        while place > 0:
            is_last_blank = not text[place + 1 : place + 2].isspace()
            if is_last_blank and (num_kept or not text[place - 1 : place].isspace()):
                return place + num_kept
            place = text.rfind(mark, 0, place)
    # Before the last character, whole or not: its first byte comes before the bytes 10xxxxxx.
    place = len(text)
    while place > len(text) - 4 and place > 1 and text[place - 1] & 0xC0 == 0x80:
        place -= 1
    return max(place - 1, 1)


def _paragraphs(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[TextPiece]:
    _skip_byte_order_mark(stream)
    lines: list[bytes] = []
    size = 0
    for number, line in enumerate(_lines(stream, path), start=1):
        if line.strip():
            lines.append(line)
            size += len(line)
            if size > LONGEST_LINE_BYTES:
                raise _too_long(path, number, "a paragraph")
            if options.utf8:
                _check_utf8(line, path, line=number)
        elif lines:
            yield TextPiece(b"".join(lines), size)
            lines = []
            size = 0
    if lines:
        yield TextPiece(b"".join(lines), size)


def _json_lines(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[TextPiece]:
    for number, line in enumerate(_lines(stream, path), start=1):
        if line.strip():
            data = _text_of(line, options.json_field, path, number)
            yield TextPiece(data, len(data))


def _lines(stream: BinaryIO, path: str) -> Iterator[bytes]:
    read_line = partial(stream.readline, LONGEST_LINE_BYTES + 1)
    for number, line in enumerate(iter(read_line, b""), start=1):
        if len(line) > LONGEST_LINE_BYTES:
            raise _too_long(path, number, "the line")
        yield line


def _text_of(line: bytes, name: str, path: str, number: int) -> bytes:
    """Return the field of this name in a JSON line, the line `number` of a file, as UTF-8.

    Raises:
        ConfigError: kinds ``text-not-utf8``, ``text-bad-json``, ``text-no-field``.
    """
    refusal = partial(ConfigError.of, file=path, line=number)
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, f"byte {error.start} of the line", number, is_json=True) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            reason = "nested too deep"
        else:
            reason = getattr(error, "msg", str(error))
        # The message names the place at its beginning.
        reason = reason.removesuffix(" at").removesuffix(" starting")
        reason = f"the line is not JSON: {reason}"
        fix = "write one JSON object per line, or remove the line"
        raise refusal("text-bad-json", reason, fix, column=getattr(error, "colno", 0)) from error
    if not isinstance(row, dict):
        raise refusal("text-bad-json", "the line is no JSON object", f'write {{"{name}": "..."}}')
    if name not in row:
        fields = ", ".join(list(row)[:_SHOWN_FIELDS]) or "no fields"
        reason = f"there is no field '{name}' among: {fields}"
        raise refusal("text-no-field", reason, "say which with --jsonl-field")
    if not isinstance(row[name], str):
        raise refusal(
            "text-no-field",
            f"the field '{name}' holds no text",
            "say which one does with --jsonl-field",
        )
    try:
        return bytes(row[name].encode())
    except UnicodeEncodeError as error:
        raise _not_utf8(
            path, f"half of a surrogate pair in {name}", number, is_json=True
        ) from error


def _check_utf8(text: bytes, path: str, *, position: int = 0, line: int = 0) -> None:
    """Refuse bytes that are not UTF-8, or zero: `text` is line `line`, or begins at byte `position`
    of the file.

    Raises:
        ConfigError: kind ``text-not-utf8``.
    """
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if line:
            place = f"byte {error.start} of the line"
        else:
            place = f"byte {position + error.start:,} of the file"
        raise _not_utf8(path, place, line) from error
    if b"\0" in text:
        raise _not_utf8(path, "a zero byte", line)


def _not_utf8(path: str, place: str, line: int, *, is_json: bool = False) -> ConfigError:
    if is_json:
        fix = "convert it to UTF-8, which JSON is"
    else:
        fix = "convert it to UTF-8, or use --tokenizer bytes"
    return ConfigError.of(
        "text-not-utf8", f"it is not UTF-8 text ({place})", fix, file=path, line=line
    )


def _too_long(path: str, number: int, what: str) -> ConfigError:
    reason = f"{what} is longer than {LONGEST_LINE_BYTES >> 20} MiB"
    return ConfigError.of("text-line-too-long", reason, "split it", file=path, line=number)


def _unreadable(path: str, error: OSError) -> Problem:
    reason = f"it cannot be read ({error.strerror or error})"
    return Problem("text-unreadable", reason, "make it readable", file=path)
