"""Pages of the reference, written from the code: config keys, commands, exit codes, problems, the
Python API.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final
from unittest import mock

import framework
from framework import sections
from framework.commands.completion import parser_of
from framework.commands.explained import explanations
from framework.commands.table import BUILT_IN, find_command
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH, TYPED
from framework.config.key_list import schema_sections, sentences, type_words, value_words
from framework.system.command_names import BY_NAME
from tools.docs_site.kinds import Kind, find_kinds

_COMMANDS: Final = (*(command.name for command in BUILT_IN), "train.py")
# What a room of `framework/` reports about.
_ROOMS: Final[Mapping[str, str]] = {
    "config": "Run configs: keys and values",
    "text": "Files of settings",
    "plan": "Run configs: rules between keys",
    "deepspeed_lint": "DeepSpeed JSON",
    "imports": "Files of other trainers",
    "setup": "Models, data and optimizers of your own",
    "models": "Models of your own",
    "tasks": "Tasks",
    "data": "Data",
    "recipes": "Shipped models and data",
    "engine": "Training",
    "train": "Run folder and metrics",
    "checkpoint": "Checkpoints",
    "hosts": "Hosts and devices",
    "launch": "Starting on hosts",
    "doctor": "Doctor and preflight",
    "deploy": "Kubernetes and Slurm",
    "commands": "Commands",
    "report": "Reports",
    "system": "Processes",
}
# Kinds of run configs that the linter reports as well.
_OF_RUN_CONFIGS: Final = frozenset({"config-syntax", "missing-key", "unknown-key", "wrong-type"})


def reference_pages() -> dict[str, str]:
    """Path below `docs/` -> Markdown."""
    return {
        "reference/config.md": config_page(),
        "reference/commands.md": commands_page(),
        "reference/exit-codes.md": exit_codes_page(),
        **problem_pages(),
        "reference/python.md": python_page(),
    }


def config_keys() -> dict[str, str]:
    """Every dotted key of a run config -> its sentence; of several kinds the first."""
    found: dict[str, str] = {}
    for _, path, schema in schema_sections():
        for name, field in schema.get("properties", {}).items():
            found.setdefault(f"{path}.{name}".strip("."), field.get("description", ""))
    return found


def config_page() -> str:
    """Every key with type, default, meaning and the DeepSpeed key that it becomes."""
    lines = [
        "# Config keys\n",
        "Every key of a run config, from its JSON Schema (`dsf schema`). Every key may",
        "be left out, unless",
        "it is *required*. Settings on a command line are dotted: `optimizer.lr=0.01`. Behind an arrow",
        "stand the keys of",
        "DeepSpeed's JSON that a key decides; `dsf render FILE` prints their values.\n",
    ]
    theirs = _rendered()
    for title, path, schema in {
        title: (title, path, schema) for title, path, schema in schema_sections()
    }.values():
        lines += [f"{'#' * (2 + (title.count(' ') > 0))} {title}\n", f"{sentences(schema)}\n"]
        properties = {
            name: field
            for name, field in schema.get("properties", {}).items()
            if "const" not in field
        }
        if path in ("model", "data", "task") and "target" in properties:
            lines.append(f"Where `{path}` names code of your own.\n")
        if properties:
            lines += ["| key | type, default | meaning |", "|---|---|---|"]
        for name, field in properties.items():
            key = f"{path}.{name}".strip(".")
            default = (
                "*required*"
                if name in schema.get("required", ())
                else value_words(field.get("default"))
            )
            becomes = f" → {', '.join(f'`{each}`' for each in theirs[key])}" if theirs[key] else ""
            cells = f"`{key}`", f"{type_words(field)}<br>{default}", sentences(field) + becomes
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        lines.append("")
    passed = ", ".join(f"`{name}`" for name in sorted(PASSED_THROUGH))
    lines += [
        "## deepspeed\n",
        f"Further keys of DeepSpeed's JSON, passed through after a check: {passed}. Sections that a run",
        "config decides in",
        "part (`zero_optimization`, `fp16`, `optimizer` ...) take their other keys here too. A key that",
        "a section above",
        "decides is refused [section-clash]. `dsf schema deepspeed` has a sentence for each key.\n",
    ]
    return "\n".join(lines)


def _rendered() -> Mapping[str, list[str]]:
    """Our key -> DeepSpeed's, without DeepSpeed's other names for one."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for their, our in TYPED.items():
        is_alias = ("zero.stage3_" in our and "stage3_" not in their) or "cpu_offload" in their
        if not is_alias and "gather_fp16" not in their:
            found[our].append(their)
    for their, our in OWNED.items():
        if "." in our:
            found[our].append(their)
    return found


