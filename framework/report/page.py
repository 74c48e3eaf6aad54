"""Page of a report: one HTML file that needs no network, no script and no font of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import framework
from framework.errors import show_value
from framework.report.charts import charts_of, marks_of
from framework.report.draw import STYLE, Chart, text
from framework.report.figures import best, headline, moment, number, state, verdict_of
from framework.report.profile import tables_of
from framework.report.records import RunRecords, flat, read_run
from framework.system.files import read_regular, replace_text

REPORT: Final = "report.html"
# What the end of a training run reads of its own metrics: it must not wait for its page.
MOST_POINTS_AT_END: Final = 10_000
_MOST_ROWS: Final = 200
_MOST_WARNINGS: Final = 100
_LONGEST_TEXT: Final = 500
_LONGEST_CONFIG: Final = 60_000
# Nothing may be fetched, and nothing may run, whatever a name or a config holds.
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
ul {margin: .4em 0; padding-left: 1.2em; overflow-wrap: anywhere}
a {color: var(--l0)}
.soft {color: var(--soft)}
.verdict {margin: 16px 0; padding: 12px 16px; border: 1px solid var(--grid); border-left: 5px solid; border-radius: 6px}
.verdict p {overflow-wrap: anywhere}
.verdict strong {font-size: 1.12rem}
nav {margin: 0 0 14px}
nav a {margin-right: 14px; display: inline-block}
.tiles {display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; margin: 18px 0}
.tiles div {border: 1px solid var(--grid); border-radius: 6px; padding: 8px 12px; min-width: 0}
.tiles dt {font-size: .8rem; color: var(--soft); overflow-wrap: anywhere}
.tiles dd {margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums}
.tiles span {display: block; font-size: .8rem; font-weight: 400}
.charts {display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 14px}
figure {margin: 0; border: 1px solid var(--grid); border-radius: 6px; padding: 8px; min-width: 0}
figure svg {display: block; width: 100%; height: auto}
.wide {grid-column: 1 / -1}
.wide .large {display: none}
@media (min-width: 860px) {.wide .large {display: block} .wide .small {display: none}}
details {margin: .3em 0}
summary {cursor: pointer; font-size: .85rem; color: var(--soft)}
.scroll {overflow-x: auto; max-width: 100%}
figure .scroll, .tall {max-height: 340px; overflow-y: auto}
table {border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums}
th, td {text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top}
td {max-width: 560px; overflow-wrap: break-word}
.best {font-weight: 700}
pre {font: 12px/1.45 ui-monospace, monospace; margin: 0}
@media print {
  body {font-size: 11px}
  nav, summary {display: none}
  figure, .verdict, .tiles div {break-inside: avoid}
  .charts {grid-template-columns: 1fr 1fr}
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
    if len(runs) == 1:
        title = runs[0].name
    else:
        title = f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    if len(title) <= 160:
        title = title
    else:
        title = title[:157] + "..."
    charts = charts_of(runs)
    sections = [(name, figures(found)) for name, found in charts.items()]
    sections += [(name, content) for name, content in _tables(runs) if content]
    parts = {"top": _top(runs), "lead": _figures(runs)}
    return document(
        title, sections, about="Report of training", **parts, refresh_seconds=refresh_seconds
    )


def document(
    title: str,
    sections: Sequence[tuple[str, str]],
    *,
    about: str,
    top: str,
    lead: str = "",
    refresh_seconds: int = 0,
) -> str:
    """Make a page: heading, the line above it, sections by headings, and HTML before and after the
    links to them.
    """
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{_anchor(name)}"><h2 '
        f'id="{_anchor(name)}">{name}</h2>{content}</section>'
        for name, content in sections
    )
    if refresh_seconds:
        refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">'
    else:
        refresh = ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>{refresh}'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}{_PAGE_STYLE}</style></head>\n'
        f'<body><header><p class="soft">{text(about)}</p><h1>{text(title)}</h1>{top}'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>{lead}{body}</main>\n'
        f'<footer class="soft">Written by dsf-trainer {text(framework.__version__)}, {moment(time.time())} UTC.'
        "</footer></body></html>\n"
    )


def write_page(folder: Path, out: Path) -> None:
    """Write the page of a run that ends, of a long one with every n-th point, so that its end does
    not wait.
    """
    replace_text(out, page([read_run(folder, most_points=MOST_POINTS_AT_END)]))


def _top(runs: Sequence[RunRecords]) -> str:
    """Verdict of each run, how far it came, and what its folder lacks."""
    parts = []
    for style, run in enumerate(runs):
        verdict = verdict_of(run)
        several = len(runs) > 1
        if several:
            name = f"{text(run.name)}: "
        else:
            name = ""
        notes = _list([*run.notes, *([f"last error: {run.last_error}"] if run.last_error else [])])
        parts.append(
            f'<div class="verdict" style="border-left-color:var(--l{style % 6})"><p><strong>{name}'
            f"{text(verdict.sentence)}.</strong></p><p>Try next: {text(verdict.advice)}.</p>"
            f'<p class="soft">{text(_sentence(state(run)))}{text(_where(run))}</p>{notes}</div>'
        )
    return "".join(parts)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def _where(run: RunRecords) -> str:
    """Devices, model and dates in a line, as far as they are known."""
    config = run.config
    cluster = run.section("cluster")
    stamps = [value for _, value in run.clock.finite]
    facts = [
        f"model {show_value(_of(config, 'model', 'kind') or _of(config, 'model', 'target') or 'unknown')}",
        f"{cluster.get('world_size')} x {run.environment.get('device', cluster.get('device'))}",
        f"{_of(config, 'precision', 'dtype')}, ZeRO {_of(config, 'zero', 'stage')}",
        f"last record {moment(stamps[-1])} UTC" if stamps else "None",
    ]
    return "".join(f" {fact[:1].upper()}{fact[1:]}." for fact in facts if "None" not in fact)


def _of(values: Mapping[str, Any], section: str, key: str) -> Any:
    found = values.get(section)
    if isinstance(found, Mapping):
        return found.get(key)
    return None


def _figures(runs: Sequence[RunRecords]) -> str:
    """Headline figures: tiles of one run, a table of several."""
    found = [headline(run) for run in runs]
    if len(runs) == 1:
        # What a number belongs to stands below it: best at which step, rate of what.
        parts = (
            (label, *((value, "", "") if label == "duration" else value.partition(" ")))
            for label, value in found[0]
        )
        tiles = (
            f"<div><dt>{text(a)}</dt><dd>{text(b)} <span>{text(c)}</span></dd></div>"
            for a, b, _, c in parts
        )
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    labels = dict.fromkeys(label for rows in found for label, _ in rows)
    table = [[label, *(dict(rows).get(label, "") for rows in found)] for label in labels]
    return _table(["", *(run.name for run in runs)], table, label="Headline figures")


def figures(charts: Sequence[Chart]) -> str:
    """Charts side by side, each with its data as a table."""
    return f'<div class="charts">{"".join(map(_figure, charts))}</div>'


def _figure(chart: Chart) -> str:
    drawings = chart.svg
    if chart.wide:
        drawings = f'<div class="small">{chart.svg}</div><div class="large">{chart.wide}</div>'
    if chart.note:
        note = f'<p class="soft">{text(chart.note)}</p>'
    else:
        note = ""
    table = _table(chart.columns, chart.rows, label=f"Data of {chart.title}")
    return (
        f'<figure{" class=wide" if chart.wide else ""} id="chart-{chart.slug}">{drawings}'
        f"<details><summary>Data: {text(chart.title)}</summary>{table}{note}</details></figure>"
    )


def _tables(runs: Sequence[RunRecords]) -> Iterator[tuple[str, str]]:
    """Sections without charts."""
    yield (
        "Profile",
        "".join(_heading(run, runs) + found for run in runs if (found := _profile(run))),
    )
    yield (
        "Evaluation",
        "".join(_heading(run, runs) + found for run in runs if (found := _evaluation(run))),
    )
    yield "Events", "".join(_heading(run, runs) + found for run in runs if (found := _events(run)))
    yield "Config", (_differences(runs) if len(runs) > 1 else "") + "".join(map(_config, runs))
    facts = [flat(run.environment) | flat(run.section("layout"), prefix="layout") for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each)
    rows = [
        [key, *(show_value(each[key]) if key in each else "" for each in facts)]
        for key in list(keys)[:_MOST_ROWS]
    ]
    columns = ["", *(run.name if len(runs) > 1 else "value" for run in runs)]
    yield "Environment", _table(columns, rows, label="Environment") if rows else ""


def _heading(run: RunRecords, runs: Sequence[RunRecords]) -> str:
    if len(runs) > 1:
        return f"<h3>{text(run.name)}</h3>"
    return ""


def _profile(run: RunRecords) -> str:
    tables = tables_of(run.profile)
    return "".join(
        f"<h3>{text(title)}</h3>{_table(cols, rows, label=title, is_tall=True)}"
        for title, cols, rows in tables
    )


def _evaluation(run: RunRecords) -> str:
    """A row for each evaluation, the best of every metric marked; of very many, those at even
    distances.
    """
    found = {
        name: each
        for name, each in sorted(run.metrics.items())
        if name.startswith("eval/") and each.finite
    }
    if not found:
        return ""
    bests = {name: best(name, each)[0] for name, each in found.items()}
    at = {name: dict(zip(each.steps, each.values, strict=True)) for name, each in found.items()}
    steps = sorted({step for each in found.values() for step in each.steps})
    stride = -(-len(steps) // _MOST_ROWS)
    rows = [
        [f"{step:,}", *(_marked(at[name].get(step), is_best=bests[name] == step) for name in found)]
        for step in sorted({*steps[::-1][::stride], *bests.values()})
    ]
    return _table(["step", *found], rows, label="Evaluation", is_tall=True)


def _marked(value: float | None, *, is_best: bool) -> str:
    if value is None:
        return ""
    return number(value) + (" (best)" if is_best else "")


def _events(run: RunRecords) -> str:
    """Events in their order, or what metrics and folder know of them, and the warnings."""
    rows = [
        [
            moment(event.get("time_seconds", float("nan"))),
            str(event.get("step", "")),
            event["kind"],
            "" if "seconds" not in event else f"{number(event['seconds'])} s",
            _shortened(_details(event)),
        ]
        for event in run.events
    ]
    names = {
        "save": "checkpoint",
        "skip": "skipped step",
        "restart": "restart",
        "back": "roll back",
    }
    if not rows:
        marks = sorted(marks_of(run), key=lambda mark: mark.step)
        rows = [["", f"{mark.step:,}", names[mark.kind], "", ""] for mark in marks]
    known = {
        str(event.get("text", event.get("message", "")))
        for event in run.happened("warning", "straggler")
    }
    warnings = [_shortened(warning) for warning in run.warnings if warning not in known]
    if len(rows) > _MOST_ROWS:
        left_out = f"{len(rows) - _MOST_ROWS:,} events in between are left out"
    else:
        left_out = ""
    if not left_out:
        rows = rows
    else:
        rows = [*rows[: _MOST_ROWS // 2], *rows[-_MOST_ROWS // 2 :]]
    columns = ["time (UTC)", "step", "event", "duration", "details"]
    if rows:
        table = _table(columns, rows, label="Events", is_tall=True)
    else:
        table = ""
    listed = [left_out] if left_out else []
    listed += [f"warning: {warning}" for warning in warnings[:_MOST_WARNINGS]]
    listed += (
        [f"{len(warnings) - _MOST_WARNINGS} more warnings"]
        if len(warnings) > _MOST_WARNINGS
        else []
    )
    return table + _list(listed)


def _details(event: Mapping[str, Any]) -> str:
    shown = {
        key: value
        for key, value in event.items()
        if key not in ("time_seconds", "step", "kind", "seconds")
    }
    return ", ".join(f"{key}: {show_value(value)}" for key, value in list(shown.items())[:20])


def _shortened(words: str) -> str:
    if len(words) <= _LONGEST_TEXT:
        return words
    return words[: _LONGEST_TEXT - 3] + "..."


def _differences(runs: Sequence[RunRecords]) -> str:
    """Keys of the configs whose values differ between the runs."""
    found = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for each in found for key in each)
    rows = [
        [key, *(show_value(each[key]) if key in each else "" for each in found)] for key in keys
    ]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return "<p>The configs are equal.</p>"
    return "<p>What differs between the configs:</p>" + _table(
        ["key", *(run.name for run in runs)], rows[:_MOST_ROWS], label="Differences"
    )


def _config(run: RunRecords) -> str:
    try:
        content = read_regular(run.folder / "config.yaml", num_bytes=_LONGEST_CONFIG + 1) or b""
    except OSError:
        return ""
    words = content.decode("utf-8", "replace")
    if len(content) <= _LONGEST_CONFIG:
        words = words
    else:
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
    def row_of(cells: Sequence[str], scope: str) -> str:
        if cells[0]:
            first = f'<th scope="{scope}">{text(cells[0])}</th>'
        else:
            first = "<td></td>"
        name = "th scope=col" if scope == "col" else "td"
        rest = (f"<{name}{_class(cell)}>{text(cell)}</{name[:2]}>" for cell in cells[1:])
        return f"<tr>{first}{''.join(rest)}</tr>"

    head = row_of(columns, "col")
    body = "".join(row_of(row, "row") for row in rows)
    return _scroll(
        f"<table><thead>{head}</thead><tbody>{body}</tbody></table>", label, is_tall=is_tall
    )


table: Final = _table  # for pages of other things than runs


def _class(cell: str) -> str:
    if cell.endswith(" (best)"):
        return ' class="best"'
    return ""


def _scroll(content: str, label: str, *, is_tall: bool = False) -> str:
    """Scroll a wide table by itself, also with the keyboard, so that the page never does."""
    shape = "scroll tall" if is_tall else "scroll"
    return (
        f'<div class="{shape}" role="group" aria-label="{text(label)}" tabindex="0">{content}</div>'
    )


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{text(_shortened(line))}</li>" for line in lines)
    if items:
        return f"<ul>{items}</ul>"
    return ""


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
