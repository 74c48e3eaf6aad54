"""Manifests as text that Kubernetes reads as it was meant, with a comment where a value is a decision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

# Text that needs no quotes for any reader. The one of Kubernetes (Go) takes 1e3 for a number and y for a truth value,
# which PyYAML writes without quotes; so everything that does not look like a word or a quantity gets them.
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./@:=+-]*|--?[a-z_]+|[0-9]+(m|[KMGT]i)")
_TRUTH: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_LONG: Final = 10_000


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _TRUTH and not text.endswith(":")
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list(dumper: yaml.SafeDumper, values: Sequence[Any]) -> yaml.SequenceNode:
    flow = all(isinstance(value, int) or (isinstance(value, str) and len(values) == 1) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def write_yaml(documents: Iterable[Mapping[str, Any]], *, heading: str = "", reasons: Mapping[str, str]) -> str:
    """The text of a file with these documents, keys in the order they have.

    Args:
        documents: what to write.
        heading: comment at the top.
        reasons: comments to write above a key, by the key's dotted path or the end of it; the first of a document has
            it.
    """
    parts = [_with_reasons(_dump(document), reasons) for document in documents]
    top = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return top + "---\n".join(parts)


def _dump(document: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=_LONG, allow_unicode=True)
    return text


def _with_reasons(text: str, reasons: Mapping[str, str]) -> str:
    comments: dict[int, str] = {}
    done: set[str] = set()
    lines = text.splitlines(keepends=True)
    for path, mark in _keys(yaml.compose(text, Loader=yaml.SafeLoader), ()):
        ends = (".".join(path[start:]) for start in range(len(path)))
        found = next((end for end in ends if end in reasons and end not in done), None)
        if found is not None:
            done.add(found)
            indent = len(lines[mark]) - len(lines[mark].lstrip(" "))
            comments[mark] = comments.get(mark, "") + "".join(
                f"{' ' * indent}# {line}\n" for line in reasons[found].splitlines()
            )
    return "".join(comments.get(number, "") + line for number, line in enumerate(lines))


def _keys(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path of every key, indices left out, and the number of its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line
            yield from _keys(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _keys(value, path)
