"""Edits of a run config's text: comments, order and the lines that mean the same stay as they are.

JSON is edited by `deepspeed_lint.text.edits`, YAML by ruamel.yaml. ruamel.yaml keeps comments,
quotes, numbers as they are written, and anchors, but it lays every line out anew. So the file is
written by it twice, before and after the edits, and only the lines that differ between the two come
into the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from deepspeed_lint.text.document import (
    BYTE_ORDER_MARK,
    Document,
    KeyPath,
    parse_document,
    parse_scalar,
)
from deepspeed_lint.text.edits import (
    Edit,
    InsertMember,
    MoveMember,
    RemoveMember,
    RenameKey,
    ReplaceValue,
    apply_edits,
    check_fit,
    edited_value,
)
from deepspeed_lint.text.json_editor import EditError
from framework.errors import ConfigError

if TYPE_CHECKING:  # its import takes a third of a second
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.tokens import CommentToken

# the key of a member, and the blanks before its value
_KEY: Final = re.compile(r"(\s*[^\s#:]+:)( +)(?=\S)")
_WIDEST: Final = 1_000_000  # ruamel.yaml would break longer lines


def edited(document: Document, edits: Sequence[Edit]) -> str | None:
    """Return the text with all edits made, None where they cannot be made for sure."""
    try:
        if document.syntax == "yaml":
            return _edited_yaml(document, edits)
        return apply_edits(document, edits)
    except (EditError, ConfigError):
        return None


def _edited_yaml(document: Document, edits: Sequence[Edit]) -> str:
    """Return the text of a YAML document with all edits made.

    Raises:
        EditError: the edits do not fit, or a comment of another member would be lost.
        ConfigError: the text would grow beyond what can be read.
    """
    from ruamel.yaml.error import YAMLError

    check_fit(document, edits)
    mark = BYTE_ORDER_MARK if document.text.startswith(BYTE_ORDER_MARK) else ""
    text = document.text.removeprefix(mark)
    try:
        yaml = _reader(document)
        root = yaml.load(text)
        before = _dumped(yaml, root)
        _make_edits(root, edits, yaml)
        after = _dumped(yaml, root)
    except (YAMLError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EditError(f"ruamel.yaml: {error}") from error
    file_lines = text.splitlines(keepends=True)
    newline = "\r\n" if file_lines[0].endswith("\r\n") else "\n"
    has_end = text.endswith(("\n", "\r"))
    if not has_end:
        file_lines[-1] += newline
    result = mark + "".join(_merged(file_lines, before, after, newline))
    if not has_end:
        result = result.removesuffix(newline)
    value = parse_document(result, name=document.name).value
    expected = edited_value(document.value, edits)
    if value != expected and repr(value) != repr(expected):  # NaN is not equal to itself
        raise EditError(f"{edits} went wrong")
    if _comment_lines(result) != _comment_lines(document.text):
        raise EditError("a comment would be lost")
    return result


def _comment_lines(text: str) -> list[str]:
    lines = map(str.strip, text.splitlines())
    return sorted(line for line in lines if line.startswith("#"))


def _reader(document: Document) -> YAML:
    """Return a reader and writer with the indentation of the document's sections."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDEST
    for path, (line, column) in document.places.items():
        if len(path) == 2 and line > document.places[path[:1]][0]:
            yaml.map_indent = column - 1
            break
    return yaml


def _dumped(yaml: YAML, root: Any) -> list[str]:
    stream = StringIO()
    yaml.dump(root, stream)
    return stream.getvalue().splitlines()


# ---- edits of ruamel.yaml's values


