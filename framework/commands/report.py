"""The `report` command: a page of one run, or of several over each other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import EXIT_OK, StorageError, UsageError
from framework.system.arguments import parse_command, whole
from framework.system.command_parser import CommandParser
from framework.system.output import visible, write

if TYPE_CHECKING:  # imported where options are known to go together
    from framework.report.records import RunRecords

_REFRESH_SECONDS = 10


def main(words: Sequence[str]) -> int:
    """Write, print or serve the report; returns the exit code.

    Raises:
        ConfigError: a folder is not a run's.
        StorageError: the page cannot be written.
        UsageError: options exclude each other.
    """
    return _run(parse_command("report", _add_arguments, words))


def _add_arguments(report: CommandParser) -> None:
    port = whole(0, 65536, "{} is not a port; write 0 to 65535")
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folder, <run.output_dir>/<run.name>"
    )
    report.add_argument(
        "--out",
        metavar="FILE.html",
        help="the page; left out: report.html in the (first) run folder",
    )
    for kind in ("svg", "png"):
        report.add_argument(
            f"--{kind}", metavar="DIR", help=f"also write each chart as {kind.upper()} there"
        )
    report.add_argument(
        "--json",
        action="store_true",
        help="print verdict and figures as JSON; the page with --out only",
    )
    report.add_argument(
        "--serve", action="store_true", help="serve the page on this machine, and follow the run"
    )
    report.add_argument(
        "--port", type=port, default=0, metavar="P", help="of --serve; left out: a free one"
    )


def _run(arguments: argparse.Namespace) -> int:
    from framework.report.records import read_run

    if arguments.port and not arguments.serve:
        raise UsageError("report: --port goes with --serve")
    folders = list(map(Path, arguments.runs))
    runs = list(map(read_run, folders))
    if arguments.serve:
        _serve(folders, runs, port=arguments.port)
        return EXIT_OK
    out = _write_files(arguments, folders, runs)
    if arguments.json:
        _print_json(runs)
    else:
        _print_lines(runs, out)
    return EXIT_OK


def _print_lines(runs: list[RunRecords], out: Path) -> None:
    from framework.report.figures import error_of, state, verdict_of

    lines = []
    for run in runs:
        lines.append(f"{run.name}: {state(run)}; {verdict_of(run).sentence}")
        if error_of(run):
            lines.append(f"{run.name}: error: {error_of(run)}")
    lines.append(f"report: {out}")
    for line in lines:
        write(sys.stdout, f"{visible(line, keeps='')}\n")


def _print_json(runs: Sequence[RunRecords]) -> None:
    from framework.report.figures import summary

    # JSON escapes all control characters by itself, but for one
    print(json.dumps(list(map(summary, runs)), indent=2).replace("\x7f", "\\u007f"))


def _serve(folders: list[Path], runs: list[RunRecords], *, port: int) -> None:
    """Serve the page of runs until Ctrl-C; blocks."""
    from framework.report.page import page
    from framework.report.records import read_run
    from framework.report.serve import serve

    def newest_page() -> str:
        """Make the page again; only the new part of a growing file is read."""
        for number, folder in enumerate(folders):
            runs[number] = read_run(folder, before=runs[number])
        return page(runs, refresh_seconds=_REFRESH_SECONDS)

    serve(newest_page, port=port)


def _write_files(
    arguments: argparse.Namespace, folders: list[Path], runs: list[RunRecords]
) -> Path:
    """Write the charts and the page, unless only JSON is requested; returns the page's path."""
    from framework.report.page import MARK, REPORT
    from framework.system.files import refuse_foreign

    out = Path(arguments.out or folders[0] / REPORT)
    try:
        if arguments.out:
            refuse_foreign(out, marks=[MARK])
        _write_charts(runs, svg=arguments.svg, png=arguments.png)
        if arguments.out or not arguments.json:
            _write_page(out, runs)
    except OSError as error:
        raise _not_written(error, out) from error
    return out


def _not_written(error: OSError, out: Path) -> StorageError:
    place = visible(str(error.filename or out), keeps="")
    reason = f"report: {place}: it cannot be written ({error.strerror or error})"
    return StorageError(f"{reason}; name another place with --out FILE.html [report-not-written]")


def _write_page(out: Path, runs: list[RunRecords]) -> None:
    from framework.report.page import page
    from framework.system.files import replace_text

    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page(runs))


def _write_charts(runs: list[RunRecords], *, svg: str | None, png: str | None) -> None:
    """Write the charts into the folders `svg` and `png`, after a check that all can be written."""
    if not (svg or png):
        return
    from framework.system.files import replace_bytes

    for place, content in _chart_files(runs, svg=svg, png=png).items():
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(place, content)


def _chart_files(runs: list[RunRecords], *, svg: str | None, png: str | None) -> dict[Path, bytes]:
    """Draw the charts; raises OSError if a file of another kind has the place of one."""
    from framework.report.chart import Chart
    from framework.report.png import MARK, png_of
    from framework.report.run_charts import charts_of

    files: dict[Path, bytes] = {}
    for chart in chain.from_iterable(charts_of(runs).values()):
        if svg:
            files[_free_place(svg, f"{chart.slug}.svg", Chart.MARK)] = chart.file().encode()
        if png:
            files[_free_place(png, f"{chart.slug}.png", MARK)] = png_of(chart.file())
    return files


def _free_place(folder: str, name: str, mark: bytes) -> Path:
    """Return the path of a chart; raises OSError if a file of another kind has it."""
    from framework.system.files import refuse_foreign

    place = Path(folder, name)
    refuse_foreign(place, marks=[mark])
    return place
