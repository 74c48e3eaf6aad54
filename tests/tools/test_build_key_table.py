"""The program behind the key tables: a dict that remembers, source that is read, files that fit
together.
"""

from __future__ import annotations

import ast
import copy
from enum import Enum
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from deepspeed_lint.key_files import TABLES, known_releases
from tools import build_key_table
from tools.key_table.models import entries_of
from tools.key_table.recorder import NO_DEFAULT, Recorder
from tools.key_table.sources import _path_read


def test_a_recorder_remembers_every_question() -> None:
    config = Recorder({"a": {"b": 1}, "c": {}})
    assert config.get("missing", 7) == 7
    assert config["a"].get("b", 2) == 1
    assert "x" not in config["c"]
    assert "y" not in config.keys()  # noqa: SIM118
    assert copy.copy(config)["a"].pop("z", None) is None
    reads = {path: read.default for path, read in config.log.reads.items()}
    assert reads["missing"] == 7
    assert reads["a.b"] == 2
    assert reads["c.x"] is reads["y"] is NO_DEFAULT
    assert reads["a.z"] is None


def test_a_missing_key_is_noted_before_it_fails() -> None:
    config = Recorder({}, path="section")
    with pytest.raises(KeyError):
        config["needed"]
    assert list(config.log.reads) == ["section.needed"]


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Inner(BaseModel):
    size: int = Field(5, ge=1, alias="section_size")


class Outer(BaseModel):
    inner: Inner = Inner()
    mode: Mode = Mode.FAST
    rate: float | None = Field(None, gt=0, lt=1)
    names: list[str] = []
    needed: Literal["x", 1]
    kind: type = int


def test_a_model_is_described() -> None:
    found = dict(entries_of(Outer, "outer"))
    assert list(found) == [
        "outer.inner",
        "outer.inner.section_size",
        "outer.mode",
        "outer.rate",
        "outer.names",
        "outer.needed",
        "outer.kind",
    ]
    assert found["outer.inner"]["unknown"] == "error"
    size = found["outer.inner.section_size"]
    assert (size["type"], size["default"], size["minimum"], size["aliases"]) == (
        "integer",
        5,
        1,
        ["size"],
    )
    assert (found["outer.mode"]["enum"], found["outer.mode"]["default"]) == (
        ["fast", "slow"],
        "fast",
    )
    assert found["outer.rate"]["nullable"]
    assert (found["outer.rate"]["exclusive_minimum"], found["outer.rate"]["exclusive_maximum"]) == (
        0,
        1,
    )
    assert found["outer.names"]["items"] == "string"
    assert (found["outer.needed"]["required"], found["outer.needed"]["type"]) == (
        True,
        ["string", "integer"],
    )
    assert found["outer.kind"]["from_python"]


SOURCE = """
config[KEY]
config["section"][KEY]["deep"]
config.get("plain", DEFAULT)
config.pop("popped", None)
"asked" in config
"too" in config.keys()
config["metrics"][name]["inside"]
other["nothing"]
config[name]
"""


def test_source_is_read() -> None:
    names = {"KEY": "key", "DEFAULT": 3}
    reads = [
        read
        for node in ast.walk(ast.parse(SOURCE))
        for read in _path_read(node, {"config": ""}, names)
    ]
    assert {path: default for path, default in reads if default} == {"plain": [3], "popped": [None]}
    assert {path for path, _ in reads} == {
        "key",
        "section",
        "section.key",
        "section.key.deep",
        "plain",
        "popped",
        "asked",
        "too",
        "metrics",
        "metrics.*",
        "metrics.*.inside",
    }


@pytest.mark.parametrize("release", known_releases())
def test_files_are_as_the_program_writes_them(release: str) -> None:
    """Each file holds just what differs from the next newer release, one line per key."""
    known = known_releases()
    newer = known[known.index(release) + 1] if release != known[-1] else None
    table = build_key_table._entries_of(release)
    newer_table = build_key_table._entries_of(newer) if newer else {}
    document = build_key_table._document(release, table, newer, newer_table)
    assert (TABLES / f"{release}.json").read_text(encoding="utf-8") == build_key_table._as_text(
        document
    )


def test_counts_name_every_release() -> None:
    lines = build_key_table._counts()
    assert [line.split()[0] for line in lines[1:]] == list(known_releases())
