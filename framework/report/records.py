"""Records of a run: its folder, read for a report. A run that was killed, is old or trains at this
moment leaves files out or half written: what can be read is read, and a note names the rest.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final

from deepspeed_lint.text.document import parse_document
from framework.checkpoint.names import CHECKPOINTS, TAG
from framework.errors import ConfigError
from framework.report.run_lines import EVENT, LIMIT, POINT, metrics_of
from framework.report.series import Series
from framework.system.files import open_own, read_regular

_OF_A_RUN: Final = ("metrics.jsonl", "plan.json", "config.yaml", "events.jsonl")
_LARGEST_TEXT: Final = 4 << 20
_MOST_EVENTS: Final = 100_000
_MOST_METRICS: Final = 400
_MOST_OTHERS: Final = 10_000
_LONGEST_LINE: Final = 4 << 20
_END_BYTES: Final = 64
_MOST_LOGS: Final = 64
_MOST_RANKS: Final = 16
_LARGEST_PROFILE: Final = 16 << 20
_MOST_ENTRIES: Final = 2_000
_DEEPEST: Final = 12
_LOGGED: Final = re.compile(r"^\S+ \S+ (WARNING|ERROR) dsf-trainer: (.*)$", re.MULTILINE)


@dataclass
class ReadPosition:
    """How far a file was read: it grows while a run trains.

    Attributes:
        number: inode number of the file.
        num_bytes: bytes of the lines that were read.
        end: their last bytes, which show whether the lines are still there.
        num_lines, num_broken: lines, and how many of them are damaged.
    """

    number: int = 0
    num_bytes: int = 0
    end: bytes = b""
    num_lines: int = 0
    num_broken: int = 0


@dataclass(eq=False)
class RunRecords:
    """Contents of one run folder, as a report needs them.

    Attributes:
        folder: where it is.
        metrics: ``area/name`` -> points.
        clock, epochs: Unix time, and passes over the data, of every logged point.
        events: of ``events.jsonl``, in order; each has ``kind`` and, unless they were lost,
            ``step`` and ``time_seconds`` as numbers.
        config, plan, environment, tables: contents of these files; empty if the file is missing.
        saved_steps: steps with a checkpoint in the folder.
        warnings: lines that ranks logged as warnings, each once.
        last_error: the last line that rank 0 logged as an error; empty if there is no such line.
        notes: what was missing or damaged.
        profile: tables of the steps that were profiled, by rank (`framework.report.profile`).
        means: of every metric, once they were needed (`framework.report.figures.means`).
        places: how far its growing files were read.
        others: names of metrics that are beyond the limit, and not kept.
    """

    folder: Path
    metrics: dict[str, Series] = field(default_factory=dict)
    clock: Series = field(default_factory=partial(Series, thinning="last"))
    epochs: Series = field(default_factory=partial(Series, thinning="last"))
    events: list[dict[str, Any]] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    saved_steps: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    last_error: str = ""
    notes: list[str] = field(default_factory=list)
    profile: list[Mapping[str, Any]] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    places: dict[str, ReadPosition] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    @cached_property
    def name(self) -> str:
        """Name of its folder: unlike `run.name`, it differs between an earlier run and the one that
        replaced it.
        """
        return self.folder.resolve().name or str(self.folder)

    @property
    def last_logged_step(self) -> int:
        """The step of the last point; 0 without points."""
        if self.clock.steps:
            return self.clock.steps[-1]
        return 0

    @cached_property
    def last_step(self) -> int:
        """How far the run has come, by its points, the events of its last start, and its
        checkpoints: a disk that was full may have cost some of them.
        """
        by_events = 0
        for event in self.events:
            if event["kind"] in ("start", "resume"):
                by_events = 0
            step = event.get("step", 0)
            if 0 <= step < LIMIT:
                by_events = max(by_events, int(step))
        return max([self.last_logged_step, by_events, *self.saved_steps])

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the plan; empty if the plan has no such section."""
        section = self.plan.get(name)
        if isinstance(section, Mapping):
            return section
        return {}

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the run's config, such as `checkpoint` `keep_best`; None if the config
        does not have it.
        """
        entries = self.config.get(section)
        if isinstance(entries, Mapping):
            return entries.get(key)
        return None

    def happened(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of some kinds."""
        return [event for event in self.events if event["kind"] in kinds]


