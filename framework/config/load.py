"""The only door from files into `RunConfig`: YAML or JSON plus ``key=value`` overrides, with every
problem at its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from framework.config.base import TAG_KEYS
from framework.config.deepspeed_words import OWNED
from framework.config.explain import explain, homes_of, numbers_for_text
from framework.config.run_config import AUTO, RunConfig, auto_keys, kind_of_default
from framework.errors import ConfigError, Problem, UsageError, show_value
from framework.system.exits import end_in_one_line
from framework.text.document import (
    COMMAND_LINE,
    Document,
    KeyPath,
    at,
    document_of,
    parse_document,
    read_document,
)

_SETTING: Final = re.compile(r"([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)=(.*)", re.DOTALL)


class Source:
    """Origin of the values of a run, so that a problem found later can still name file and line."""

    def __init__(self, document: Document | None = None) -> None:
        self._document = document or Document("")
        self._overridden: set[KeyPath] = set()
        self.was_auto: frozenset[str] = frozenset()
        self.notes: list[Problem] = []
        """What is allowed, and seldom intended."""
        self.texts: dict[KeyPath, str] = dict(self._document.texts)
        """How numbers and truth values are written, where that is not how they would be shown."""
        if self._document.name and self._document.is_empty:
            reason = "the file is empty: every default holds"
            fix = "write at least {} if that is meant"
            self.notes.append(
                Problem("config-empty", reason, fix, file=self._document.name, severity="note")
            )

    def override(self, path: KeyPath, texts: Mapping[KeyPath, str] | None = None) -> None:
        """Remember that the command line set this key, and how it wrote what is under it."""
        self._overridden.add(path)
        kept = {known: text for known, text in self.texts.items() if known[: len(path)] != path}
        self.texts = kept | {(*path, *below): text for below, text in (texts or {}).items()}

    def is_override(self, path: KeyPath) -> bool:
        """Check whether the command line set this key itself, rather than a section around it."""
        return path in self._overridden

    def place(self, path: KeyPath) -> tuple[str, int, int]:
        """File, line and column (0 where unknown) of a key, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            part = path[:length]
            if any(part[: len(overridden)] == overridden for overridden in self._overridden):
                return COMMAND_LINE, 0, 0
            if part in self._document.places:
                return (self._document.name, *self._document.places[part])
            if any(overridden[:length] == part for overridden in self._overridden):
                return COMMAND_LINE, 0, 0
        return self._document.name, 0, 0

    def locate(self, problem: Problem, path: KeyPath | None = None) -> Problem:
        """The problem with its place filled in; `path` where the dots of its key do not tell."""
        if problem.file:
            return problem
        file, line, column = self.place(tuple(problem.key.split(".")) if path is None else path)
        return replace(problem, file=file, line=line, column=column)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run config.

    Args:
        path: a YAML or JSON file.
        overrides: dotted ``key=value`` settings; a value is YAML, so ``optimizer='{kind: sgd, lr:
            0.1}'`` replaces a section.

    Raises:
        ConfigError: with every problem found.
        UsageError: an override that is not ``key=value``.
    """
    end_in_one_line()
    values, source = _with_overrides(read_document(Path(path), name=str(path)), overrides)
    return config_from_values(values, source=source)


def load_with_source(
    path: str | Path, overrides: Sequence[str] = (), *, text: str | None = None
) -> tuple[RunConfig, Source]:
    """As `load_config`, for a run that has nothing but its file; and also where each value came
    from.

    Args:
        path: a YAML or JSON file.
        overrides: as for `load_config`.
        text: what the file holds, where it has been read already.
    """
    name = str(path)
    if text is None:
        document = read_document(Path(path), name=name)
    else:
        document = document_of(text, Path(path), name=name)
    values, source = _with_overrides(document, overrides)
    problems = [source.locate(problem) for problem in _handed_over(values)]
    try:
        config = config_from_values(values, source=source).noting_auto(source.was_auto)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config, source


def load_known(
    document: Document, overrides: Sequence[str]
) -> tuple[RunConfig, frozenset[str], Source]:
    """Of a file that `load_with_source` refuses: the sections that can be read, the names of the
    others, and the source.

    A section whose key stands in another one is among the others, and so is all that the file
    leaves out where it has a section of a name that there is not: that may have been meant.

    Raises:
        ConfigError: it is no mapping of sections, or an override does not go with it.
    """
    values, source = _with_overrides(deepcopy(document), overrides)
    try:
        return _validated(values, source), frozenset(), source
    except ValidationError as error:
        unknown = frozenset(_unknown_sections(explain(error, RunConfig), values))
    known = {
        name: section
        for name, section in values.items()
        if name in RunConfig.model_fields and name not in unknown
    }
    return RunConfig.model_validate(known), unknown, source


def _unknown_sections(
    found: Iterable[tuple[KeyPath, Problem]], values: Mapping[str, Any]
) -> Iterator[str]:
    for path, problem in found:
        yield str(path[0])
        if problem.kind == "unknown-key":
            name = str(path[-1])
            yield from (
                home.partition(".")[0]
                for home in (*homes_of(name, RunConfig), OWNED.get(name, name))
            )
            if len(path) == 1:
                yield from RunConfig.model_fields.keys() - values.keys()


def _with_overrides(document: Document, overrides: Sequence[str]) -> tuple[dict[str, Any], Source]:
    source = Source(document)
    values = {} if document.value is None else document.value
    if not isinstance(values, dict):
        raise ConfigError.of(
            "config-syntax",
            "a run config is a mapping of sections",
            "start with a section such as `run:`",
            file=document.name,
            value=values,
        )
    if isinstance(values.get("$schema"), str):  # where editors find the JSON Schema
        values = {name: section for name, section in values.items() if name != "$schema"}
    _refuse_doubled(overrides)
    source.was_auto = auto_keys(values)
    for override in overrides:
        _apply_override(values, override, source)
        source.was_auto |= auto_keys(values)
    return values, source


def _refuse_doubled(overrides: Sequence[str]) -> None:
    """One of the values was not meant, and nobody can know which."""
    first: dict[str, str] = {}
    problems = []
    for name, _, value in (override.partition("=") for override in overrides):
        if first.get(name, AUTO) != AUTO:  # a launcher adds its choice behind the word
            problems.append(
                Problem(
                    "setting-twice",
                    f"it is given twice, as {first[name]} and as {value}",
                    "give it once",
                    name,
                    file=COMMAND_LINE,
                )
            )
        first[name] = value
    if problems:
        raise ConfigError(problems)


def _handed_over(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Sections of a resolved config whose object existed only in the process that was given it."""
    for name in ("model", "data", "task", "optimizer"):
        section = values.get(name)
        if isinstance(section, Mapping) and section.get("object") is not None:
            yield Problem(
                "object-not-given",
                "it was handed over from Python and exists only there",
                f"name your code as {name}.target: package.module:name, or start from Python with "
                "framework.fit",
                f"{name}.object",
                section["object"],
            )


