"""Words of other tools: what an argument of the Hugging Face Trainer, Lightning, accelerate,
torchtitan or `deepspeed.initialize` is here, and what their values are.

`other_words.yaml` is the one table of them: for the hints of [unknown-key], `check --fix`, `keys`,
`import` and the page of the docs. It is read when a word is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

TABLE: Final = Path(__file__).with_suffix(".yaml")
SEVERAL_TOOLS: Final = "Words of several tools"
_VALUES: Final = "Values"
REASON: Final = re.compile(r"(not needed|not a key|cannot): ")
# Title in the table -> the tool in a sentence.
_IN_SENTENCES: Final[Mapping[str, str]] = {
    "Hugging Face TrainingArguments": "Hugging Face's ",
    "Lightning Trainer": "Lightning's ",
    "Lightning ModelCheckpoint": "Lightning's ",
    "Lightning EarlyStopping": "Lightning's ",
    "accelerate Accelerator": "accelerate's ",
    "deepspeed.initialize": "DeepSpeed's ",
    "PipelineModule": "DeepSpeed's ",
    "The DeepSpeed engine": "DeepSpeed's ",
    "torchtitan": "torchtitan's ",
    SEVERAL_TOOLS: "",
}


@dataclass(frozen=True)
class OtherWord:
    """A word of another tool.

    Attributes:
        tool: its title in the table.
        name: the word.
        keys: our keys for it, dotted; none where there is a reason instead.
        remark: what to know about it; empty: the first key takes the same values.
        reason: why there is no key, with one of the three beginnings in front; else empty.
    """

    tool: str
    name: str
    keys: tuple[str, ...]
    remark: str
    reason: str

    @property
    def is_same(self) -> bool:
        """Check whether it is one of our keys under another name."""
        return len(self.keys) == 1 and not self.remark

    def hint(self) -> str:
        """Return what to write instead, for the fix of a problem."""
        if self.reason:
            return f"remove it: {REASON.sub('', self.reason)}"
        text = f"{_IN_SENTENCES[self.tool]}{self.name} is {_alternatives(self.keys)} here"
        if self.remark:
            text += f" ({self.remark})"
        return text


def _alternatives(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    return f"{', '.join(keys[:-1])} or {keys[-1]}"


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def rows_by_tool() -> dict[str, dict[str, str]]:
    """Return the rows of the table as they stand in the file: tool -> words -> answer."""
    return {tool: rows for tool, rows in _table().items() if tool != _VALUES}


def value_rows() -> dict[str, dict[str, str]]:
    """Return the values of other tools as they stand in the file: our key -> values -> answer."""
    return _table()[_VALUES]


@cache
def answers() -> dict[str, dict[str, str]]:
    """Return the rows with each word by itself: tool -> word -> answer."""
    answers_by_tool: dict[str, dict[str, str]] = {}
    for tool, rows in rows_by_tool().items():
        answers_by_tool[tool] = {}
        for names, answer in rows.items():
            for name in names.split(","):
                answers_by_tool[tool][name.strip()] = answer
    return answers_by_tool


def words_named(name: str, section: str = "") -> list[OtherWord]:
    """Return what a word means in each tool that has it, in either spelling and in any case; some
    words mean something in one section only.
    """
    plain = name.replace("-", "_").lower()
    found = []
    for tool, rows in answers().items():
        for word in (f"{section}.{plain}", plain):
            if word in rows:
                found.append(_word(tool, plain, rows[word]))
                break
    return found


def meaning(name: str, section: str = "") -> OtherWord | None:
    """Return what a word most likely means: in the section that it stands in, if one of the tools'
    keys is there, else by the first tool of the table that has a key for it; None: no tool has it.
    """
    words = words_named(name, section)
    for word in words:
        if any(key.partition(".")[0] == section for key in word.keys):
            return word
    for word in words:
        if word.keys:
            return word
    if words:
        return words[0]
    return None


def same_key(name: str, section: str = "") -> str | None:
    """Return our key for which a word is another name in every tool that has it; None: a choice, or
    other values.
    """
    words = words_named(name, section)
    keys = {word.keys for word in words}
    if len(keys) == 1 and all(word.is_same for word in words):
        return words[0].keys[0]
    return None


def _word(tool: str, name: str, answer: str) -> OtherWord:
    if REASON.match(answer):
        return OtherWord(tool, name, (), "", answer)
    keys, _, remark = answer.partition("|")
    return OtherWord(tool, name, tuple(key.strip() for key in keys.split(",")), remark.strip(), "")


def value_here(key: str, value: object) -> tuple[str, str] | None:
    """Return what to write for another tool's value of our key, and a remark, which is empty where
    it means the same; None: no tool has it.
    """
    plain = str(value).lower()
    for words, answer in value_rows().get(key, {}).items():
        if plain in words.split(", "):
            ours, _, remark = answer.partition("|")
            return ours.strip(), remark.strip()
    return None
