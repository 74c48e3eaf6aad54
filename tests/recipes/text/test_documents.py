from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.recipes.text import documents
from framework.recipes.text.documents import (
    ReadOptions,
    TextPiece,
    carriage_returns,
    input_size,
    read_documents,
)

BYTES, UTF8 = ReadOptions(utf8=False), ReadOptions(utf8=True)


def read(path: Path, how: ReadOptions = UTF8) -> list[bytes]:
    return joined(read_documents([str(path)], how))


def joined(pieces: object) -> list[bytes]:
    found: list[bytes] = []
    for piece in pieces:  # type: ignore[attr-defined]
        assert isinstance(piece, TextPiece)
        if piece.starts:
            found.append(b"")
        found[-1] += piece.text
    return found


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def problem_of(path: Path, how: ReadOptions = UTF8) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, how)
    (problem,) = caught.value.problems
    return str(problem)


def test_a_plain_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\n\ntwo\n")
    assert read(path) == [b"one\n\ntwo\n"]
    (piece,) = (piece for piece in read_documents([str(path)], BYTES) if piece.starts)
    assert piece.num_bytes == 9


def test_paragraphs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\n one\nmore\n\n \t\r\n\ntwo")
    assert read(path, ReadOptions(utf8=True, blank_lines_split=True)) == [b" one\nmore\n", b"two"]


def test_json_lines(tmp_path: Path) -> None:
    rows = ['\ufeff{"text": "a\u00e9\\u00e9", "id": 1}', "", '{"text": ""}', '{"text": "b\\nc"}']
    path = write(tmp_path / "a.jsonl", "\r\n".join(rows).encode())
    assert read(path) == ["a\u00e9\u00e9".encode(), b"", b"b\nc"]
    named = write(tmp_path / "b.NDJSON", b'{"text": 1, "body": "x"}')
    assert read(named, ReadOptions(utf8=False, json_field="body")) == [b"x"]


@pytest.mark.parametrize("utf8", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "word \n  word\n\nmore words\n" * 40,
        "\u20ac\U0001f600" * 60,
        "x" * 300,
        "a b" * 90 + " " * 70,
        "",
        "\n" * 200,
    ],
    ids=["lines", "no blanks", "one word", "blanks at the end", "empty", "line ends"],
)
def test_long_documents_come_in_pieces_of_whole_characters(
    text: str, utf8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 64)
    path = write(tmp_path / "a.txt", text.encode())
    pieces = list(read_documents([str(path)], ReadOptions(utf8=utf8)))
    assert b"".join(piece.text for piece in pieces) == text.encode()
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > len(text) // 128
    if utf8:
        assert all(piece.text.decode() is not None for piece in pieces)


def test_pieces_are_cut_where_a_line_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 64)
    path = write(tmp_path / "a.txt", b"some words\n  indented\n" * 50)
    pieces = [piece.text for piece in read_documents([str(path)], UTF8)]
    assert all(piece.startswith(b"some") and piece.endswith(b"d\n") for piece in pieces[:-2])


def test_memory_does_not_grow_with_a_line_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.jsonl", b'{"text": ""}\n{"text": "' + b"x" * (1 << 20))
    assert (
        problem_of(path)
        == f"{path}:2: the line is longer than 1 MiB; split it [text-line-too-long]"
    )
    paragraph = write(tmp_path / "a.txt", b"0123456789\n" * 100_000)
    line = problem_of(paragraph, ReadOptions(utf8=False, blank_lines_split=True))
    assert (
        line
        == f"{paragraph}:95326: a paragraph is longer than 1 MiB; split it [text-line-too-long]"
    )


DEEP = b"[" * 100_000
BAD_ROWS: dict[str, tuple[bytes, str]] = {
    "cut off": (
        b'{"text": "a',
        ":2: the line is not JSON: Invalid control character; write one JSON object per line, or",
    ),
    "deep": (DEEP, ":2: the line is not JSON: "),
    "long number": (
        b'{"text": ' + b"9" * 5000 + b"}",
        ":2: the line is not JSON: Exceeds the limit",
    ),
    "list": (b'["text"]', ':2: the line is no JSON object; write {"text": "..."} [text-bad-json]'),
    "no field": (
        b'{"body": "x", "id": 3}',
        ":2: there is no field 'text' among: body, id; say which with --jsonl-field",
    ),
    "no fields": (
        b"{}",
        ":2: there is no field 'text' among: no fields; say which with --jsonl-field [text-no-field]",
    ),
    "no text": (
        b'{"text": null}',
        ":2: the field 'text' holds no text; say which one does with --jsonl-field [text-no-field]",
    ),
    "not UTF-8": (
        b'{"text": "\xff"}',
        ":2: it is not UTF-8 text (byte 10 of the line); convert it to UTF-8",
    ),
    "half a pair": (
        b'{"text": "\\ud800"}',
        ":2: it is not UTF-8 text (half of a surrogate pair in text); convert it",
    ),
}