def config_from_values(
    values: Mapping[str, Any] | RunConfig, *, source: Source | None = None
) -> RunConfig:
    """Validate plain values; problems carry the places that `source` knows."""
    if isinstance(values, RunConfig):
        return values
    if not isinstance(values, Mapping):
        raise UsageError(
            f"a config is a RunConfig or nested dicts, not a {type(values).__name__}; read files "
            "with load_config"
        )
    source = source or Source()
    try:
        return _validated(values, source)
    except ValidationError as error:
        found = explain(error, RunConfig, texts=source.texts)
        problems = [
            source.locate(_of_another_kind(problem, path, values, source), path)
            for path, problem in found
        ]
        raise ConfigError(
            sorted(problems, key=lambda problem: (problem.file, problem.line, problem.column))
        ) from None


def _validated(values: Mapping[str, Any], source: Source) -> RunConfig:
    """A number from the command line is text where text belongs: a shell takes the quotes that
    would say so.
    """
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        typed = [path for path in numbers_for_text(error, RunConfig) if source.is_override(path)]
        if not typed:
            raise
        for *sections, key in typed:
            place = at(values, sections)
            place[key] = source.texts.get((*sections, key), show_value(place[key]))
        return RunConfig.model_validate(dict(values))


def _of_another_kind(
    problem: Problem, path: KeyPath, values: Mapping[str, Any], source: Source
) -> Problem:
    """A key that the file wrote for the kind it names, which the command line has changed."""
    section = path[:-1]
    tag = next((tag for tag in ("target", *TAG_KEYS) if source.is_override((*section, tag))), None)
    if problem.kind != "unknown-key" or tag is None or source.is_override(path):
        return problem
    kind = show_value(at(values, (*section, tag)))
    reason = f"{tag}={kind}, from the command line, has no such key"
    fix = f"replace the whole section: {'.'.join(map(str, section))}='{{{tag}: {kind}}}'"
    return replace(problem, reason=reason, fix=fix)


def _apply_override(values: dict[str, Any], override: str, source: Source) -> None:
    match = _SETTING.fullmatch(override)
    if not match:
        raise UsageError(
            f"{override}: not a setting; write section.key=value, for example optimizer.lr=0.01"
        )
    path: KeyPath = tuple(match[1].split("."))
    try:
        parsed = parse_document(match[2], name=COMMAND_LINE)
    except ConfigError:
        parsed = Document(COMMAND_LINE, match[2])
    value = parsed.value
    section: Any = values
    for depth, part in enumerate(path[:-1], start=1):
        if section.get(part) is None or (
            part == "parallel" and section[part] == AUTO
        ):  # left out, or written with nothing under it: its default is what is changed
            section[part] = kind_of_default(str(part)) if depth == 1 else {}
        section = section[part]
        if not isinstance(section, dict):
            key = ".".join(map(str, path[:depth]))
            raise ConfigError.of(
                "override-not-a-section",
                f"{key} holds a value, not a section",
                f"set {key} itself",
                match[1],
                value,
                file=COMMAND_LINE,
            )
    section[path[-1]] = value
    source.override(path, parsed.texts)