def _cell(text: str) -> str:
    """Text in a table: bars would end the cell, and tags are no HTML; code is left as it is."""
    parts = re.split(r"(`[^`]*`|<br>|\*required\*)", text)
    return "".join(
        part.replace("|", "\\|") if i % 2 else _plain(part) for i, part in enumerate(parts)
    )


def _plain(text: str) -> str:
    return re.sub(r"([|*_\[\]])", r"\\\1", text).replace("<", "&lt;")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Command -> the parser that reads its words."""
    from framework import script

    found: dict[str, argparse.ArgumentParser] = {}
    for name in _COMMANDS:
        if name == "train.py":
            found[name] = script._parser()
            continue
        command, _ = find_command(name.split())
        parser = parser_of(command.main)
        assert parser is not None, name
        found[name] = parser
    return found


def commands_page() -> str:
    """Every command with its options."""
    lines = [
        "# Commands\n",
        "`dsf COMMAND`, also `python -m framework COMMAND`; in a checkout `./launch.sh COMMAND` sets up",
        "an environment first (`node` there is `launch node`). `key=value` are settings that win",
        "over the file.\n",
    ]
    for name, parser in parsers().items():
        about = parser.description or BY_NAME[name].help
        lines += [f"## {name}\n", f"{_tidy(about)}\n", f"```\n{_usage(parser)}\n```\n"]
        rows = []
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
                continue
            shown = action.option_strings
            value = "" if action.nargs == 0 else _metavar(action)
            words = " ".join(filter(None, (", ".join(shown), value))) if shown else _metavar(action)
            rows.append(
                f"| `{words.replace('|', chr(92) + '|')}` | {_cell(_tidy(_help_of(parser, action)))} |"
            )
        lines += ["| option | |", "|---|---|", *rows, ""] if rows else []
        if name in BY_NAME:
            lines += ["```", *BY_NAME[name].examples, "```\n"]
            lines.append(
                f"More: [{BY_NAME[name].page}](../{BY_NAME[name].page.removeprefix('docs/')}).\n"
            )
    return "\n".join(lines)


def _usage(parser: argparse.ArgumentParser) -> str:
    with mock.patch.dict("os.environ", {"COLUMNS": "110"}):
        text = parser.format_usage().removeprefix("usage: ").rstrip()
    return re.sub(r"\n +", "\n    ", text)


def _metavar(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _tidy(text: str) -> str:
    words = " ".join(text.split())
    return (
        words[:1].upper()
        + words[1:]
        + ("" if words.endswith((".", "?", ":")) else "." if words else "")
    )


def exit_codes_page() -> str:
    """Every exit code: its name in `framework/errors.py`, and the error that ends a process with
    it.
    """
    from framework import errors

    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.FrameworkError)
    ]
    by_code: defaultdict[int, list[type]] = defaultdict(list)
    for each in classes:
        if each is not errors.FrameworkError:
            by_code[each.exit_code].append(each)
    lines = [
        "# Exit codes\n",
        "Of `./launch.sh`, `launch`, `deepspeed` and `python`; torchrun itself ends with 1 and prints",
        "its ranks' codes. 64 and",
        "78 never work at a second try; the others may. A process that a signal ends has 128 + its number.\n",
        "| code | name | meaning | error in Python |",
        "|---|---|---|---|",
    ]
    names = {value: name for name, value in vars(errors).items() if name.startswith("EXIT_")}
    for code, name in sorted(names.items()):
        about = " ".join(_first(each.__doc__) for each in by_code[code]) or _CODES[code]
        errors_ = ", ".join(f"`{each.__name__}`" for each in by_code[code])
        lines.append(f"| {code} | `{name}` | {_cell(about)} | {errors_} |")
    lines += [
        "| 130 | | Ctrl-C, where nothing was to be saved. | |",
        "| 128 + n | | Killed by signal n. | |",
        "",
    ]
    return "\n".join(lines)


# Codes without an error of their own.
_CODES: Final[Mapping[int, str]] = {
    0: "Finished; of `check`: nothing is wrong.",
    2: "`check` found problems.",
    77: "No progress: a hang.",
}


def _first(doc: str | None) -> str:
    return " ".join((doc or "").strip().partition("\n\n")[0].replace("``", "`").split())


def problem_pages() -> dict[str, str]:
    """Path below `docs/` -> Markdown: a list of every kind of problem, and a page for each subject
    with cause and cure of its kinds.
    """
    kinds = find_kinds()
    explained = explanations()
    unknown = sorted(set(explained) - set(kinds))
    assert not unknown, f"problems.yaml explains kinds that there are not: {unknown}"
    left = sorted({kind.room for kind in kinds.values()} - set(_ROOMS))
    assert not left, f"name these rooms in _ROOMS: {left}"
    index = [
        "# Problems\n",
        f"There are {len(kinds)} kinds of errors, warnings and notes. A message ends with its kind in",
        "brackets, such as `[unknown-key]`. Search the site for the kind: its section has the cause",
        "and the fix. Kinds do not change between releases; messages may. `--json` and",
        "`--format json` of `check` have it as `kind`. In a sentence `{...}` is a value of your run.\n",
    ]
    pages = {}
    for room, title in _ROOMS.items():
        found = [kind for kind in kinds.values() if _subject(kind) == room]
        if not found:
            continue
        slug = room.replace("_", "-")
        links = [f"[`{each.name}`](problems/{slug}.md#{each.name})" for each in found]
        index += [f"## {title}\n", f"{', '.join(links)}\n"]
        parts = [f"# Problems: {title[:1].lower()}{title[1:]}\n"]
        for each in found:
            parts += _problem(each, explained.get(each.name, {}))
        pages[f"reference/problems/{slug}.md"] = "\n".join(parts)
    return {"reference/problems.md": "\n".join(index), **pages}


def _subject(kind: Kind) -> str:
    """Return the room on whose page the kind stands."""
    return "config" if kind.name in _OF_RUN_CONFIGS else kind.room


def _problem(kind: Kind, explained: Mapping[str, str]) -> Iterator[str]:
    """Yield the section of a kind: what is seen, the cause, the cure, and where to read on."""
    yield f"## {kind.name}\n"
    if kind.severity:
        yield f"{kind.severity.capitalize()}.\n"
    if "seen" in explained:
        yield f"```\n{explained['seen'].strip()}\n```\n"
    yield f"**Cause**: {_sentence(explained.get('cause') or _literal(kind.cause))}\n"
    cure = explained.get("cure") or _literal(kind.cure)
    if cure:
        yield f"**Fix**: {_sentence(cure)}\n"
    if kind.source:
        yield f"Shown by {_sentence(kind.source)}\n"
    if "see" in explained:
        yield f"See {explained['see'].strip()}.\n"


def _literal(words: str) -> str:
    """Return the text of a message for Markdown, with its values as code."""
    return re.sub(r"\{[^{}]*\}", lambda value: f"`{value[0]}`", words.replace("<", "&lt;"))


def _sentence(words: str) -> str:
    words = words.strip()
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def python_page() -> str:
    """The public names of `framework` with signatures and docstrings."""
    lines = [
        "# Python API\n",
        "`import framework` loads no torch; what needs it is imported at its first use. Everything else",
        "in the package may",
        "change between releases.\n",
    ]
    for name in framework.__all__:
        thing = getattr(framework, name)
        lines.append(f"## framework.{name}\n")
        if name == "RunConfig":
            lines += [
                f"{_first(thing.__doc__)} Its keys: [config keys](config.md). Made by `load_config`, or of",
                f"the classes of its sections: {', '.join(f'`{each}`' for each in sections.__all__)}.\n",
            ]
        else:
            lines += [f"```python\n{_signature(name, thing)}\n```\n", *_doc(thing)]
        if isinstance(thing, type):
            for part, member in vars(thing).items():
                if part.startswith(("_", "model_")) or not inspect.getdoc(member):
                    continue
                if isinstance(member, (classmethod, staticmethod)):
                    member = member.__func__
                if inspect.isfunction(member):
                    lines += [
                        f"### {name}.{part}\n",
                        f"```python\n{_signature(part, member)}\n```\n",
                        *_doc(member),
                    ]
                elif isinstance(member, property):
                    lines += [f"### {name}.{part}\n", *_doc(member)]
    return "\n".join(lines)


def _signature(name: str, thing: Any) -> str:
    parameters = str(inspect.signature(thing)).replace("'", "")
    text = f"{name}{parameters}"
    if len(text) <= 100:
        return text
    inner, _, end = parameters[1:].rpartition(")")
    depth, words = 0, [""]
    for letter in inner:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            words.append("")
        else:
            words[-1] += letter
    return "\n".join([f"{name}(", *(f"    {word.strip()}," for word in words), f"){end}"])


def _doc(thing: Any) -> Iterator[str]:
    """A docstring as Markdown: its sections of arguments become lists."""
    for block in re.split(r"\n\s*\n", inspect.getdoc(thing) or ""):
        title, _, rest = block.partition("\n")
        if not re.fullmatch(r"(Args|Raises|Returns|Attributes|Yields):", title):
            yield f"{block.replace('``', '`')}\n"
            continue
        yield f"**{title[:-1]}**\n"
        for item in re.split(r"\n {4}(?=\S)", f"\n{rest}")[1:]:
            names, colon, about = " ".join(item.split()).replace("``", "`").partition(": ")
            yield f"- `{names}`: {about}" if colon else f"- {names}"
        yield ""
