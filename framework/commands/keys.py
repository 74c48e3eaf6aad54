"""The `keys` command: finds keys of a run config, by their names, their sentences, or the words of
other trainers; and explains kinds of problems.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from framework.commands.explained import explain_kind
from framework.config.key_list import KeyForm, key_forms
from framework.config.other_words import words_named
from framework.errors import EXIT_OK, EXIT_PROBLEMS
from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser

_MOST_IN_FULL: Final = 8
_NARROWEST: Final = 40
_WIDEST: Final = 100


def main(words: Sequence[str]) -> int:
    """Print the keys that a word finds, or all; returns the exit code, 2 where it finds none."""
    arguments = parse_command("keys", _add_arguments, words)
    keys = key_forms()
    if arguments.names:
        print("\n".join(keys))
        return EXIT_OK
    if arguments.word is None:
        print("\n".join(_short(key, width=_width()) for key in keys))
        return EXIT_OK
    explained = explain_kind(arguments.word.strip("[]"), width=_width())
    if explained:
        print(explained)
        return EXIT_OK
    notes = list(_other_tools(arguments.word))
    found = find_keys(arguments.word)
    if not found and not notes:
        print(f"no key has {arguments.word} in its name or its sentence; `dsf keys` lists all")
        print("a kind of problem that is not explained here has cause and fix in its message")
        return EXIT_PROBLEMS
    for note in notes:
        print("\n".join(textwrap.wrap(note, _width())))
    _print_found(found)
    return EXIT_OK


def _print_found(found: Sequence[str]) -> None:
    """Print keys: a line for each of many, few in full."""
    if len(found) > _MOST_IN_FULL:
        print("\n".join(_short(key, width=_width()) for key in found))
    else:
        keys = key_forms()
        print("\n\n".join(_in_full(key, keys[key], width=_width()) for key in found))


def _add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Find keys of a run config, with type, default, meaning and an example. Words of Hugging "
        "Face, Lightning, accelerate, torchtitan and DeepSpeed find the keys that stand for them. "
        "The kind of a problem, in brackets at the end of a message, shows its cause and its fix."
    )
    parser.add_argument(
        "word",
        nargs="?",
        metavar="WORD",
        help="a key, a part of one, a word, or a kind of problem; left out: all keys",
    )
    parser.add_argument("--names", action="store_true", help="print the names of all keys alone")


def find_keys(word: str) -> list[str]:
    """Return the keys that a word finds: keys of this name and keys that it stands for in other
    tools; else keys with the word in their names; else keys with it in their sentences.
    """
    keys = key_forms()
    plain = _as_key(word)
    exact = [key for key in keys if plain in (key, key.rpartition(".")[2])]
    if exact and "." in plain:
        return [key for key in keys if f"{key}.".startswith(f"{plain}.")]
    of_other_tools = _keys_of_other_tools(plain, list(keys))
    if exact or of_other_tools:
        return list(dict.fromkeys([*exact, *of_other_tools]))
    in_names = [key for key in keys if plain in key]
    return in_names or _keys_by_sentence(word)


def _keys_of_other_tools(plain: str, keys: Sequence[str]) -> list[str]:
    """Return our keys that an argument of another tool stands for."""
    section, _, name = plain.rpartition(".")
    found: list[str] = []
    for other in words_named(name, section):
        found += [key for key in keys if key in other.keys]
        found += [key for key in keys if key.partition(".")[0] in other.keys]
    return found


def _keys_by_sentence(word: str) -> list[str]:
    """Return the keys with a word in the sentence about them."""
    text = re.escape(word.lower().replace("_", " "))
    found = []
    for key, forms in key_forms().items():
        if any(re.search(text, form.meaning.lower()) for form in forms):
            found.append(key)
    return found


def _as_key(word: str) -> str:
    return re.sub("[- ]", "_", word.lower()).partition("=")[0]


def _other_tools(word: str) -> Iterator[str]:
    """Yield what a word of other tools is here."""
    section, _, name = _as_key(word).rpartition(".")
    hints = [other.hint() for other in words_named(name, section)]
    yield from dict.fromkeys(hints)


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def _short(key: str, *, width: int) -> str:
    meaning = _plain(key_forms()[key][0].meaning)
    text = f"{key:<34} {meaning}"
    if len(text) <= width:
        return text
    return f"{text[: width - 4].rpartition(' ')[0]} ..."


def _in_full(key: str, forms: Sequence[KeyForm], *, width: int) -> str:
    """Return a key with each of its forms: type, default, meaning and an example."""
    lines = [key]
    shown = ""
    for form in forms:
        default = f"default {_plain(form.default)}" if form.default else "required"
        head = f"{_plain(form.type)}; {default}"
        if len(forms) > 1 and form.kinds:
            head += f"; of {', '.join(form.kinds)}"
        texts = [head, _plain(form.meaning)]
        if form.meaning == shown:
            texts.pop()
        shown = form.meaning
        for text in texts:
            lines += textwrap.wrap(text, width - 2, initial_indent="  ", subsequent_indent="    ")
    lines.append(f"  {key}={forms[0].example}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return text.replace("`", "")
