"""Hjson texts of unusual layout: values written with every freedom that the format gives."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(
    ["a", "b", "fp16", "zero_optimization", "stage", "two words", "c,d", "", "ключ", "a:b", "it's"]
)
TEXTS = st.sampled_from(
    [
        "auto",
        "cpu",
        "",
        "a, b",
        "5",
        "1e3",
        "true",
        "x # y",
        "http://x",
        " x ",
        "two\nlines",
        "é\t",
        "'",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, 1e-3, 5e8, 1e10])
    | TEXTS
    | st.text(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(NAMES, values, max_size=4),
    max_leaves=12,
)
SECTIONS = st.dictionaries(NAMES, VALUES, max_size=5)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBER_LIKE = re.compile(r"-?\d|(null|true|false)\b")


@st.composite
def hjson_texts(draw: st.DrawFn) -> str:
    """Draw the text of an object. Nearly all are valid; every comment in one has another text."""
    value = draw(SECTIONS)
    writer = _Writer(draw(st.randoms(use_true_random=False)))
    if draw(st.booleans()) and value:
        text = writer.blank() + writer.members(list(value.items())) + writer.blank()
    else:
        text = writer.blank() + writer.value(value)[0] + writer.blank()
    text = text.replace("\r\n", "\n").replace("\n", "\r\n") if draw(st.booleans()) else text
    return ("\ufeff" if draw(st.integers(0, 9)) == 0 else "") + text


class _Writer:
    def __init__(self, choices: random.Random) -> None:
        self.choices = choices
        self.num_comments = 0

    def blank(self) -> str:
        """Draw blanks and comments."""
        chosen = self.choices.choice(["", "", " ", "\n", "\n  ", "\t", "//", "#", "/*", "/*\n"])
        if chosen[:1] not in ("/", "#"):
            return chosen
        self.num_comments += 1
        text = f"<{self.num_comments}>" + self.choices.choice(["", " }", ',"x": 1', "'''"])
        return f" {chosen}{text}*/" if "*" in chosen else f" {chosen}{text}\n"

    def members(self, items: list[tuple[str | None, Any]]) -> str:
        parts = []
        for number, (key, item) in enumerate(items, start=1):
            start = "" if key is None else self.key(key) + ":"
            written, kind = self.value(item)
            gap = self.blank()
            if kind == "line":
                gap = "\n" + gap
            elif kind == "word" and not gap.strip(" \t") and number < len(items):
                gap += self.choices.choice(["\n", ",", " /**/"])
            if "," not in gap and self.choices.random() < 0.6:
                gap += "," + self.blank()
            parts.append(start + self.blank() + written + gap)
        return "".join(parts)

    def key(self, key: str) -> str:
        """Draw a key, and the blanks before its colon; a comment there needs a quoted key."""
        if _WORD.fullmatch(key) and self.choices.random() < 0.5:
            return key + self.choices.choice(["", "", " ", "\n\t"])
        return self.quoted(key) + self.blank()

    def quoted(self, text: str) -> str:
        if (
            "'" not in text
            and "\\" not in text
            and text.isprintable()
            and self.choices.random() < 0.3
        ):
            return f"'{text}'" if text else '""'
        return json.dumps(text, ensure_ascii=self.choices.random() < 0.5)

    def value(self, value: Any) -> tuple[str, str]:
        """Draw the text of a value, and what it needs behind it: a new line, something that ends a
        number, or nothing.
        """
        if isinstance(value, dict):
            return "{" + self.blank() + self.members(list(value.items())) + "}", ""
        if isinstance(value, list):
            return "[" + self.blank() + self.members([(None, item) for item in value]) + "]", ""
        if not isinstance(value, str):
            return json.dumps(value), "word"
        style = self.choices.random()
        if style < 0.1 and "'" not in value:
            return f"'''{value}'''", ""
        is_plain = (
            value.isprintable() and value == value.strip() and value[:1] not in tuple("{}[],:\"'#/")
        )
        if style < 0.5 and value and is_plain and not _NUMBER_LIKE.match(value):
            return value, "line"
        return self.quoted(value), ""
