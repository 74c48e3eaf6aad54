"""Strategies for a person: an aligned table of the best, why others lost, and a file with a choice
written into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from framework.errors import ConfigError, UsageError
from framework.plan.alternatives import settings_text, size_text
from framework.plan.search import (
    ACCUMULATION,
    LENGTH,
    OFFLOAD,
    STAGE,
    STRATEGY,
    USUAL,
    Candidate,
    SearchResult,
    Settings,
)

if TYPE_CHECKING:  # a table needs no editor
    from framework.text.edits import Edit

# Group of a table's column or a chart's colour -> components of memory in it; all others are
# buffers.
MEMORY_GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "weights": frozenset({"weights", "fp32 weights", "small weights", "gathered weights"}),
    "optimizer": frozenset({"optimizer state", "weight average", "optimizer copies"}),
    "gradients": frozenset({"gradients", "gradient buffer"}),
    "activations": frozenset({"activations", "logits and loss"}),
}
BUFFERS: Final = "buffers"
_TIME_GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "compute": frozenset({"compute", "memory-bound operations", "launch"}),
    "bubble": frozenset({"pipeline bubble"}),
    "update": frozenset({"optimizer", "offload transfers", "step overhead"}),
}
_SENT: Final = "traffic"
# Columns that are left out where all of them say this.
_USUAL: Final = {
    "": " ",
    "offload": "none",
    "recompute": "0",
    "pipe": "1",
    "tensor": "1",
    "sequence": "1",
    "activations": "0.00",
    "host": "0.00",
    "bubble": "0%",
    "update": "0%",
    "traffic": "0%",
}


def grouped(
    found: Mapping[str, float], groups: Mapping[str, frozenset[str]], rest: str
) -> dict[str, float]:
    """Sums of components by group, in the groups' order; what is in none comes last."""
    sums = dict.fromkeys((*groups, rest), 0.0)
    for name, value in found.items():
        sums[next((group for group, names in groups.items() if name in names), rest)] += value
    return sums


