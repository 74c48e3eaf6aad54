"""Load a `RunConfig` from YAML or JSON plus ``key=value`` overrides, with every problem at its
place. There is no other way from files into `RunConfig`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from deepspeed_lint.text.document import (
    COMMAND_LINE,
    Document,
    KeyPath,
    at,
    document_of,
    parse_document,
    read_document,
)
from framework.config.base import TAG_KEYS
from framework.config.deepspeed_words import OWNED
from framework.config.run_config import AUTO, RunConfig, auto_keys, kind_of_default
from framework.errors import ConfigError, Problem, UsageError, show_value
from framework.system.exits import end_in_one_line

_SETTING: Final = re.compile(r"([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)=(.*)", re.DOTALL)


class Source:
    """Origin of the values of a run, so that a problem found later can still name file and line."""

    def __init__(self, document: Document | None = None) -> None:
        self._document = document or Document("")
        self._overridden: set[KeyPath] = set()
        self.was_auto: frozenset[str] = frozenset()
        self.notes: list[Problem] = []
        """Notes on things that are allowed, and seldom intended."""
        self.texts: dict[KeyPath, str] = dict(self._document.texts)
        """Texts of numbers and truth values that are written otherwise than they would be shown."""
        if self._document.name and self._document.is_empty:
            reason = "the file is empty: every default holds"
            fix = "write at least {} if that is meant"
            self.notes.append(
                Problem("config-empty", reason, fix, file=self._document.name, severity="note")
            )

    def override(self, path: KeyPath, texts: Mapping[KeyPath, str] | None = None) -> None:
        """Remember that the command line set this key, and the texts of the values under it."""
        self._overridden.add(path)
        kept = {known: text for known, text in self.texts.items() if known[: len(path)] != path}
        for below, text in (texts or {}).items():
            kept[path + below] = text
        self.texts = kept

    def is_override(self, path: KeyPath) -> bool:
        """Check whether the command line set this key itself, rather than a section around it."""
        return path in self._overridden

    def place(self, path: KeyPath) -> tuple[str, int, int]:
        """Return file, line and column of a key, or of the nearest section around it.

        Line and column are 0 where they are unknown.
        """
        for length in range(len(path), 0, -1):
            part = path[:length]
            if any(part[: len(overridden)] == overridden for overridden in self._overridden):
                return COMMAND_LINE, 0, 0
            if part in self._document.places:
                line, column = self._document.places[part]
                return self._document.name, line, column
            if any(overridden[:length] == part for overridden in self._overridden):
                return COMMAND_LINE, 0, 0
        return self._document.name, 0, 0

    def locate(self, problem: Problem, path: KeyPath | None = None) -> Problem:
        """Return the problem with its place filled in.

        `path` is the path of the problem's key, where splitting it at dots does not give that.
        """
        if problem.file:
            return problem
        if path is None:
            path = tuple(problem.key.split("."))
        file, line, column = self.place(path)
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
    """Read a run config, and the source of each of its values, for a run that is started from it.

    It raises as `load_config`, and for each object that only Python can hand over.

    Args:
        path: a YAML or JSON file.
        overrides: as for `load_config`.
        text: content of the file, if it has been read already.
    """
    name = str(path)
    if text is None:
        document = read_document(Path(path), name=name)
    else:
        document = document_of(text, Path(path), name=name)
    values, source = _with_overrides(document, overrides)
    problems = [source.locate(problem) for problem in missing_objects(values)]
    try:
        config = config_from_values(values, source=source).noting_auto(source.was_auto)
    except ConfigError as error:
        raise ConfigError(problems + list(error.problems)) from None
    if problems:
        raise ConfigError(problems)
    return config, source


def read_values(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Source]:
    """Read the plain values of a run config for `fit`, and the source of each.

    Raises:
        ConfigError: the file cannot be read, or is no mapping of sections.
    """
    name = os.fspath(path)
    return _with_overrides(read_document(Path(name).expanduser(), name=name), ())


def load_known(
    document: Document, overrides: Sequence[str]
) -> tuple[RunConfig, frozenset[str], Source]:
    """Read what can be read of a file that `load_with_source` refuses.

    A section is unknown if a problem is in it, or if an unknown key of another section may belong
    to it. Where the file has a section that does not exist, which may be misspelt, every section
    that the file leaves out is unknown.

    Returns:
        The config of the known sections, in which the unknown ones have their defaults; the names
        of the unknown ones; and the source.

    Raises:
        ConfigError: the file is no mapping of sections, or an override is given twice or is not in
            a section.
        UsageError: an override is not ``key=value``.
    """
    values, source = _with_overrides(deepcopy(document), overrides)
    try:
        return _validated(values, source), frozenset(), source
    except ValidationError as error:
        from framework.config.explain import explain

        unknown = frozenset(_unknown_sections(explain(error, RunConfig), values))
    known = {
        name: section
        for name, section in values.items()
        if name in RunConfig.model_fields and name not in unknown
    }
    return RunConfig.model_validate(known), unknown, source


def _unknown_sections(
    problems: Iterable[tuple[KeyPath, Problem]], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the names of the sections that are unknown because of problems, see `load_known`."""
    from framework.config.explain import homes_of

    for path, problem in problems:
        yield str(path[0])
        if problem.kind != "unknown-key":
            continue
        name = str(path[-1])
        for home in homes_of(name, RunConfig):
            yield home.partition(".")[0]
        yield OWNED.get(name, name).partition(".")[0]
        if len(path) == 1:
            yield from RunConfig.model_fields.keys() - values.keys()