@pytest.mark.parametrize("how", [BYTES, UTF8], ids=["bytes", "utf8"])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_its_line(name: str, how: ReadOptions, tmp_path: Path) -> None:
    row, expected = BAD_ROWS[name]
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + row + b"\n")
    line = problem_of(path, how)
    assert line.startswith(f"{path}{expected}")
    assert "\n" not in line


def test_what_is_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", b"fine \xff")
    fix = "convert it to UTF-8, or use --tokenizer bytes [text-not-utf8]"
    assert problem_of(path) == f"{path}: it is not UTF-8 text (byte 5 of the file); {fix}"
    assert read(path, BYTES) == [b"fine \xff"]
    lines = ReadOptions(utf8=True, blank_lines_split=True)
    assert problem_of(path, lines) == f"{path}:1: it is not UTF-8 text (byte 5 of the line); {fix}"
    zero = write(tmp_path / "b.txt", "text".encode("utf-16-be"))
    assert problem_of(zero) == f"{zero}: it is not UTF-8 text (a zero byte); {fix}"
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 64)
    late = write(tmp_path / "c.txt", b"word " * 20 + b"\xc3")
    assert "(byte 100 of the file)" in problem_of(late)


def test_all_inputs_are_looked_at_before_anything_is_read(tmp_path: Path) -> None:
    packed = write(tmp_path / "a.txt.gz", gzip.compress(b"text"))
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    fine = write(tmp_path / "a.txt", b"text")
    with pytest.raises(ConfigError) as caught:
        input_size(
            [
                str(tmp_path / "no.txt"),
                str(tmp_path),
                str(packed),
                str(fifo),
                "a\0b",
                str(fine),
                f"{fine}/x",
            ]
        )
    assert [str(problem) for problem in caught.value.problems] == [
        f"{tmp_path}/no.txt: there is no such file; name an existing one [text-not-found]",
        f"{tmp_path}: it is a folder; name the files in it, for example {tmp_path}/*.txt [text-not-a-file]",
        f"{packed}: it is compressed with gzip; unpack it first [text-compressed]",
        f"{fifo}: it is no regular file, and it is read twice; write it to a file first [text-not-a-file]",
        "a\\x00b: there is no such file; name an existing one [text-not-found]",
        f"{fine}/x: there is no such file; name an existing one [text-not-found]",
    ]
    assert input_size([str(fine), str(fine)]) == 8


def test_a_row_of_any_text_comes_back(tmp_path: Path) -> None:
    texts = ["", "\u2028", "a\r\nb", "\x00", "\U0001f600" * 3]
    path = write(
        tmp_path / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in texts).encode()
    )
    assert read(path, BYTES) == [text.encode() for text in texts]


@pytest.mark.parametrize(
    "name", ["rows.json", "rows.csv", "rows.PARQUET", "rows.arrow", "rows.txt"]
)
def test_rows_of_a_table_are_no_text(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, b"PAR1" if name.endswith("txt") else b'{"text": "a"}\n')
    with pytest.raises(
        ConfigError,
        match=r"it holds rows of a table, .*--format text to take it as it is \[text-rows\]",
    ):
        input_size([str(path)])
    assert input_size([str(path)], "text") == path.stat().st_size
    if name == "rows.json":
        assert input_size([str(path)], "jsonl") == 14
        assert read(path, ReadOptions(utf8=True, form="jsonl")) == [b"a"]
        assert read(path, ReadOptions(utf8=True, form="text")) == [b'{"text": "a"}\n']


@pytest.mark.parametrize("how", [BYTES, UTF8, ReadOptions(utf8=True, blank_lines_split=True)])
def test_a_byte_order_mark_is_no_text(how: ReadOptions, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n")
    assert read(path, how) == [b"one\n"]
    (piece,) = (piece for piece in read_documents([str(path)], how) if piece.starts)
    assert piece.num_bytes == 4
    assert "(byte 5 of the file)" in problem_of(write(tmp_path / "b.txt", b"\xef\xbb\xbfab\xff"))


def test_lines_that_end_as_on_windows(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / name, b"one\r\ntwo\r\n")) for name in ("a.txt", "b.jsonl")]
    assert carriage_returns([*paths, str(write(tmp_path / "c.txt", b"one\ntwo\n"))]) == paths[:1]


def test_json_is_always_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "\xff"}')
    assert problem_of(path, BYTES).endswith("convert it to UTF-8, which JSON is [text-not-utf8]")