def table_lines(candidates: Sequence[Candidate], *, planned: Candidate | None) -> Iterator[str]:
    """The candidates as an aligned table with memory and time split; the plan itself is marked, and
    last if it is not among them.
    """
    shown = [
        *candidates,
        *([planned] if planned and not any(is_same(planned, each) for each in candidates) else []),
    ]
    if any(each.peak_bytes >= 2**30 for each in shown):
        unit = ("GiB", 2**30)
    else:
        unit = ("MiB", 2**20)
    is_longest = any(LENGTH in each.settings for each in shown)
    rows = [
        _row(
            each,
            *unit,
            is_planned=planned is not None and is_same(planned, each),
            has_tokens=is_longest,
        )
        for each in shown
    ]
    titles = [
        title
        for title in max(rows, key=len)
        if title not in _USUAL
        or any(row.get(title, _USUAL[title]) != _USUAL[title] for row in rows)
    ]
    cells = [titles, *([row.get(title, "?") for title in titles] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def is_same(one: Candidate, other: Candidate) -> bool:
    """Check whether two candidates are one choice."""
    is_longer = LENGTH in {*one.settings, *other.settings}
    return one.plan.cluster == other.plan.cluster and one.choice == other.choice and not is_longer


def _row(
    candidate: Candidate, unit: str, unit_bytes: int, *, is_planned: bool, has_tokens: bool
) -> dict[str, str]:
    plan = candidate.plan
    memory = candidate.memory
    time = candidate.time
    config = plan.config
    layout = plan.layout
    row = {
        "": "*" if is_planned else " ",
        "ZeRO": str(config.zero.stage),
        "offload": config.zero.offload_optimizer.device,
        "recompute": str(config.training.recompute_every),
        "pipe": str(layout.pipe_size),
        "tensor": str(layout.tensor_size),
        "sequence": str(layout.sequence_size),
        "batch": f"{layout.micro_size} x {layout.accumulation_steps} x {layout.data_parallel_size}",
    }
    if has_tokens:
        row["tokens"] = f"{getattr(config.data, 'sequence_length', 0):,}"
    row[unit] = _in_units(candidate.peak_bytes / unit_bytes)
    parts = grouped(memory.moments[memory.peak], MEMORY_GROUPS, BUFFERS)
    row |= {name: _in_units(size / unit_bytes) for name, size in parts.items()}
    row["host"] = _in_units(sum(memory.host.values()) / unit_bytes)
    if time is not None:
        row["step s"] = f"{time.total:.3g}"
        row |= {
            name: f"{part / time.total:.0%}"
            for name, part in grouped(time.seconds, _TIME_GROUPS, _SENT).items()
        }
        row["samples/s"], tokens = (
            f"{time.samples_per_second:,.0f}",
            time.tokens_per_second_per_device,
        )
        row |= {"tokens/s/device": f"{tokens:,.0f}"} if tokens is not None else {}
    return row


def _in_units(size: float) -> str:
    if size < 100:
        return f"{size:.2f}"
    return f"{size:,.0f}"


def loser_lines(found: SearchResult, *, shown: Sequence[Candidate]) -> Iterator[str]:
    """Why each strategy that is not shown lost: slower ones first, then what does not fit, then
    what is refused.
    """
    best = next(iter(found.ranked), None)
    for slower in (each for each in found.ranked if each not in shown):
        yield f"{settings_text(unusual(slower.settings))}: {_why_slower(slower, best or slower)}"
    for loser in found.losers:
        words = settings_text(unusual(loser.settings)) or "all others"
        reason = "does not fit" if loser.kind == "too-large" else "refused"
        yield f"{words}{f' ({loser.count})' if loser.count > 1 else ''}: {reason}: {loser.why}"


def _why_slower(one: Candidate, best: Candidate) -> str:
    """Say how much slower, and the part of the step that makes most of it, for each sample."""
    if one.time is None and best.time is not None:
        return f"speed unknown, a rate is not listed; {size_text(one.peak_bytes)} at most"
    if one.time is None or best.time is None:
        return f"more traffic, or more to compute; {size_text(one.peak_bytes)} at most"
    share = 1 - one.time.samples_per_second / best.time.samples_per_second
    if share < 0.02:
        return f"as fast, and sends or takes more; {size_text(one.peak_bytes)} at most"
    each, other = (grouped(time.seconds, _TIME_GROUPS, _SENT) for time in (one.time, best.time))
    samples = one.time.num_samples
    others = best.time.num_samples
    name = max(each, key=lambda part: each[part] / samples - other[part] / others)
    return f"{share:.0%} slower: {name} {each[name]:.3g} s of {one.time.total:.3g} s"


def unusual(settings: Settings) -> Settings:
    """Settings of a strategy without those that are as ever."""
    return {
        key: value for key, value in settings.items() if key in STRATEGY and USUAL.get(key) != value
    }


def strategies_section(found: SearchResult, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The result of a search as plain values."""
    section: dict[str, Any] = {
        "ranked": [
            {
                "settings": dict(each.settings),
                "devices": each.plan.cluster.world_size,
                "memory": each.memory.to_dict(),
                "time": None if each.time is None else each.time.to_dict(),
            }
            for each in candidates
        ],
        "losers": [asdict(lost) for lost in found.losers],
    }
    return section | ({"block": found.block} if found.block else {})


def write_choice(file: str, words: Sequence[str], settings: Settings) -> str:
    """Write settings into a run config; returns the change as a unified diff, empty where nothing
    changes.

    Raises:
        UsageError: settings of the command line are not in the file, so that the choice may not
            hold there; or the file's layout does not let itself be edited.
        StorageError: it cannot be written; it is then as it was.
    """
    from framework.commands.check_fix import write_file
    from framework.config.load import load_with_source
    from framework.text.document import document_of, read_text
    from framework.text.edits import edited, unified_diff

    before = read_text(Path(file), name=file)
    document = document_of(before, Path(file), name=file)
    if isinstance(document.value, dict):
        values = document.value
    else:
        values = {}
    batch = values.get("batch") or {}
    if "accumulation_steps" not in batch and "global_size" in batch:  # it follows
        settings = {key: value for key, value in settings.items() if key != ACCUMULATION}
    edits = [edit for key, value in settings.items() for edit in _edits(values, key, value)]
    after = before if not edits else edited(document, edits)
    if after is None:
        raise UsageError(
            f"{file}: --apply cannot edit a file of this layout; write {settings_text(settings)} "
            "yourself"
        )
    try:
        load_with_source(file, words, text=after)
    except ConfigError as error:
        raise UsageError(f"{file}: --apply left the file as it is: {error}") from None
    if after == before:
        return ""
    write_file(Path(file), after, name=file)
    return unified_diff(before, after, file)


def _edits(values: Mapping[str, Any], key: str, value: Any) -> Iterator[Edit]:
    """Edits that make a file say a setting; none where it does already, by its defaults too."""
    from framework.text.edits import InsertMember, RemoveMember, ReplaceValue

    path = tuple(key.split("."))
    section: Any = values
    for depth, name in enumerate(path):
        if not isinstance(section, dict):  # such as `parallel: auto`
            yield ReplaceValue(path[:depth], {path[depth]: value})
            return
        if name not in section:
            usual = {**USUAL, STAGE: 0, ACCUMULATION: 1}
            if usual.get(key, 0) != value:
                # a new section inside of another one goes in as a value
                is_inner = 0 < depth < len(path) - 1
                yield (
                    InsertMember(path[:-1], {path[-1]: value})
                    if is_inner
                    else InsertMember(path, value)
                )
            return
        home = section
        section = section[name]
    if section != value:
        if key == OFFLOAD:  # the other keys of the section belong to the other kind
            yield from (RemoveMember((*path[:-1], other)) for other in home if other != path[-1])
        yield ReplaceValue(path, value)
