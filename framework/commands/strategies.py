"""Text and data about strategies: an aligned table of the best, why others lost, and the edit that
writes a choice into a run config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from framework.commands.folded import blocks
from framework.config.training import Training
from framework.errors import ConfigError, UsageError
from framework.plan.alternatives import settings_text, size_text
from framework.plan.candidate import Candidate
from framework.plan.hardware import host_bytes
from framework.plan.search import SearchResult
from framework.plan.search_space import (
    ACCUMULATION,
    LENGTH,
    OFFLOAD,
    STAGE,
    USUAL,
    Settings,
    unusual,
)

if TYPE_CHECKING:  # a table needs no editor
    from deepspeed_lint.text.document import Document
    from deepspeed_lint.text.edits import Edit
    from framework.plan.time import StepTime

# Group of a table's column or a chart's colour -> components of memory in it; all others are
# buffers.
MEMORY_GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "weights": frozenset(
        {"weights", "fp32 weights", "stepped weights", "small weights", "gathered weights"}
    ),
    "optimizer": frozenset(
        {"optimizer state", "moments of columns", "weight average", "optimizer copies"}
    ),
    "gradients": frozenset({"gradients", "gradient buffer"}),
    "activations": frozenset({"activations", "logits and loss"}),
}
BUFFERS: Final = "buffers"
_TIME_GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "compute": frozenset({"compute", "memory-bound operations", "rounding to fp8", "launch"}),
    "bubble": frozenset({"pipeline bubble"}),
    "update": frozenset({"optimizer", "orthogonal matrices", "offload transfers", "step overhead"}),
}
_TRAFFIC: Final = "traffic"
_REASONS: Final = {"too-large": "does not fit", "refused": "refused"}
_MARK: Final = ""
_NUMBER: Final = "#"
_FITS: Final = "fits"
# Columns that every block of a folded table begins with, and the columns of the first block.
_KEYS: Final = (_MARK, _NUMBER)
_FIRST: Final = (
    *_KEYS,
    "ZeRO",
    "offload",
    "recompute",
    "pipe",
    "tensor",
    "sequence",
    "expert",
    "batch",
    "tokens",
    "GiB",
    "MiB",
    "fits",
    "step s",
    "samples/s",
    "tokens/s/device",
)
# Column -> usual cell: a column is left out if every row has that.
_USUAL_CELLS: Final = {
    _FITS: "yes",
    "offload": "none",
    "recompute": "0",
    "pipe": "1",
    "tensor": "1",
    "sequence": "1",
    "activations": "0.00",
    "on host": "0.00",
    "bubble": "0%",
    "update": "0%",
    "traffic": "0%",
}


def grouped(
    components: Mapping[str, float], groups: Mapping[str, frozenset[str]], rest: str
) -> dict[str, float]:
    """Sum components by group, in the groups' order; the sum of the others is last, as `rest`."""
    sums = dict.fromkeys(groups, 0.0)
    sums[rest] = 0.0
    for name, value in components.items():
        sums[_group_of(name, groups, rest)] += value
    return sums


def _group_of(name: str, groups: Mapping[str, frozenset[str]], rest: str) -> str:
    for group, names in groups.items():
        if name in names:
            return group
    return rest


def table_lines(
    candidates: Sequence[Candidate],
    *,
    planned: Candidate | None,
    fits: bool = True,
    columns: int = 1000,
) -> Iterator[str]:
    """Yield the lines of an aligned table of candidates: their settings, memory and speed, then
    memory and time in parts.

    Args:
        candidates: that fit.
        planned: the plan itself: it is marked, and is the last row if it is not among them.
        fits: whether the plan fits; if not, its row has the word.
        columns: width of a line; a wider table is folded into blocks with the same rows.
    """
    rows = _rows(_with_planned(candidates, planned), planned)
    for number, row in enumerate(rows, start=1):
        row[_NUMBER] = str(number)
        row[_FITS] = "no" if row[_MARK] == "*" and not fits else "yes"
    cells = [_column(title, rows) for title in _titles(rows)]
    for block in blocks(cells, len(_KEYS), columns):
        yield from block


