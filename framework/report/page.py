"""Page of a report: one HTML file that needs no network, no script and no font of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import framework
from framework.errors import show_value
from framework.report.chart import Chart, text
from framework.report.chart_style import STYLE
from framework.report.figures import (
    best,
    changes,
    error_of,
    eval_metrics,
    headline,
    moment,
    number,
    outcome,
    result_text,
    state,
    verdict_of,
)
from framework.report.profile import tables_of
from framework.report.records import RunRecords, flat, read_run
from framework.report.run_charts import charts_of, marks_of
from framework.system.files import read_regular, replace_text

REPORT: Final = "report.html"
# What the end of a training run reads of its own metrics: it must not wait for its page.
MOST_POINTS_AT_END: Final = 10_000
_MOST_ROWS: Final = 200
_MOST_WARNINGS: Final = 100
_LONGEST_TEXT: Final = 500
_LONGEST_CONFIG: Final = 60_000
# Nothing may be fetched, and nothing may run, with any text in a name or a config.
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
_PAGE_STYLE: Final = """
* {box-sizing: border-box}
body {margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif}
header, main, footer {max-width: 1280px; margin: 0 auto; padding: 0 20px}
header {padding-top: 28px}
footer {padding: 28px 20px; font-size: .85rem}
h1 {font-size: 1.7rem; line-height: 1.2; margin: .1em 0; overflow-wrap: anywhere}
h2 {font-size: 1.15rem; margin: 2em 0 .7em; padding-top: .6em; border-top: 1px solid var(--grid)}
h3 {font-size: 1rem; margin: 1em 0 .3em; overflow-wrap: anywhere}
p {margin: .3em 0}
main > p {margin-top: 1em}
ul {margin: .4em 0; padding-left: 1.2em; overflow-wrap: anywhere}
a {color: var(--l0)}
.soft {color: var(--soft)}
.outcome {margin: 16px 0; padding: 12px 16px; border: 1px solid var(--grid); \
border-left: 5px solid; border-radius: 6px}
.outcome p {overflow-wrap: anywhere}
.outcome strong {font-size: 1.12rem}
.badge {display: inline-block; margin-left: .5em; font-size: .8rem; font-weight: 600; \
line-height: 1.5; padding: 0 .7em; border: 1px solid; border-radius: 1em; vertical-align: middle}
.finished {color: #1a7f37}
.stopped {color: #8a5a00}
.failed {color: #c0182b}
.open {color: var(--soft)}
@media screen and (prefers-color-scheme: dark) {
  .finished {color: #4ac26b}
  .stopped {color: #d4a72c}
  .failed {color: #ff8a94}
}
nav {margin: 0 0 14px}
nav a {margin-right: 14px; display: inline-block}
.tiles {display: flex; flex-wrap: wrap; gap: 10px; margin: 10px 0}
.tiles div {flex: 1 1 140px; border: 1px solid var(--grid); border-radius: 6px; \
padding: 8px 12px; min-width: 0}
.tiles dt {font-size: .8rem; color: var(--soft); overflow-wrap: anywhere}
.tiles dd {margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums}
.tiles.results dd {font-size: 1.45rem}
.tiles span {display: block; font-size: .8rem; font-weight: 400}
.charts {display: grid; grid-template-columns: repeat(6, 1fr); gap: 14px}
figure {grid-column: span 6; margin: 0; border: 1px solid var(--grid); border-radius: 6px; \
padding: 8px; min-width: 0}
figure svg {display: block; width: 100%; max-width: 520px; height: auto}
.wide svg {max-width: none}
.wide .large {display: none}
@media (min-width: 740px) {.third, .half {grid-column: span 3} .last {grid-column: span 6}}
@media (min-width: 860px) {.wide .large {display: block} .wide .small {display: none}}
@media (min-width: 1100px) {.third {grid-column: span 2} .half {grid-column: span 3}}
details {margin: .3em 0}
summary {cursor: pointer; font-size: .85rem; color: var(--soft)}
.scroll {overflow-x: auto; max-width: 100%}
figure .scroll, .tall {max-height: 340px; overflow-y: auto}
table {border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums}
th, td {text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--grid); \
vertical-align: top}
td {max-width: 560px; overflow-wrap: break-word}
.best {font-weight: 700}
pre {font: 12px/1.45 ui-monospace, monospace; margin: 0}
@media print {
  body {font-size: 11px}
  nav, summary {display: none}
  figure, .outcome, .tiles div {break-inside: avoid}
  .third, .half {grid-column: span 3}
  .last {grid-column: span 6}
  .scroll {max-height: none !important}
}
"""


MARK: Final = b"Written by dsf-trainer"
"""In the last line of every page."""


def page(runs: Sequence[RunRecords], *, refresh_seconds: int = 0) -> str:
    """Make the page of one run, or of several over each other.

    Args:
        runs: at least one.
        refresh_seconds: after how long a browser loads it anew; 0 for never.
    """
    title = runs[0].name
    if len(runs) > 1:
        title = f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    sections = []
    for name, charts in charts_of(runs).items():
        sections.append((name, figures(charts)))
    for name, content in _tables(runs):
        if content:
            sections.append((name, content))
    return document(
        _cut(title, 160),
        sections,
        about="Report of training",
        badge=_badge(runs[0]) if len(runs) == 1 else "",
        top="".join(_outcome(run, style, len(runs) > 1) for style, run in enumerate(runs)),
        lead=_headline_figures(runs),
        refresh_seconds=refresh_seconds,
    )


def _cut(words: str, longest: int) -> str:
    if len(words) <= longest:
        return words
    return words[: longest - 3] + "..."


def document(
    title: str,
    sections: Sequence[tuple[str, str]],
    *,
    about: str,
    top: str,
    badge: str = "",
    lead: str = "",
    refresh_seconds: int = 0,
) -> str:
    """Make a page.

    Args:
        title: heading of the page.
        sections: heading and HTML of each.
        about: line above the title.
        badge: HTML beside the title.
        top: HTML before the links to the sections.
        lead: HTML after them.
        refresh_seconds: after how long a browser loads it anew; 0 for never.
    """
    links = ""
    body = ""
    for name, content in sections:
        anchor = name.lower().replace(" ", "-")
        links += f'<a href="#{anchor}">{name}</a>'
        heading = f'<h2 id="{anchor}">{name}</h2>'
        body += f'<section aria-labelledby="{anchor}">{heading}{content}</section>'
    refresh = ""
    if refresh_seconds:
        refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">'
    written = f"{text(framework.__version__)}, {moment(time.time())} UTC."
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{text(title)}</title>{refresh}"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}{_PAGE_STYLE}</style></head>\n"
        f'<body><header><p class="soft">{text(about)}</p><h1>{text(title)}{badge}</h1>{top}'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>{lead}{body}</main>\n'
        f'<footer class="soft">Written by dsf-trainer {written}</footer></body></html>\n'
    )


def write_page(folder: Path, out: Path) -> None:
    """Write the page of the run in `folder` to `out`, with at most about `MOST_POINTS_AT_END`
    points, so that the end of a long run does not wait.
    """
    replace_text(out, page([read_run(folder, most_points=MOST_POINTS_AT_END)]))


def _outcome(run: RunRecords, style: int, has_name: bool) -> str:
    """Return what a reader asks first of a run: how it ended, its result, its error; then what it
    ran on, what bounds its speed, and what its folder lacks.
    """
    verdict = verdict_of(run)
    name = ""
    if has_name:
        name = f"{text(run.name)} {_badge(run)} "
    sentences = _sentence(state(run))
    result = result_text(run)
    if result:
        sentences += f" {result}."
    error = ""
    if outcome(run) == "failed":
        error = f'<p class="failed">{text(error_of(run))}</p>'
    return (
        f'<div class="outcome" style="border-left-color:var(--l{style % 6})">'
        f"<p><strong>{name}{text(sentences)}</strong></p>{error}"
        f'<p class="soft">{text(_where(run).strip())}</p>'
        f"<p><b>Speed:</b> {text(verdict.sentence)}. "
        f"<b>Try next:</b> {text(verdict.advice)}.</p>{_list(_notes(run))}</div>"
    )


def _notes(run: RunRecords) -> list[str]:
    """Return what the folder lacks, changed settings, and the error of an earlier start."""
    notes = list(run.notes)
    for change in changes(run):
        notes.append(f"changed after step {change['step']}: {'; '.join(change['changes'])}")
    if run.last_error and run.last_error != error_of(run):
        notes.append(f"last error: {run.last_error}")
    return notes


def _badge(run: RunRecords) -> str:
    state_name = outcome(run)
    return f'<span class="badge {state_name}">{_BADGES[state_name]}</span>'


_BADGES: Final = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "open": "not ended",
}


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def _where(run: RunRecords) -> str:
    """Return device, model and dates in a line; what is not known is left out."""
    cluster = run.section("cluster")
    names = [run.setting("model", key) for key in ("kind", "target", "object")]
    model = next(filter(None, names), "unknown")
    device = run.environment.get("device", cluster.get("device"))
    facts = [f"model {show_value(model)}"]
    world_size = cluster.get("world_size")
    if world_size is not None and device is not None:
        facts.append(f"{world_size} x {device}")
    dtype = run.setting("precision", "dtype")
    stage = run.setting("zero", "stage")
    if dtype is not None and stage is not None:
        facts.append(f"ZeRO {stage}, {dtype}")
    stamps = run.clock.finite_values
    if stamps:
        facts.append(f"last record {moment(stamps[-1])} UTC")
    line = ""
    for fact in facts:
        line += f" {fact[:1].upper()}{fact[1:]}."
    return line


def _headline_figures(runs: Sequence[RunRecords]) -> str:
    """Return the headline figures: tiles of one run; of several a table, below the settings in
    which they differ.
    """
    if len(runs) == 1:
        rows = ""
        for name, entries in headline(runs[0]).items():
            rows += _tiles(name, entries)
        return rows
    columns = []
    for run in runs:
        column: dict[str, str] = {}
        for entries in headline(run).values():
            column.update(entries)
        columns.append(column)
    table = _rows_of(columns)
    for row in table:
        _explain_gaps(row, runs)
    figures = _table(["", *_run_names(runs)], table, label="Headline figures")
    return f"{_differences(runs)}<p>Headline figures:</p>{figures}"


def _explain_gaps(row: list[str], runs: Sequence[RunRecords]) -> None:
    """Fill the cells of a row for figures that a run does not have."""
    for index, run in enumerate(runs, start=1):
        if not row[index]:
            is_evaluation = row[0].startswith("best ")
            row[index] = "-"
            if is_evaluation and not eval_metrics(run):
                row[index] = "not evaluated"


def _run_names(runs: Sequence[RunRecords]) -> list[str]:
    return [run.name for run in runs]


def _rows_of(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row for each key of some columns, in the order in which keys come first; a column
    without the key has an empty cell.
    """
    keys: dict[str, None] = {}
    for column in columns:
        keys |= dict.fromkeys(column)
    rows = []
    for key in keys:
        row = [key]
        for column in columns:
            row.append(column.get(key, ""))
        rows.append(row)
    return rows


def _tiles(name: str, entries: Sequence[tuple[str, str]]) -> str:
    """Return a row of tiles: what a figure is, its value, and its unit or step below."""
    tiles = ""
    for label, value in entries:
        below = ""
        if label != "duration":
            value, _, below = value.partition(" ")
        tiles += (
            f"<div><dt>{text(label)}</dt><dd>{text(value)} <span>{text(below)}</span></dd></div>"
        )
    kind = " results" if name == "Result" else ""
    return f'<dl class="tiles{kind}" aria-label="{text(name)}">{tiles}</dl>'


def figures(charts: Sequence[Chart]) -> str:
    """Return charts side by side, each with its data as a table, in rows that they fill: a chart
    with a wide drawing takes one, the others stand in threes, and in twos where one would be left.
    """
    content = ""
    narrow = []
    for chart in charts:
        if chart.wide:
            content += _figure(chart, "wide")
        else:
            narrow.append(chart)
    shapes = _shapes(len(narrow))
    for chart, shape in zip(narrow, shapes, strict=True):
        content += _figure(chart, shape)
    return f'<div class="charts">{content}</div>'


def _shapes(count: int) -> list[str]:
    """Return the share of a row that each of some charts takes; on screens that fit two, `last` is
    the one without a neighbour.
    """
    if count == 1:
        return ["whole"]
    num_halves = {0: 0, 1: 4, 2: 2}[count % 3]
    shapes = []
    for place in range(count):
        shapes.append("third" if place < count - num_halves else "half")
    if count % 2:
        shapes[-1] += " last"
    return shapes


def _figure(chart: Chart, shape: str) -> str:
    drawings = chart.svg
    if chart.wide:
        drawings = f'<div class="small">{chart.svg}</div><div class="large">{chart.wide}</div>'
    data = _table(chart.columns, chart.rows, label=f"Data of {chart.title}")
    if chart.note:
        data += f'<p class="soft">{text(chart.note)}</p>'
    remark = f'<p class="soft">{text(chart.remark)}</p>' if chart.remark else ""
    return (
        f'<figure class="{shape}" id="chart-{chart.slug}">{drawings}{remark}'
        f"<details><summary>Data: {text(chart.title)}</summary>{data}</details></figure>"
    )


def _tables(runs: Sequence[RunRecords]) -> Iterator[tuple[str, str]]:
    """Yield heading and HTML of the sections without charts; the HTML may be empty."""
    yield "Profile", _for_each(runs, _profile)
    yield "Evaluation", _for_each(runs, _evaluation)
    yield "Matrices", _for_each(runs, _matrices)
    yield "Events", _for_each(runs, _events)
    yield "Config", "".join(map(_config, runs))
    yield "Environment", _environment(runs)


def _for_each(runs: Sequence[RunRecords], content_of: Callable[[RunRecords], str]) -> str:
    """Return the content of each run that has some, below its name if there are several runs."""
    parts = []
    for run in runs:
        content = content_of(run)
        if content and len(runs) > 1:
            parts.append(f"<h3>{text(run.name)}</h3>")
        parts.append(content)
    return "".join(parts)


def _environment(runs: Sequence[RunRecords]) -> str:
    columns = []
    for run in runs:
        columns.append(
            _as_texts(flat(run.environment) | flat(run.section("layout"), prefix="layout"))
        )
    rows = _rows_of(columns)[:_MOST_ROWS]
    if not rows:
        return ""
    headings = _run_names(runs) if len(runs) > 1 else ["value"]
    return _table(["", *headings], rows, label="Environment")


def _as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: show_value(value) for key, value in values.items()}


def _profile(run: RunRecords) -> str:
    content = ""
    for title, columns, rows in tables_of(run.profile):
        content += f"<h3>{text(title)}</h3>{_table(columns, rows, label=title, is_tall=True)}"
    return content


def _evaluation(run: RunRecords) -> str:
    """Return a row for each evaluation, the best of every metric marked; of very many evaluations,
    rows at even distances.
    """
    metrics = eval_metrics(run)
    if not metrics:
        return ""
    all_steps = set[int]()
    best_steps = []
    columns = []
    for name, series in metrics.items():
        all_steps.update(series.steps)
        best_steps.append(best(name, series)[0])
        columns.append(dict(zip(series.steps, series.values, strict=True)))
    steps = sorted(all_steps)
    stride = -(-len(steps) // _MOST_ROWS)
    from_the_last = steps[::-1][::stride]  # so the last step is always shown
    shown = set(from_the_last) | set(best_steps)
    rows = []
    for step in sorted(shown):
        row = [f"{step:,}"]
        for values, best_step in zip(columns, best_steps, strict=True):
            row.append(_marked(values.get(step), is_best=best_step == step))
        rows.append(row)
    return _table(["step", *metrics], rows, label="Evaluation", is_tall=True)


def _matrices(run: RunRecords) -> str:
    """Return the metrics that are matrices, such as a confusion matrix, of the last evaluation."""
    content = ""
    for name, entry in run.tables.items():
        rows = []
        try:
            for place, values in enumerate(entry["rows"][:_MOST_ROWS]):
                rows.append([str(place), *(number(value) for value in values[:_MOST_ROWS])])
            title = f"{name} at step {entry['step']:,}"
        except (TypeError, ValueError, LookupError):
            continue
        if rows:
            columns = ["", *(str(place) for place in range(len(rows[0]) - 1))]
            content += f"<h3>{text(title)}</h3>{_table(columns, rows, label=title, is_tall=True)}"
    return content


def _marked(value: float | None, *, is_best: bool) -> str:
    if value is None:
        return ""
    if is_best:
        return f"{number(value)} (best)"
    return number(value)


def _warnings(run: RunRecords) -> list[str]:
    """Return lines on the logged warnings that no event has: the first `_MOST_WARNINGS`, and how
    many more there are.
    """
    known = set()
    for event in run.happened("warning", "straggler"):
        known.add(str(event.get("text", event.get("message", ""))))
    warnings = [warning for warning in run.warnings if warning not in known]
    notes = [f"warning: {_shortened(warning)}" for warning in warnings[:_MOST_WARNINGS]]
    if len(warnings) > _MOST_WARNINGS:
        notes.append(f"{len(warnings) - _MOST_WARNINGS} more warnings")
    return notes


def _events(run: RunRecords) -> str:
    """Return the events in their order, or what metrics and folder show of them, and the
    warnings.
    """
    rows = list(map(_event_row, run.events)) or _rows_of_marks(run)
    notes = []
    if len(rows) > _MOST_ROWS:
        notes.append(f"{len(rows) - _MOST_ROWS:,} events in between are left out")
        rows = rows[: _MOST_ROWS // 2] + rows[-_MOST_ROWS // 2 :]
    notes += _warnings(run)
    content = ""
    if rows:
        columns = ["time (UTC)", "step", "event", "duration", "details"]
        content = _table(columns, rows, label="Events", is_tall=True)
    return content + _list(notes)


def _event_row(event: Mapping[str, Any]) -> list[str]:
    """Return time, step, kind, duration and details of an event; empty text for what it lacks."""
    spent = ""
    if "seconds" in event:
        spent = f"{number(event['seconds'])} s"
    stamp = event.get("time_seconds", float("nan"))
    details = _shortened(_details(event))
    return [moment(stamp), str(event.get("step", "")), event["kind"], spent, details]


def _rows_of_marks(run: RunRecords) -> list[list[str]]:
    names = {
        "save": "checkpoint",
        "skip": "skipped step",
        "restart": "restart",
        "back": "roll back",
    }
    rows = []
    for mark in sorted(marks_of(run), key=lambda mark: mark.step):
        rows.append(["", f"{mark.step:,}", names[mark.kind], "", ""])
    return rows


def _details(event: Mapping[str, Any]) -> str:
    details = []
    for key, value in event.items():
        if key not in ("time_seconds", "step", "kind", "seconds"):
            details.append(f"{key}: {show_value(value)}")
    return ", ".join(details[:20])


def _shortened(words: str) -> str:
    return _cut(words, _LONGEST_TEXT)


def _differences(runs: Sequence[RunRecords]) -> str:
    """Return the keys of the configs that differ between the runs, with their values."""
    columns = [_as_texts(flat(run.config)) for run in runs]
    rows = [row for row in _rows_of(columns) if len(set(row[1:])) > 1]
    if not rows:
        return "<p>The configs are equal.</p>"
    table = _table(["key", *_run_names(runs)], rows[:_MOST_ROWS], label="Differences")
    return "<p>What differs between the configs:</p>" + table


def _config(run: RunRecords) -> str:
    """Return the run's config.yaml as an element that opens; empty if the file cannot be read."""
    try:
        content = read_regular(run.folder / "config.yaml", num_bytes=_LONGEST_CONFIG + 1) or b""
    except OSError:
        return ""
    words = content.decode("utf-8", "replace")
    if len(content) > _LONGEST_CONFIG:
        words = words[:_LONGEST_CONFIG] + "\n... (cut off)"
    lines = "\n".join(map(text, words.splitlines()))
    place = _scroll(f"<pre>{lines}</pre>", f"config.yaml of {run.name}", is_tall=True)
    return (
        f"<details><summary>config.yaml of {text(run.name)}, with every "
        f"default</summary>{place}</details>"
    )


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, is_tall: bool = False
) -> str:
    head = _row(columns, scope="col", tag="th", attributes=" scope=col")
    body = "".join(_row(row, scope="row", tag="td") for row in rows)
    return _scroll(
        f"<table><thead>{head}</thead><tbody>{body}</tbody></table>", label, is_tall=is_tall
    )


table: Final = _table  # for pages of other things than runs


def _row(cells: Sequence[str], *, scope: str, tag: str, attributes: str = "") -> str:
    """Return a table row; its first cell is a heading for `scope`, and the others are elements
    `tag`.
    """
    row = "<td></td>"
    if cells[0]:
        row = f'<th scope="{scope}">{text(cells[0])}</th>'
    for cell in cells[1:]:
        style = ' class="best"' if cell.endswith(" (best)") else ""
        row += f"<{tag}{attributes}{style}>{text(cell)}</{tag}>"
    return f"<tr>{row}</tr>"


def _scroll(content: str, label: str, *, is_tall: bool = False) -> str:
    """Wrap content so that it scrolls by itself, also with the keyboard, and the page never scrolls
    sideways.
    """
    shape = "scroll tall" if is_tall else "scroll"
    return (
        f'<div class="{shape}" role="group" aria-label="{text(label)}" tabindex="0">{content}</div>'
    )


def _list(lines: Sequence[str]) -> str:
    items = ""
    for line in lines:
        items += f"<li>{text(_shortened(line))}</li>"
    if items:
        return f"<ul>{items}</ul>"
    return ""