def _with_overrides(document: Document, overrides: Sequence[str]) -> tuple[dict[str, Any], Source]:
    """Make the overrides in the document's own value, and return it without `$schema`, and the
    source of its values.

    Raises:
        ConfigError: the file is no mapping, or an override is given twice or is not in a section.
        UsageError: an override is not ``key=value``.
    """
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
    """Refuse settings that are given twice: one of the values was not meant.

    A second value after ``auto`` is allowed: launchers append their choice.
    """
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for override in overrides:
        name, _, value = override.partition("=")
        if values.get(name, AUTO) != AUTO:
            problems.append(
                Problem(
                    "setting-twice",
                    f"it is given twice, as {values[name]} and as {value}",
                    "give it once",
                    name,
                    file=COMMAND_LINE,
                )
            )
        values[name] = value
    if problems:
        raise ConfigError(problems)


def missing_objects(values: Mapping[str, Any], *, given: Container[str] = ()) -> Iterator[Problem]:
    """Find sections of a resolved config with an object that only another process had; those in
    `given` are handed over again.
    """
    for name in ("model", "data", "task", "optimizer", "scheduler"):
        section = values.get(name)
        if name in given or not isinstance(section, Mapping):
            continue
        if section.get("object") is not None:
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
    """Validate plain values; problems carry the places that `source` knows.

    Raises:
        ConfigError: with every problem found.
        UsageError: the values are no mapping.
    """
    if isinstance(values, RunConfig):
        return values
    if not isinstance(values, Mapping):
        raise UsageError(
            f"a config is a RunConfig, nested dicts or the path of a file, not a "
            f"{type(values).__name__}"
        )
    source = source or Source()
    try:
        return _validated(values, source)
    except ValidationError as error:
        from framework.config.explain import explain

        problems: list[Problem] = []
        for path, problem in explain(error, RunConfig, texts=source.texts):
            problem = _name_changed_kind(problem, path, values, source)
            problems.append(source.locate(problem, path))
        problems.sort(key=lambda problem: (problem.file, problem.line, problem.column))
        raise ConfigError(problems) from None


def _validated(values: Mapping[str, Any], source: Source) -> RunConfig:
    """Validate values, and replace numbers from the command line by text where text belongs.

    A shell removes the quotes that would make them text.
    """
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        from framework.config.explain import numbers_for_text

        paths = [path for path in numbers_for_text(error, RunConfig) if source.is_override(path)]
        if not paths:
            raise
        for path in paths:
            section = at(values, path[:-1])
            key = path[-1]
            section[key] = source.texts.get(path, show_value(section[key]))
        return RunConfig.model_validate(dict(values))


def _name_changed_kind(
    problem: Problem, path: KeyPath, values: Mapping[str, Any], source: Source
) -> Problem:
    """Explain the problem of a key that belongs to the file's kind of a section, where the command
    line has changed the kind.
    """
    if problem.kind != "unknown-key" or source.is_override(path):
        return problem
    section = path[:-1]
    for tag in ("target", *TAG_KEYS):
        tag_path = (*section, tag)
        if source.is_override(tag_path):
            kind = show_value(at(values, tag_path))
            reason = f"{tag}={kind}, from the command line, has no such key"
            section_key = ".".join(map(str, section))
            fix = f"replace the whole section: {section_key}='{{{tag}: {kind}}}'"
            return replace(problem, reason=reason, fix=fix)
    return problem


def _apply_override(values: dict[str, Any], override: str, source: Source) -> None:
    """Set the key of one override in `values`, with missing sections, and note it in `source`."""
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
        is_auto = part == "parallel" and section.get(part) == AUTO
        if section.get(part) is None or is_auto:
            # Left out, or written with nothing under it: the override changes its default.
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
