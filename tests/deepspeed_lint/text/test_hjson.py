"""DeepSpeed JSON as people have it: read as the hjson package reads it, with the place and extent
of everything.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from deepspeed_lint.errors import ConfigError, Problem
from deepspeed_lint.text.document import Document
from deepspeed_lint.text.hjson import parse_hjson, read_hjson
from tests.deepspeed_lint.text.hjson_texts import hjson_texts

REFUSED = object()
# What hjson reads and we refuse, each with an example: it has no meaning in a config, or hides a
# mistake.
REFUSED_ON_PURPOSE = {
    "half of a UTF-16 pair": r'{"a": "\ud800"}',
    "it holds zero bytes": "a: x\0y",
    "without four hexadecimal digits": r'{"a": "\u+123"}',
    # where its lines begin depends on how the file was opened
    "carriage returns alone": "x: 1\ra: 2\n b: '''t'''",
    "nested more than 50 levels": "[" * 60 + "]" * 60,
    "more than 50,000 values": "[" + "1," * 60_000 + "]",
    "more than 1,000,000 bytes": "#" * 1_000_001,
    "a key of 1,025 characters": "k" * 1_025 + ": 1",
    "a number of 4,401 characters": f"a: 0.{'1' * 4_399}",
}


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicates as DeepSpeed's dict_raise_error_on_duplicate_keys (runtime/config_utils.py)
    does.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("duplicate keys")
    return values


def by_hjson(text: str) -> Any:
    try:
        return hjson.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, IndexError, OverflowError):  # it raises all three
        return REFUSED


def problems_of(text: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse_hjson(text, name="ds.json")
    return list(caught.value.problems)


def check_agreement(text: str) -> None:
    """Check that both refuse, or both read the same; or it is on the list, or one text is all that
    hjson sees in broken members.
    """
    theirs = by_hjson(text)
    try:
        ours = parse_hjson(text, name="x").value
    except ConfigError as error:
        check_refusal(text, error.problems, theirs)
        return
    assert theirs is not REFUSED, text
    assert repr(ours) == repr(theirs)


def check_refusal(text: str, problems: Sequence[Problem], theirs: Any) -> None:
    assert all(problem.fix and str(problem).isprintable() for problem in problems)
    if isinstance(theirs, (dict, list)):
        reasons = [problem.reason for problem in problems]
        assert any(known in reason for known in REFUSED_ON_PURPOSE for reason in reasons), (
            text,
            reasons,
        )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(hjson_texts())
def test_reads_what_hjson_reads(text: str) -> None:
    check_agreement(text)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(hjson_texts(), st.data())
def test_broken_texts_are_refused_as_hjson_refuses_them(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(start + 2, len(text))))
        piece = data.draw(
            st.sampled_from(
                ["", *"{}[]:,\"'#/\n\r\t \\1a", "/*", "*/", "//", "'''", "\u00a0", "\\u12", "null"]
            )
        )
        text = text[:start] + piece + text[end:]
    check_agreement(text)


@settings(max_examples=200, deadline=None)
@example("0:/*")
@given(st.text("{}[]:,'\"#/* \n\r\t\\ab01.-e\u00a0\v\ufeff"))
def test_any_text_is_read_or_refused_as_by_hjson(text: str) -> None:
    check_agreement(text)


@pytest.mark.slow
@pytest.mark.parametrize("reason", REFUSED_ON_PURPOSE)
def test_what_is_refused_on_purpose(reason: str) -> None:
    text = REFUSED_ON_PURPOSE[reason]
    assert by_hjson(text) is not REFUSED
    assert reason in problems_of(text)[0].reason


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fp16: auto", {"fp16": "auto"}),
        ("a: auto # c", {"a": "auto # c"}),
        ("a: auto, b", {"a": "auto, b"}),
        ("a: 5 # c", {"a": 5}),
        ("a: 1e3", {"a": 1000}),
        ("a: 1.0", {"a": 1}),
        ("a: 1e10", {"a": 1e10}),
        ("a: -0.0", {"a": 0}),
        ("a: 1e-3", {"a": 1e-3}),
        ("a: 01", {"a": "01"}),
        ("a: .5", {"a": ".5"}),
        ("a: NaN", {"a": "NaN"}),
        ("a: -Infinity", {"a": "-Infinity"}),
        ("a: 1_000", {"a": "1_000"}),
        ("a:\n b: 2", {"a": "b: 2"}),
        ("{a: [1, 2\n3,], 'b': {},}", {"a": [1, 2, 3], "b": {}}),
        ("", {}),
        ("# only this", {}),
        ("{}\n", {}),
        ("[1]", [1]),
        ('{"a": "\\ud83d\\ude00\\n"}', {"a": "\U0001f600\n"}),
        ("x:\n  '''\n  a\n   b\n  '''", {"x": "a\n b"}),
        ("a: '''x\n  y'''\n", {"a": "x\ny"}),
        ("\ufeff{a: 1}", {"a": 1}),
        ("a\u00a0: 1\r\n", {"a\u00a0": 1}),
        ('"a"', "a"),
    ],
)
def test_corner_cases(text: str, value: Any) -> None:
    assert repr(parse_hjson(text, name="x").value) == repr(value) == repr(by_hjson(text))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(hjson_texts())
def test_every_span_holds_its_key_and_its_value(text: str) -> None:
    try:
        document = parse_hjson(text, name="x")
    except ConfigError:
        assume(False)
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    for path, span in document.spans.items():
        value = document.value
        for key in path:
            value = value[key]
        line, column = document.places[path]
        shown = text[span.start :]
        assert shown.startswith(lines[line - 1][column - 1 :][:3])
        written = text[slice(*span.value)]
        # its value depends on its column
        if path and not (written.startswith("'''") and "\n" in written):
            assert repr(by_hjson(f"[{written}\n]")) == repr([value])
        if span.key is not None:
            assert by_hjson(f"{{{text[slice(*span.key)]}: 1}}") == {path[-1]: 1}
        if span.comma is not None:
            assert text[span.comma] == ","
            assert not re.sub(r"\s|//.*|#.*|/\*(?s:.*?)\*/", "", text[span.value[1] : span.comma])
    assert document.spans.keys() == document.places.keys() == paths_of(document)


def paths_of(document: Document) -> set[tuple[str | int, ...]]:
    found, waiting = set(), [((), document.value)]
    while waiting:
        path, value = waiting.pop()
        found.add(path)
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        waiting += [((*path, key), item) for key, item in items]
    return found


def test_all_duplicate_keys_are_found() -> None:
    problems = problems_of("{\n a: 1, 'a': 2,\n b: {c: 1\n  c: 2\n \"c\": 3}\n a: 4}")
    assert [(p.kind, p.key, p.line, p.column) for p in problems] == [
        ("duplicate-key", "a", 2, 8),
        ("duplicate-key", "b.c", 4, 3),
        ("duplicate-key", "b.c", 5, 2),
        ("duplicate-key", "a", 6, 2),
    ]
    assert (
        str(problems[0])
        == "ds.json:2: a: the key is already set in line 2; keep one of the two [duplicate-key]"
    )


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ('{"a": 1', 1, 1, "the { that opens here is never closed; add the }"),
        ('{"a": 1 "b": 2}', 1, 1, "put the text of line 1 in quotes"),
        (
            '{\n"a": auto}',
            1,
            1,
            "put the text of line 2 in quotes: without them it runs to the end of its line",
        ),
        ('{"a": 1}}', 1, 9, "text after the end"),
        ('{"a": 1,, "b": 2}', 1, 9, "a comma where a key belongs; remove it"),
        ('{\r\n "a" 1}', 2, 6, "no colon after the key"),
        ('{"a": }', 1, 7, "a } where a value belongs"),
        ("[1, ]]", 1, 6, "text after the end"),
        ("{a b: 1}", 1, 2, "has a blank in it"),
        ("{a\n}", 1, 2, "no colon after a"),
        ('{"a": "x\n"}', 1, 7, "do not end on their line"),
        ('{"a": "x\ty"}', 1, 9, "a tab or control character inside quotes"),
        ('{"a": "\\x"}', 1, 8, "\\x is no escape"),
        ("{a: 1e999}", 1, 5, "too large for a number"),
        ("{a: 1 /* x }", 1, 7, "does not end; close it with */"),
        ("a: '''x", 1, 4, "does not end"),
        ("a: '''x'''", 1, 4, "in a file of one line"),
        (": 1", 1, 1, "a colon without a key"),
        ("a:", 1, 3, "write the value"),
        ("a: {b: [}", 1, 9, "a } where a value belongs"),
        ("\ufeff}", 1, 1, "a } where a key belongs"),
        ("a: 1}", 1, 5, "a }"),
        ("é: 1\n\tü: 2 }", 2, 7, "a } where a key belongs"),
        ("\ufeff ", 1, 2, "the file is empty"),
    ],
)
def test_problems_name_place_reason_and_fix(text: str, line: int, column: int, words: str) -> None:
    [problem] = problems_of(text)
    assert (problem.kind, problem.line, problem.column) == ("config-syntax", line, column)
    assert words in str(problem)
    assert problem.fix


HOSTILE = {
    "brackets": "[" * 900_000,
    "objects": "{a:" * 300_000,
    "commas": "[" + "1," * 400_000,
    "number": "{a: " + "1" * 900_000,
    "number and commas": "{a: " + "1" * 400_000 + "x" + "," * 400_000,
    "spaces in a key": "{a" + " " * 900_000 + ":1}",
    "spaces behind a word": "{a: null" + "\u00a0" * 400_000 + "x",
    "comments": "[" + "/**/" * 200_000,
    "one comment": "[" + "/*" * 400_000,
    "escapes": '{a: "' + "\\u0041" * 150_000 + '"}',
    "quotes": "{a: " + "'" * 900_000,
    "texts": "\n[" + "'''a'''" * 100_000,
    "one long text": "\n a: '''" + "\n " * 400_000 + "'''",
    "duplicates": "{" + "a:1," * 200_000,
    "words": "a\n" * 400_000,
    "duplicates of long paths": "{a:" * 49 + ("b" * 900 + ":1,") * 900,
    "line ends": "\r" * 900_000,
    "keys": '"a"' * 300_000,
    "members": "".join(f"k{number}: 1\n" for number in range(49_000)),
    "colons": "a:" * 400_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_texts_take_bounded_time(case: str) -> None:
    begin = time.process_time()
    with suppress(ConfigError):
        parse_hjson(HOSTILE[case], name="x")
    assert time.process_time() - begin < 4  # a quadratic reader takes minutes


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    data = b'\xef\xbb\xbf{\r\n  "a": 1, // \xc3\xa9\r\n}\r\n'
    path.write_bytes(data)
    document = read_hjson(path, name="ds.json")
    assert document.value == {"a": 1}
    assert document.places[("a",)] == (2, 3)
    assert document.text.encode() == data


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (None, "config-not-found"),
        (b"\xff{", "config-not-text"),
        (b"a\0", "config-not-text"),
        (b" " * 1_000_001, "config-too-large"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, data: bytes | None, kind: str) -> None:
    path = tmp_path / "ds.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_hjson(path, name="ds.json")
    assert caught.value.problems[0].kind == kind


def test_what_python_writes_is_read() -> None:
    values = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "x": [1, 2.5, None, "é\u2028"]},
        "": {},
    }
    for indent in (None, 2, "\t"):
        assert parse_hjson(json.dumps(values, indent=indent), name="x").value == values


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("True", "write true"),
        ("None", "write null"),
        ("NaN", "write a finite number"),
        ("-Infinity", "write a finite number"),
    ],
)
def test_a_keyword_of_python_is_named_where_it_swallows_its_line(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hjson(f'{{"train_batch_size": 1, "fp16": {{"enabled": {word}}}}}', name="x.json")
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.fix) == (1, 45, fix)
    assert f"{word} is no word of JSON" in problem.reason