def _names_in(folder: Path) -> set[str]:
    """Return the names in a run folder.

    Raises:
        ConfigError: the folder cannot be read, or has no file of a run.
    """
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        reason = f"the run folder cannot be read ({error.strerror or error})"
        raise ConfigError.of("run-not-found", reason, "check the path", file=str(folder)) from None
    if not names.intersection(_OF_A_RUN):
        reason = f"it is no run folder: it has none of {', '.join(_OF_A_RUN)}"
        fix = "name <run.output_dir>/<run.name>, for example runs/quickstart"
        raise ConfigError.of("not-a-run", reason, fix, file=str(folder))
    return names


def read_run(
    folder: Path, *, most_points: int | None = None, before: RunRecords | None = None
) -> RunRecords:
    """Read a run folder, in memory that does not grow with the number of its points.

    Args:
        folder: of the run.
        most_points: of a longer run only every n-th logged point is read, and all with evaluations;
            left out: all.
        before: the run as it was read earlier, which is not used any more: only what is new is
            read.

    Raises:
        ConfigError: there is no such folder, kind ``run-not-found``, or it is not the folder of a
            run, kind ``not-a-run``.
    """
    run = RunRecords(folder)
    names = _names_in(folder)
    if before is not None:
        _take_over(run, before)
    _read_metrics(run, most_points)
    _read_events(run)
    run.config = _mapping(run, "config.yaml", _yaml)
    run.plan = _mapping(run, "plan.json", json.loads)
    run.environment = _mapping(run, "environment.json", json.loads)
    if "tables.json" in names:
        run.tables = _mapping(run, "tables.json", json.loads)
    run.saved_steps = sorted(_saved_steps(folder / CHECKPOINTS))
    _read_logs(run)
    _note_lost_points(run)
    if "profile" in names:
        run.profile = list(_profile(folder / "profile"))
    return run


def _take_over(run: RunRecords, before: RunRecords) -> None:
    """Move the records of files that have only grown from `before` to `run`, which then reads on
    from there.
    """
    if _has_only_grown(run.folder / "metrics.jsonl", before.places.get("metrics.jsonl")):
        run.places["metrics.jsonl"] = before.places["metrics.jsonl"]
        run.metrics = before.metrics
        run.clock = before.clock
        run.epochs = before.epochs
        run.others = before.others
    if _has_only_grown(run.folder / "events.jsonl", before.places.get("events.jsonl")):
        run.places["events.jsonl"] = before.places["events.jsonl"]
        run.events = before.events


