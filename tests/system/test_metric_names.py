"""The table of metric names: the page has it, and no room writes a name that it lacks.

python -m tests.system.test_metric_names      # writes the table into docs/metrics.md
"""

from __future__ import annotations

import re

from framework.system.metric_names import AREAS, BY_NAME, METRICS, PHASES, WORK_PHASES, time_of
from tests.places import ROOT

PAGE = ROOT / "docs/metrics.md"
_HEAD = "| name | unit | meaning | absent |\n|---|---|---|---|\n"
# Names of a task's own metrics are not ours to list.
_EVALUATED = (
    "| `eval/loss`, `eval/<metric>` | | over all samples of all ranks, each once; of several sets "
    "`eval/<set>/loss`, `eval/<set>/<metric>`; [custom ones](custom-metrics.md) | without evaluation "
    "|\n"
)
_FIRST_AFTER_EVALUATION = "throughput/samples_per_sec"


def _table() -> str:
    """Return the table as the page has it."""
    lines = [_HEAD]
    for metric in METRICS:
        if metric.name == _FIRST_AFTER_EVALUATION:
            lines.append(_EVALUATED)
        cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.absent)
        line = "|".join(f" {cell} " if cell else " " for cell in cells)
        lines.append(f"|{line}|\n")
    return "".join(lines)


def _parts_of_page() -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text after it."""
    page = PAGE.read_text(encoding="utf-8")
    start = page.index(_HEAD)
    end = page.index("\n\n", start) + 1
    return page[:start], page[start:end], page[end:]


def test_the_page_has_the_table() -> None:
    _, table, _ = _parts_of_page()
    assert table == _table(), "python -m tests.system.test_metric_names"


def test_names_stand_once() -> None:
    assert len(BY_NAME) == len(METRICS)


def test_the_parts_of_a_step_have_a_metric_each() -> None:
    assert {time_of(phase) for phase in PHASES} <= set(BY_NAME)
    assert set(WORK_PHASES) < set(PHASES)
    times = [name for name in BY_NAME if name.startswith("time/")]
    assert len(times) == len(PHASES) + 2, "and the step itself, and saves"


def test_no_room_writes_a_name_that_the_table_lacks() -> None:
    literal = re.compile(rf'"((?:{"|".join(sorted(AREAS))})/[a-z_]+)"')
    unknown = []
    for path in sorted((ROOT / "framework").rglob("*.py")):
        for name in literal.findall(path.read_text(encoding="utf-8")):
            if name not in BY_NAME:
                unknown.append(f"{path.relative_to(ROOT)}: {name}")
    assert unknown == []


if __name__ == "__main__":
    before, _, after = _parts_of_page()
    PAGE.write_text(before + _table() + after, encoding="utf-8")
