"""Lines and tables that fit the width of a terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

# Columns where no terminal shows the output and COLUMNS is not set.
_USUAL_WIDTH: Final = 100
_LEAST_WIDTH: Final = 40
_CONTINUED: Final = "            "
# A space that a line is not folded at, and is none that a text has.
_KEPT: Final = "\0"
_SIZE: Final = re.compile(r"(?<=\d) (?=(?:GiB|MiB|s|%)\b)")


def width() -> int:
    """Return the columns to write in: by COLUMNS, or else of the terminal."""
    columns = shutil.get_terminal_size(fallback=(_USUAL_WIDTH, 24)).columns
    return max(columns, _LEAST_WIDTH)


def folded(line: str, columns: int) -> list[str]:
    """Return a line in pieces that fit `columns`; a number and its unit stay together. A longer
    word, such as a path, stays whole.
    """
    if len(line) <= columns:
        return [line]
    pieces = textwrap.wrap(
        _SIZE.sub(_KEPT, line),
        columns,
        subsequent_indent=_CONTINUED,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [piece.replace(_KEPT, " ") for piece in pieces]


def blocks(columns: Sequence[Sequence[str]], num_keys: int, width: int) -> Iterator[list[str]]:
    """Yield the lines of a table, in blocks that fit `width` one below the other.

    Args:
        columns: cells of each column, title first, all of the column's width.
        num_keys: the first columns, which every block begins with.
        width: of a line.
    """
    keys = list(columns[:num_keys])
    block = list(keys)
    for column in columns[num_keys:]:
        if len(block) > num_keys and _width_of([*block, column]) > width:
            yield _lines_of(block)
            block = list(keys)
        block.append(column)
    yield _lines_of(block)


def _width_of(block: Sequence[Sequence[str]]) -> int:
    return sum(len(column[0]) + 1 for column in block) - 1


def _lines_of(block: Sequence[Sequence[str]]) -> list[str]:
    return [" ".join(cells) for cells in zip(*block, strict=True)]