def _titles(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the titles of the columns that are shown, in order."""
    # the longest row has every column: a row without a time lacks some
    longest = max(rows, key=len)
    titles: list[str] = [title for title in _FIRST if title in longest]
    titles += [title for title in longest if title not in titles]
    return [title for title in titles if title in _KEYS or _is_shown(title, rows)]


def _with_planned(candidates: Sequence[Candidate], planned: Candidate | None) -> list[Candidate]:
    shown = list(candidates)
    if planned and not any(is_same(planned, candidate) for candidate in candidates):
        shown.append(planned)
    return shown


def _rows(shown: Sequence[Candidate], planned: Candidate | None) -> list[dict[str, str]]:
    """Return the cells of the candidates, with memory in a unit that suits the largest."""
    unit, unit_bytes = _unit(max((candidate.peak_bytes for candidate in shown), default=0))
    has_tokens = any(LENGTH in candidate.settings for candidate in shown)
    rows = []
    for candidate in shown:
        is_planned = planned is not None and is_same(planned, candidate)
        row = _row(candidate, unit, unit_bytes, is_planned=is_planned, has_tokens=has_tokens)
        rows.append(row)
    return rows


def _column(title: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the title and the cells of a column, aligned to the right."""
    cells = [title] + [row.get(title, "?") for row in rows]
    width = max(len(cell) for cell in cells)
    return [cell.rjust(width) for cell in cells]


def _is_shown(title: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Check that a row has another cell than the usual one in the column."""
    if title not in _USUAL_CELLS:
        return True
    usual = _USUAL_CELLS[title]
    return any(row.get(title, usual) != usual for row in rows)


def is_same(one: Candidate, other: Candidate) -> bool:
    """Check whether two candidates are one choice on one cluster; a candidate with a sequence
    length among its settings is the same as none.
    """
    has_length = LENGTH in one.settings or LENGTH in other.settings
    return one.plan.cluster == other.plan.cluster and one.choice == other.choice and not has_length


def _unit(most_bytes: int) -> tuple[str, int]:
    """Return the unit of the memory in a table, and its bytes."""
    if most_bytes >= 2**30:
        return "GiB", 2**30
    return "MiB", 2**20


def _row(
    candidate: Candidate, unit: str, unit_bytes: int, *, is_planned: bool, has_tokens: bool
) -> dict[str, str]:
    """Return title -> cell of the candidate's row, in the table's order of columns."""
    plan = candidate.plan
    memory = candidate.memory
    time = candidate.time
    config = plan.config
    layout = plan.layout
    mark = " "
    if is_planned:
        mark = "*"
    row = {
        _MARK: mark,
        "ZeRO": str(config.zero.stage),
        "offload": config.zero.offload_optimizer.device,
        "recompute": _recompute_cell(config.training),
        "pipe": str(layout.pipe_size),
        "tensor": str(layout.tensor_size),
        "sequence": str(layout.sequence_size),
        "batch": f"{layout.micro_size} x {layout.accumulation_steps} x {layout.data_parallel_size}",
    }
    if has_tokens:
        row["tokens"] = f"{getattr(config.data, 'sequence_length', 0):,}"
    row[unit] = _in_units(candidate.peak_bytes / unit_bytes)
    sizes = grouped(memory.moments[memory.peak], MEMORY_GROUPS, BUFFERS)
    for name, size in sizes.items():
        row[name] = _in_units(size / unit_bytes)
    of_host = host_bytes(memory, plan.cluster.devices_per_host)
    row["on host"] = _in_units(of_host / unit_bytes)
    if time is not None:
        row |= _time_cells(time)
    return row


def _recompute_cell(training: Training) -> str:
    """Return how layers are recomputed, and what else gives memory to long sequences."""
    words = [str(training.recompute_every)]
    if training.recompute_every and training.keeps_products:
        words.append("selective")
    if training.offload_activations:
        words.append("host")
    if training.mlp_tile:
        words.append("tiles")
    return " ".join(words)


def _time_cells(time: StepTime) -> dict[str, str]:
    cells = {"step s": f"{time.total:.3g}"}
    for name, seconds in grouped(time.seconds, _TIME_GROUPS, _TRAFFIC).items():
        cells[name] = f"{seconds / time.total:.0%}"
    cells["samples/s"] = f"{time.samples_per_second:,.0f}"
    tokens = time.tokens_per_second_per_device
    if tokens is not None:
        cells["tokens/s/device"] = f"{tokens:,.0f}"
    return cells


def _in_units(size: float) -> str:
    if size < 100:
        return f"{size:.2f}"
    return f"{size:,.0f}"


def loser_lines(result: SearchResult, *, shown: Sequence[Candidate]) -> Iterator[str]:
    """Yield why each strategy that is not shown lost: slower ones first, then what does not fit,
    then what is refused.
    """
    yield from _slower_lines(result, shown)
    for loser in result.losers:
        words = settings_text(unusual(loser.settings)) or "all others"
        if loser.count > 1:
            words += f" ({loser.count})"
        yield f"{words}: {_REASONS[loser.kind]}: {loser.why}"


def _slower_lines(result: SearchResult, shown: Sequence[Candidate]) -> Iterator[str]:
    for candidate in result.ranked:
        if candidate not in shown:
            words = settings_text(unusual(candidate.settings))
            yield f"{words}: {_why_slower(candidate, result.ranked[0])}"


def _why_slower(candidate: Candidate, best: Candidate) -> str:
    """Return how much slower a candidate is, and the part of the step that costs most of that."""
    time = candidate.time
    peak = f"{size_text(candidate.peak_bytes)} at most"
    if time is None and best.time is not None:
        return f"speed unknown, a rate is not listed; {peak}"
    if time is None or best.time is None:
        return f"more traffic, or more to compute; {peak}"
    share = 1 - time.samples_per_second / best.time.samples_per_second
    if share < 0.02:
        return f"as fast, and sends or takes more; {peak}"
    part, seconds = _slower_part(time, best.time)
    return f"{share:.0%} slower: {part} {seconds:.3g} s of {time.total:.3g} s"


def _slower_part(time: StepTime, best: StepTime) -> tuple[str, float]:
    """Return the part of a step that loses most time for each sample against the best strategy, and
    its seconds.
    """
    seconds = grouped(time.seconds, _TIME_GROUPS, _TRAFFIC)
    best_seconds = grouped(best.seconds, _TIME_GROUPS, _TRAFFIC)
    losses = {
        part: seconds[part] / time.num_samples - best_seconds[part] / best.num_samples
        for part in seconds
    }
    part = max(losses, key=lambda part: losses[part])
    return part, seconds[part]


def strategies_section(result: SearchResult, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return the result of a search, with these of its candidates, as plain values for JSON."""
    ranked = []
    for candidate in candidates:
        row: dict[str, Any] = {
            "settings": dict(candidate.settings),
            "devices": candidate.plan.cluster.world_size,
            "memory": candidate.memory.to_dict(),
            "time": None,
        }
        if candidate.time is not None:
            row["time"] = candidate.time.to_dict()
        ranked.append(row)
    section: dict[str, Any] = {
        "ranked": ranked,
        "losers": [asdict(loser) for loser in result.losers],
    }
    if result.block:
        section["block"] = result.block
    return section


def write_choice(file: str, words: Sequence[str], settings: Settings) -> str:
    """Write settings into a run config; returns the change as a unified diff, empty if there is
    none.

    Raises:
        UsageError: settings of the command line are not in the file, so that the choice may not
            hold there; or a file of this layout cannot be edited.
        StorageError: the file cannot be written; it is then as it was.
    """
    from deepspeed_lint.text.document import document_of, read_text
    from deepspeed_lint.text.edits import unified_diff
    from framework.commands.check_fix import write_file
    from framework.config.load import load_with_source

    before = read_text(Path(file), name=file)
    after = _with_settings(before, document_of(before, Path(file), name=file), settings)
    try:
        load_with_source(file, words, text=after)
    except ConfigError as error:
        raise UsageError(f"{file}: --apply left the file as it is: {error}") from None
    if after == before:
        return ""
    write_file(Path(file), after, name=file)
    return unified_diff(before, after, file)


def _with_settings(text: str, document: Document, settings: Settings) -> str:
    """Return the text of a run config, which was read as `document`, with the settings."""
    from framework.config.edits import edited

    values: Mapping[str, Any] = {}
    if isinstance(document.value, dict):
        values = document.value
    edits: list[Edit] = []
    for key, value in _without_implied(settings, values.get("batch") or {}).items():
        edits += _edits(values, key, value)
    if not edits:
        return text
    after = edited(document, edits)
    if after is None:
        raise UsageError(
            f"{document.name}: --apply cannot edit a file of this layout; write "
            f"{settings_text(settings)} yourself"
        )
    return after


def _without_implied(settings: Settings, batch: Mapping[str, Any]) -> Settings:
    """Leave out the accumulation steps where they follow from the batch's global size."""
    if "accumulation_steps" in batch or "global_size" not in batch:
        return settings
    return {key: value for key, value in settings.items() if key != ACCUMULATION}


def _edits(values: Mapping[str, Any], key: str, value: Any) -> Iterator[Edit]:
    """Yield the edits of a run config's `values` that set a key; none if it has the value already,
    also by a default.
    """
    from deepspeed_lint.text.edits import InsertMember, ReplaceValue

    path = tuple(key.split("."))
    current: Any = values
    for depth, name in enumerate(path):
        if not isinstance(current, dict):  # such as `parallel: auto`
            yield ReplaceValue(path[:depth], {path[depth]: value})
            return
        if name not in current:
            usual = {**USUAL, STAGE: 0, ACCUMULATION: 1}
            if usual.get(key, 0) != value:
                yield InsertMember(path, value)
            return
        section = current
        current = current[name]
    if current != value:
        if key == OFFLOAD:  # the other keys of the section belong to the other kind
            yield from _removals_of_others(path, section)
        yield ReplaceValue(path, value)


def _removals_of_others(path: tuple[str, ...], section: Iterable[str]) -> Iterator[Edit]:
    """Yield the edits that remove all keys of a section but the path's own."""
    from deepspeed_lint.text.edits import RemoveMember

    for other in section:
        if other != path[-1]:
            yield RemoveMember((*path[:-1], other))