def _make_edits(root: CommentedMap, edits: Sequence[Edit], yaml: YAML) -> None:
    """Make the edits in the order that `edited_value` has: additions come last, and of the renamed
    keys the inner ones first.
    """
    additions: list[tuple[KeyPath, Any, CommentToken | None]] = []
    names: list[tuple[KeyPath, str]] = []
    for edit in edits:
        section = _section(root, edit.path[:-1])
        match edit:
            case RenameKey(path, name):
                names.append((path, name))
            case MoveMember((*_, key), to):
                comment = _line_comment(section, key)
                additions.append((to, section.pop(key), comment))
            case RemoveMember((*_, key)):
                del section[key]
            case ReplaceValue((*_, key), value):
                section[key] = _as_written(value, section[key], yaml)
            case InsertMember(path, value):
                additions.append((path, _flow(value), None))
    for path, value, comment in additions:
        _add(root, path, value, comment)
    for path, name in sorted(names, key=lambda item: len(item[0]), reverse=True):
        _rename(_section(root, path[:-1]), path[-1], name)


def _section(root: CommentedMap, path: KeyPath) -> Any:
    """Return the innermost section of a path that is there."""
    section: Any = root
    for key in path:
        if isinstance(section, dict) and key not in section:
            return section
        section = section[key]
    return section


def _as_written(value: Any, old: Any, yaml: YAML) -> Any:
    """Return a new value; a number that was text keeps its digits: 1e-3, not 0.001."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and isinstance(old, str) and parse_scalar(old.strip()) == value:
        return yaml.load(old.strip())
    return _flow(value)


def _flow(value: Any) -> Any:
    """Return a value as ruamel.yaml writes it on one line."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    written: CommentedMap | CommentedSeq
    if isinstance(value, dict):
        written = CommentedMap({key: _flow(item) for key, item in value.items()})
    elif isinstance(value, list):
        written = CommentedSeq(map(_flow, value))
    else:
        return value
    written.fa.set_flow_style()
    return written


def _rename(section: CommentedMap, key: Any, name: str) -> None:
    """Give a member another key, in the quotes of the old one."""
    keys = list(section)
    place = keys.index(key)
    new_key = type(keys[place])(name)
    comment = section.ca.items.pop(key, None)
    section.insert(place, new_key, section.pop(key))
    if comment is not None:
        section.ca.items[new_key] = comment


def _add(root: CommentedMap, path: KeyPath, value: Any, comment: CommentToken | None) -> None:
    """Put a value at a path, before what stands below its section; sections on the way that are
    missing are made.
    """
    from ruamel.yaml.comments import CommentedMap

    section = root
    for key in path[:-1]:
        if key not in section:
            _append(section, key, CommentedMap(), None)
        section = section[key]
    _append(section, path[-1], value, comment)


def _append(section: CommentedMap, key: Any, value: Any, comment: CommentToken | None) -> None:
    """Put a member after the last one, whose token also has the lines below the section."""
    below = _take_below(section)
    section[key] = value
    if comment is None and below is None:
        return
    text = ""
    column = 0
    if comment is not None:
        text = comment.value.partition("\n")[0]
        column = comment.start_mark.column
    lines = "\n"
    if below is not None:
        lines = "\n" + below
    _set_comment(section, key, text + lines, column)


def _line_comment(section: CommentedMap, key: Any) -> CommentToken | None:
    """Return the comment in a member's line, or None."""
    tokens = section.ca.items.get(key)  # the third one stands after the value
    if not tokens or tokens[2] is None or not tokens[2].value.startswith("#"):
        return None
    comment: CommentToken = tokens[2]
    return comment


def _take_below(section: CommentedMap) -> str | None:
    """Take the lines below the last member out of its token, and return them."""
    last: Any = section
    while isinstance(last, (dict, list)) and last:
        place = 0  # of the token after a value among the tokens of a member
        key: Any = len(last) - 1
        if isinstance(last, dict):
            place = 2
            key = next(reversed(last))
        tokens = last.ca.items.get(key)  # type: ignore[union-attr]
        if tokens and tokens[place] is not None and "\n" in tokens[place].value:
            line, _, below = tokens[place].value.partition("\n")
            tokens[place].value = line + "\n"
            return str(below)
        last = last[key]
    return None