def _has_only_grown(path: Path, place: ReadPosition | None) -> bool:
    """Check that a file is the one that was read up to `place`, with the same bytes before it."""
    if place is None:
        return False
    with suppress(OSError), open_own(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_ino == place.number:
            stream.seek(place.num_bytes - len(place.end))
            return bool(stream.read(len(place.end)) == place.end)
    return False


def _read_metrics(run: RunRecords, most_points: int | None) -> None:
    """Read the lines of metrics.jsonl after its place in `run.places`: every n-th, all with
    evaluations, and the last.
    """
    stride = _stride(run.folder / "metrics.jsonl", most_points)
    last = b""
    place = run.places.setdefault("metrics.jsonl", ReadPosition())
    for line in _lines(run, "metrics.jsonl", place):
        if place.num_lines % stride and b'"eval/' not in line:
            last = line
        else:
            last = b""
            place.num_broken += not _add_point(run, line)
    if last:
        place.num_broken += not _add_point(run, last)
    _note_metrics(run, place, stride)
    for series in (run.clock, run.epochs, *run.metrics.values()):
        series.sort()


def _note_metrics(run: RunRecords, place: ReadPosition, stride: int) -> None:
    """Add notes on points that were skipped, merged or damaged, and on metrics beyond the limit."""
    if stride > 1:
        run.notes.append(
            f"metrics.jsonl has {place.num_lines:,} points: one of {stride} was read; "
            f"all of them: dsf report {run.folder}"
        )
    elif run.clock.is_thinned:
        run.notes.append(
            f"metrics.jsonl has {place.num_lines:,} points, which are drawn as "
            f"{len(run.clock.steps):,}"
        )
    if place.num_broken:
        run.notes.append(
            f"metrics.jsonl: {place.num_broken} of {place.num_lines} lines are damaged and left out"
        )
    if run.others:
        num = str(len(run.metrics) + len(run.others))
        if len(run.others) == _MOST_OTHERS:
            num = f"more than {num}"
        run.notes.append(f"metrics.jsonl: the first {_MOST_METRICS} of {num} metrics are shown")


def _note_lost_points(run: RunRecords) -> None:
    """Note that the run went on after its last logged point, for longer than between points."""
    steps = run.clock.steps
    if not steps:
        return
    gaps = [later - step for step, later in pairwise(steps)]
    longest = max(gaps, default=steps[0])
    if run.last_step - steps[-1] > longest:
        run.notes.append(
            f"metrics.jsonl ends with step {steps[-1]:,}; by its events and checkpoints the run "
            f"came to step {run.last_step:,}"
        )


def _stride(path: Path, most_points: int | None) -> int:
    """Return n so that every n-th line gives about `most_points` points; 1 for all lines."""
    if most_points is None:
        return 1
    num_lines = 0
    try:
        with open_own(path, "rb") as stream:
            while block := stream.read(1 << 20):
                num_lines += block.count(b"\n")
    except OSError:  # the reader of the lines will note it
        return 1
    return max(1, math.ceil(num_lines / most_points))


def _add_point(run: RunRecords, line: bytes) -> bool:
    """Add a line of ``metrics.jsonl`` to the series; returns False, without adding, for a damaged
    line.
    """
    try:
        point = POINT.validate_python(json.loads(line))
    except (ValueError, RecursionError):
        return False
    step = point["step"]
    run.clock.add(step, point.get("time", point.get("time_seconds", math.nan)))
    run.epochs.add(step, point.get("epoch", math.nan))
    for name, value in metrics_of(point):
        series = _series_of(run, name)
        if series is not None:
            series.add(step, value)
    return True


def _series_of(run: RunRecords, name: str) -> Series | None:
    """Return the series of a metric, which is made at its first point; None if there are too many
    metrics.
    """
    if name not in run.metrics:
        if len(run.metrics) >= _MOST_METRICS:
            if len(run.others) < _MOST_OTHERS:
                run.others.add(name)
            return None
        is_mean = name.startswith(("time/", "throughput/", "ranks/"))
        run.metrics[name] = Series(thinning="means" if is_mean else "extremes")
    return run.metrics[name]


def _read_events(run: RunRecords) -> None:
    """Read ``events.jsonl``, which older runs do not have."""
    place = run.places.setdefault("events.jsonl", ReadPosition())
    for line in _lines(run, "events.jsonl", place, is_expected=False):
        if len(run.events) == _MOST_EVENTS:
            continue
        try:
            event = EVENT.validate_python(json.loads(line))
        except (ValueError, RecursionError):
            place.num_broken += 1
            continue
        run.events.append(dict(event))
    if len(run.events) == _MOST_EVENTS:
        run.notes.append(f"events.jsonl: the first {_MOST_EVENTS:,} events are shown")
    if place.num_broken:
        run.notes.append(f"events.jsonl: {place.num_broken} damaged lines are left out")


def _whole_line(line: bytes, stream: IO[bytes]) -> tuple[bytes, int]:
    """Read the rest of a line that `readline` may have cut at `_LONGEST_LINE`; returns the line and
    its number of bytes.

    A line that was cut becomes text that is no JSON, so that it counts as damaged. A last line
    without its newline becomes empty.
    """
    num_bytes = len(line)
    while not line.endswith(b"\n"):
        rest = stream.readline(_LONGEST_LINE)
        if not rest:
            return b"", num_bytes
        num_bytes += len(rest)
        line = b"\0" + rest
    return line, num_bytes


def _lines(
    run: RunRecords, name: str, place: ReadPosition, *, is_expected: bool = True
) -> Iterator[bytes]:
    """Yield the lines of a file of the run from `place` on that end with a newline, and move
    `place` after each; note a file that is missing, or cut off.

    A kill may leave half a line behind, even one that can be read. A line that is too long is
    damaged.
    """
    try:
        with open_own(run.folder / name, "rb") as stream:
            place.number = os.fstat(stream.fileno()).st_ino
            stream.seek(place.num_bytes)
            while line := stream.readline(_LONGEST_LINE):
                line, num_bytes = _whole_line(line, stream)
                if not line:
                    run.notes.append(f"{name}: its last line was cut off and is left out")
                    return
                place.num_bytes += num_bytes
                if line != b"\n":
                    place.end = line.removeprefix(b"\0")[-_END_BYTES:]
                    place.num_lines += 1
                    yield line
    except FileNotFoundError:
        if is_expected:
            run.notes.append(f"{name} is missing")
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror or error})")


