"""Edits of JSON: the value changes as meant, and every other character stays."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_lint.text.document import Document, KeyPath
from deepspeed_lint.text.edits import (
    Edit,
    InsertMember,
    MoveMember,
    RemoveMember,
    RenameKey,
    ReplaceValue,
    apply_edits,
    clash,
    edited_value,
    unified_diff,
)
from deepspeed_lint.text.hjson import parse_hjson
from deepspeed_lint.text.json_editor import EditError
from tests.deepspeed_lint.text.hjson_texts import NAMES, SECTIONS, VALUES

TYPICAL = """\
{
    "train_batch_size": 32,
    "fp16": {
        "enabled": true,
        "loss_scale": 0
    },
    "gradient_cliping":   1.0,
    "zero_optimization": {
        "stage": 2,

        "reduce_bucket_size": 5e8
    },
    "steps_per_print": 10
}
"""


def edited(text: str, *edits: Edit) -> str:
    return apply_edits(parse_hjson(text, name="x"), edits)


def lines_of(text: str, *edits: Edit) -> tuple[list[str], list[str]]:
    """List the lines that went and the lines that came."""
    diff = unified_diff(text, edited(text, *edits), "x").split("\n")[2:]
    return [line[1:] for line in diff if line[0] == "-"], [
        line[1:] for line in diff if line[0] == "+"
    ]


@pytest.mark.parametrize(
    ("edit", "gone", "come"),
    [
        (
            RenameKey(("gradient_cliping",), "gradient_clipping"),
            ['    "gradient_cliping":   1.0,'],
            ['    "gradient_clipping":   1.0,'],
        ),
        (
            ReplaceValue(("zero_optimization", "stage"), 3),
            ['        "stage": 2,'],
            ['        "stage": 3,'],
        ),
        (RemoveMember(("zero_optimization", "stage")), ['        "stage": 2,'], []),
        (
            RemoveMember(("fp16", "loss_scale")),
            ['        "enabled": true,', '        "loss_scale": 0'],
            ['        "enabled": true'],
        ),
        (
            RemoveMember(("steps_per_print",)),
            ["    },", '    "steps_per_print": 10'],
            ["    }"],
        ),
        (
            RemoveMember(("fp16",)),
            ['    "fp16": {', '        "enabled": true,', '        "loss_scale": 0', "    },"],
            [],
        ),
        (
            InsertMember(("fp16", "x"), "y"),
            ['        "loss_scale": 0'],
            ['        "loss_scale": 0,', '        "x": "y"'],
        ),
        (
            InsertMember(("x",), [1]),
            ['    "steps_per_print": 10'],
            ['    "steps_per_print": 10,', '    "x": [', "        1", "    ]"],
        ),
        (
            InsertMember(("bf16", "enabled"), False),
            ['    "steps_per_print": 10'],
            ['    "steps_per_print": 10,', '    "bf16": {', '        "enabled": false', "    }"],
        ),
        (
            MoveMember(("fp16", "loss_scale"), ("bf16", "loss_scale")),
            [
                '        "enabled": true,',
                '        "loss_scale": 0',
                '    "steps_per_print": 10',
            ],
            [
                '        "enabled": true',
                '    "steps_per_print": 10,',
                '    "bf16": {',
                '        "loss_scale": 0',
                "    }",
            ],
        ),
        (
            MoveMember(("fp16",), ("zero_optimization", "fp16")),
            [
                '    "fp16": {',
                '        "enabled": true,',
                '        "loss_scale": 0',
                "    },",
                '        "reduce_bucket_size": 5e8',
            ],
            [
                '        "reduce_bucket_size": 5e8,',
                '        "fp16": {',
                '            "enabled": true,',
                '            "loss_scale": 0',
                "        }",
            ],
        ),
    ],
)
def test_a_typical_file(edit: Edit, gone: list[str], come: list[str]) -> None:
    assert lines_of(TYPICAL, edit) == (gone, come)


@pytest.mark.parametrize(
    ("text", "edits", "after"),
    [
        ('{"a": 1, "b": 2}', [RemoveMember(("b",))], '{"a": 1}'),
        ('{"a": 1, "b": 2}', [RemoveMember(("a",))], '{"b": 2}'),
        ('{ "a": 1 }', [RemoveMember(("a",))], "{ }"),
        ('{"a": 1, "b": 2}', [RemoveMember(("a",)), RemoveMember(("b",))], "{}"),
        ('{"a": 1, "b": 2}', [RemoveMember(("b",)), InsertMember(("c",), 3)], '{"a": 1, "c": 3}'),
        ("{}", [InsertMember(("a",), 1)], '{"a": 1}'),
        ("{\n}\n", [InsertMember(("a",), 1)], '{\n    "a": 1\n}\n'),
        (
            '{\r\n  "a": {}\r\n}',
            [InsertMember(("a", "b"), 1)],
            '{\r\n  "a": {\r\n    "b": 1\r\n  }\r\n}',
        ),
        (
            '{"a": {}}',
            [InsertMember(("b", "c", "d"), 1), InsertMember(("b", "e"), 2)],
            '{"a": {}, "b": {"c": {"d": 1}, "e": 2}}',
        ),
        ('["x", "y"]', [ReplaceValue((0,), 5)], '[5, "y"]'),
        ('{"a": 1\n , "b": 2\n , "c": 3}', [RemoveMember(("c",))], '{"a": 1\n , "b": 2\n }'),
        ('{"a": {"b": 1}}', [MoveMember(("a", "b"), ("c",))], '{"a": {}, "c": 1}'),
    ],
)
def test_odd_layouts(text: str, edits: list[Edit], after: str) -> None:
    assert edited(text, *edits) == after


@pytest.mark.parametrize("text", ['{"a": 1, // one\n"b": 2}', "{a: 1}", '{"a": 1,}', "a: 1"])
def test_hjson_is_not_edited(text: str) -> None:
    with pytest.raises(EditError, match="no JSON"):
        edited(text, ReplaceValue(("a",), 2))


def test_plain_values_are_edited() -> None:
    value = {"a": {"x": 1, "y": 2}, "b": [0, {"z": 1}], "c": 3}
    edits = [
        RenameKey(("a",), "A"),
        RenameKey(("a", "x"), "X"),
        MoveMember(("a", "y"), ("d", "e", "y")),
        ReplaceValue(("b", 0), 9),
        InsertMember(("b", 1, "w"), {}),
        RemoveMember(("c",)),
    ]
    after = {"A": {"X": 1}, "b": [9, {"z": 1, "w": {}}], "d": {"e": {"y": 2}}}
    assert edited_value(value, edits) == after
    assert value["c"] == 3
    assert json.loads(edited(json.dumps(value), *edits)) == after


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RemoveMember(("a",)), ReplaceValue(("a", "x"), 1)),
        (RemoveMember(("a",)), InsertMember(("a", "x"), 1)),
        (RenameKey(("a",), "b"), RenameKey(("a",), "c")),
        (RenameKey(("a",), "b"), InsertMember(("b",), 1)),
        (RenameKey(("a",), "b"), InsertMember(("a", "x"), 1)),
        (MoveMember(("a",), ("b",)), RenameKey(("a", "x"), "y")),
        (RenameKey(("a",), "b"), RenameKey(("c",), "a")),
        (InsertMember(("n",), 1), InsertMember(("n", "m"), 1)),
        (MoveMember(("a",), ("n",)), MoveMember(("b",), ("n",))),
        (ReplaceValue(("a",), 1), RemoveMember(("a",))),
    ],
)
def test_edits_that_overlap_clash(first: Edit, second: Edit) -> None:
    assert clash(first, second)
    assert clash(second, first)


@pytest.mark.parametrize(
    "edit",
    [
        RemoveMember(("no",)),
        RemoveMember(()),
        RemoveMember(("l", 0)),
        RenameKey(("a",), "l"),
        MoveMember(("a",), ("a", "b")),
        InsertMember(("a",), 1),
        InsertMember(("l", 1), 1),
        InsertMember(("a", "x", "y"), 1),
        ReplaceValue(("a", "no"), 1),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit: Edit) -> None:
    with pytest.raises(EditError):
        edited('{"a": {"x": 1}, "l": [1]}', edit)


@st.composite
def edits_of(draw: st.DrawFn, document: Document) -> list[Edit]:
    """Draw edits that fit a document and do not overlap."""
    keys = [path for path, span in document.spans.items() if span.key is not None]
    sections = [path for path in document.spans if isinstance(value_at(document.value, path), dict)]
    edits: list[Edit] = []
    for _ in range(draw(st.integers(1, 5))):
        new: KeyPath = (
            *draw(st.sampled_from(sections)),
            *draw(st.lists(NAMES, min_size=1, max_size=2)),
        )
        kind = draw(st.integers(0, 4)) if keys else 4
        path = draw(st.sampled_from(keys)) if keys else ()
        made: list[Edit] = [
            RenameKey(path, str(new[-1])),
            RemoveMember(path),
            ReplaceValue(path, draw(VALUES)),
            MoveMember(path, new),
            InsertMember(new, draw(VALUES)),
        ]
        edit = made[kind]
        target = (*path[:-1], new[-1]) if kind == 0 else new
        outer = [
            target[:length] for length in range(len(target)) if target[:length] in document.spans
        ]
        fits = kind in (1, 2) or (target not in document.spans and outer[-1] in sections)
        if (
            fits
            and target[: len(path)] != path * (kind == 3)
            and not any(clash(edit, other) for other in edits)
        ):
            edits.append(edit)
    return edits


def value_at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(SECTIONS, st.sampled_from([None, 0, 2, "\t"]), st.data())
def test_strict_json_stays_strict_json(
    value: dict[str, Any], indent: int | str | None, data: st.DataObject
) -> None:
    document = parse_hjson(json.dumps(value, indent=indent), name="x")
    edits = data.draw(edits_of(document))
    assert json.loads(apply_edits(document, edits)) == edited_value(document.value, edits)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SECTIONS, st.sampled_from([None, 0, 2, "\t"]), st.data())
def test_a_replaced_value_changes_nothing_else(
    value: dict[str, Any], indent: int | str | None, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent)
    document = parse_hjson(text, name="x")
    path = data.draw(st.sampled_from(sorted(document.spans, key=repr)))
    if path:
        start, end = document.spans[path].value
        after = apply_edits(document, [ReplaceValue(path, "new")])
        assert after == f'{text[:start]}"new"{text[end:]}'


def test_a_diff_cannot_write_to_the_terminal() -> None:
    diff = unified_diff('{"a": 1} # \x1b[2J\r\n', '{"b": 1} # \x1b[2J\r\n', "ds.json")
    assert (
        diff == '--- ds.json\n+++ ds.json\n@@ -1 +1 @@\n-{"a": 1} # \\x1b[2J\n+{"b": 1} # \\x1b[2J'
    )
    assert "\x1b" not in unified_diff("a", "b", "\x1b[2J.json")


@pytest.mark.slow
def test_many_edits_take_bounded_time() -> None:
    document = parse_hjson(
        "{" + ", ".join(f'"k{number}": {number}' for number in range(20_000)) + "}", name="x"
    )
    begin = time.process_time()
    apply_edits(document, [RenameKey((f"k{number}",), f"n{number}") for number in range(3_000)])
    assert time.process_time() - begin < 4
