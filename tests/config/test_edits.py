"""Edits of run configs in YAML: lines that mean the same stay as they are, with their comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.text.document import Document, document_of
from deepspeed_lint.text.edits import (
    Edit,
    InsertMember,
    MoveMember,
    RemoveMember,
    RenameKey,
    ReplaceValue,
    edited_value,
)
from framework.config.edits import edited
from tests.places import ROOT

CONFIGS = sorted((ROOT / "ds_configs").glob("*.yaml"))


def read(text: str) -> Document:
    return document_of(text, Path("x.yaml"), name="x.yaml")


def edited_text(text: str, *edits: Edit) -> str:
    after = edited(read(text), edits)
    assert after is not None
    assert read(after).value == edited_value(read(text).value, edits)
    return after


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_changes_in_the_lines_that_are_meant(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.startswith("run:"))

    after = edited_text(text, ReplaceValue(("run", "name"), "other")).splitlines()
    name = read(text).value["run"]["name"]
    assert after == [*lines[:place], lines[place].replace(name, "other"), *lines[place + 1 :]]

    after = edited_text(text, InsertMember(("run", "world_size"), 2)).splitlines()
    changed = lines[place].replace("}", ", world_size: 2}", 1)
    assert after == [*lines[:place], changed, *lines[place + 1 :]]

    after = edited_text(text, RenameKey(("run",), "ran")).splitlines()
    assert after == [*lines[:place], "ran" + lines[place][3:], *lines[place + 1 :]]


ODD = """\
%YAML 1.2
---
# the head

run:       {name: 'a', seed: 0x}   # mine
data: &common
    kind:   "text"      # in quotes
    sequence_length: 1_024

    # what follows is long
    path: [a,
           b]
optimizer: {
    kind: adamw,   # in a flow section
    lr: 1e-3}

zero:
    stage: 2 # two


# the end
other: *common
"""


@pytest.mark.parametrize(
    ("edit", "gone", "come"),
    [
        (ReplaceValue(("zero", "stage"), 3), ["    stage: 2 # two"], ["    stage: 3 # two"]),
        (
            InsertMember(("zero", "x"), True),
            [],
            ["    x: true"],
        ),
        (RemoveMember(("data", "sequence_length")), None, None),
        (ReplaceValue(("run", "name"), "b"), None, None),
        (
            MoveMember(("zero", "stage"), ("new", "stage")),
            ["zero:"],
            ["zero: {}", "new:"],
        ),
        (InsertMember(("new", "a"), 1), [], ["new:", "    a: 1"]),
    ],
    ids=str,
)
def test_an_odd_layout_stays(edit: Edit, gone: list[str] | None, come: list[str] | None) -> None:
    """An alias of a changed section would change with it: nothing is written then."""
    after = edited(read(ODD), [edit])
    if edit.path[0] == "data":
        assert after is None
        return
    assert after is not None
    assert read(after).value == edited_value(read(ODD).value, [edit])
    before_lines = ODD.splitlines()
    after_lines = after.splitlines()
    if gone is not None:
        assert [line for line in before_lines if line not in after_lines] == gone
    if come is not None:
        assert [line for line in after_lines if line not in before_lines] == come
    comments = [line for line in before_lines if "#" in line and line not in (gone or ())]
    if edit.path != ("run", "name"):
        assert [line for line in after_lines if line in comments] == comments


def test_a_new_member_stands_above_the_lines_below_its_section() -> None:
    text = "zero:\n  stage: 1  # one\n\n# of the batch\nbatch:\n  micro_size: 4\n"
    after = edited_text(text, InsertMember(("zero", "reduce_scatter"), False))
    assert after == text.replace("\n\n", "\n  reduce_scatter: false\n\n", 1)


def test_the_comment_above_the_next_member_outlives_a_removed_one() -> None:
    text = "zero:\n  stage: 1  # one\n\n  # of the buckets\n  reduce_bucket_size: 5e8\n"
    after = edited_text(text, RemoveMember(("zero", "stage")))
    assert after == "zero:\n\n  # of the buckets\n  reduce_bucket_size: 5e8\n"


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_a_file_without_a_section_has_no_place_for_a_key(text: str) -> None:
    assert edited(read(text), [InsertMember(("zero", "stage"), 2)]) is None


@pytest.mark.parametrize(
    ("value", "written"),
    [(3, "3"), (0.001, "0.001"), (None, "null"), ("on", "on"), ("1", "'1'"), ([1, "a"], "[1, a]")],
    ids=str,
)
def test_a_new_value_is_read_as_it_was_meant(value: Any, written: str) -> None:
    assert edited_text("a: {b: 2}\n", ReplaceValue(("a", "b"), value)).startswith("a: {b: ")
    after = edited_text("a:\n  b: 2\n", ReplaceValue(("a", "b"), value))
    assert after in (f"a:\n  b: {written}\n", "a:\n  b:\n")