def _mapping(run: RunRecords, name: str, read: Callable[[str], Any]) -> Mapping[str, Any]:
    """Read a file with a mapping; empty, with a note, if it cannot be read."""
    values = None
    try:
        content = read_regular(run.folder / name, num_bytes=_LARGEST_TEXT + 1)
        if content is not None and len(content) <= _LARGEST_TEXT:
            values = read(content.decode("utf-8", "replace"))
    except FileNotFoundError:
        run.notes.append(f"{name} is missing")
        return {}
    except (OSError, ValueError, RecursionError, ConfigError):
        values = None
    if not isinstance(values, dict):
        run.notes.append(f"{name} cannot be read")
        return {}
    return values


def _yaml(text: str) -> Any:
    return parse_document(text, name="config.yaml").value


def _profile(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the tables that the first ranks have written of the profiled steps, without files of a
    start with another number of ranks.
    """
    world_size = None
    for rank in range(_MOST_RANKS):
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            content = read_regular(folder / f"tables{rank}.json", num_bytes=_LARGEST_PROFILE)
            tables = json.loads(content or b"null")
            world_size = world_size or tables["world_size"]
            if tables["world_size"] == world_size:
                yield tables


def _saved_steps(folder: Path) -> Iterator[int]:
    try:
        for entry in folder.iterdir():
            match = TAG.fullmatch(entry.name)
            if match:
                yield int(match["step"])
    except OSError:
        return


def _logged(path: Path) -> list[tuple[str, str]]:
    """Return level and text of the warnings and errors in a log; none if it cannot be read."""
    try:
        content = read_regular(path, num_bytes=_LARGEST_TEXT) or b""
    except OSError:
        return []
    return _LOGGED.findall(content.decode("utf-8", "replace"))


def _read_logs(run: RunRecords) -> None:
    """Set `run.warnings` and `run.last_error` from the first bytes of the ranks' logs."""
    try:
        logs = list((run.folder / "logs").glob("rank*.log"))
    except OSError:
        return
    logs.sort(key=lambda path: (len(path.name), path.name))
    warnings: dict[str, None] = {}
    for path in logs[:_MOST_LOGS]:
        for level, text in _logged(path):
            if level == "WARNING":
                warnings[text] = None
            elif path.name == "rank0.log":
                run.last_error = text
    run.warnings = list(warnings)


def flat(values: Any, *, prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested mappings under dotted keys; a large or deep one is cut off."""
    entries: dict[str, Any] = {}

    def walk(value: Any, key: str, depth: int) -> None:
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            for name, nested in value.items():
                walk(nested, f"{key}.{name}" if key else str(name), depth + 1)
        elif len(entries) < _MOST_ENTRIES:
            entries[key] = value

    walk(values, prefix, 0)
    return entries