def _set_comment(section: CommentedMap, key: Any, text: str, column: int) -> None:
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    token = CommentToken(text, CommentMark(column), None)
    section.ca.items[key] = [None, None, token, None]


# ---- lines that change


@dataclass(frozen=True)
class _Piece:
    """Lines of the file, and the numbers of those that ruamel.yaml writes for them: from `begin` to
    before `end`.
    """

    file_lines: Sequence[str]
    begin: int
    end: int


def _merged(
    file_lines: Sequence[str], before: Sequence[str], after: Sequence[str], newline: str
) -> Iterator[str]:
    """Yield the lines of a file with the changes between two texts of ruamel.yaml.

    Args:
        file_lines: lines of the file, with their ends.
        before: as ruamel.yaml writes the file.
        after: as it writes it with the edits.
        newline: end of a new line.
    """
    kept, replaced = _matched(before, after)
    done = 0  # lines of `after` that are in the result
    for piece in _pieces(file_lines, before):
        places = range(piece.begin, piece.end)
        if not places or all(place in kept for place in places):
            # The edits change none of these lines: they stay as the file has them, after new ones.
            if places:
                yield from _ended(after[done : kept[piece.begin]], newline)
                done = kept[piece.end - 1] + 1
            yield from piece.file_lines
        elif len(places) == len(piece.file_lines) == 1 and piece.begin in replaced:
            # A line with another value: the file's blanks, and ruamel.yaml's text.
            line = replaced[piece.begin]
            yield from _ended(after[done:line], newline)
            yield _laid_out(after[line], like=piece.file_lines[0]) + newline
            done = line + 1
        elif all(not line.strip() or line.lstrip().startswith("#") for line in piece.file_lines):
            # Blank lines and comments always stay. Other lines are gone, or follow from `after`.
            yield from piece.file_lines
    yield from _ended(after[done:], newline)


def _ended(lines: Sequence[str], newline: str) -> Iterator[str]:
    for line in lines:
        yield line + newline


def _matched(before: Sequence[str], after: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the lines that stay and those that are replaced one by one, by their numbers."""
    kept: dict[int, int] = {}
    replaced: dict[int, int] = {}
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for tag, begin, end, new_begin, new_end in matcher.get_opcodes():
        pairs = dict(zip(range(begin, end), range(new_begin, new_end), strict=False))
        if tag == "equal":
            kept |= pairs
        elif tag == "replace" and end - begin == new_end - new_begin:
            replaced |= pairs
    return kept, replaced


def _pieces(file_lines: Sequence[str], before: Sequence[str]) -> Iterator[_Piece]:
    """Yield the lines of a file with the numbers of ruamel.yaml's lines for them: single ones that
    differ in blanks alone, and blocks of others.
    """
    texts = _without_blanks(file_lines)
    matcher = SequenceMatcher(None, texts, _without_blanks(before), autojunk=False)
    for tag, begin, end, dump_begin, dump_end in matcher.get_opcodes():
        if tag == "equal":
            for number in range(end - begin):
                place = dump_begin + number
                line = begin + number
                yield _Piece(file_lines[line : line + 1], place, place + 1)
        else:
            yield _Piece(file_lines[begin:end], dump_begin, dump_end)


def _without_blanks(lines: Sequence[str]) -> list[str]:
    return ["".join(line.split()) for line in lines]


def _laid_out(line: str, *, like: str) -> str:
    """Return a line with the blanks between key and value that another line has; its comment stays
    in its column.
    """
    old = _KEY.match(like)
    new = _KEY.match(line)
    if old is None or new is None:
        return line
    blanks = len(old[2]) - len(new[2])
    indent = like[: len(like) - len(like.lstrip())]
    wider = indent + new[1].lstrip() + old[2] + line[new.end() :]
    if blanks > 0:
        return re.sub(rf"(?<=\S) {{{blanks}}}(?= +#)", "", wider, count=1)
    return wider
