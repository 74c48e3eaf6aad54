"""Progress on rank 0, and the lines of every rank's own log.

Progress on rank 0 during training: a bar on a terminal, a line per logged step elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Literal

from framework.errors import printable
from framework.system.log import note
from framework.system.output import leave, write
from framework.train.monitors.base import Monitor, Point

_SHOWN = {
    "train/loss": "loss {:.4f}",
    "train/lr": "lr {:.3g}",
    "train/grad_norm": "grad norm {:.3g}",
    "throughput/samples_per_sec": "{:,.0f} samples/s",
    "throughput/tokens_per_sec": "{:,.0f} tokens/s",
    "memory/device_peak_bytes": "{:.1f} GB",
}
_BYTES_PER_GB = 1e9
# Of lines: enough for most values, so that seldom one moves those behind it.
_USUAL_WIDTHS = {
    "train/loss": len("loss 1.2345"),
    "train/lr": len("lr 0.000123"),
    "train/grad_norm": len("grad norm 0.0123"),
}
_LEFT_OUT_FIRST = ("memory/device_peak_bytes", "train/grad_norm", "train/lr")
# The steps, the time left and the metrics of a usual run.
_BESIDE_THE_BAR = 86
_SHORTEST_BAR = 8


def make_console(
    mode: Literal["auto", "bar", "lines", "off"], *, total_steps: int, from_step: int
) -> Monitor | None:
    """The console that the mode and the terminal call for."""
    if mode == "auto":
        if sys.stdout.isatty():
            mode = "bar"
        else:
            mode = "lines"
    if mode == "off":
        return None
    if mode == "bar":
        return Bar(total_steps, from_step)
    return Lines(total_steps)


def describe(
    point: Point, *, longest: int | None = None, widths: dict[str, int] | None = None
) -> str:
    """The metrics worth a glance, as one line; of text, tokens say more than samples. In a short
    line the less telling go. With `widths`, a metric is as wide as it has ever been, so that those
    of one point stand below the last's.
    """
    values = {name: point.metrics[name] for name in _SHOWN if name in point.metrics}
    values |= {
        name: value / _BYTES_PER_GB for name, value in values.items() if name.endswith("_bytes")
    }
    shown = {name: _SHOWN[name].format(value) for name, value in values.items()}
    if "throughput/tokens_per_sec" in shown:
        shown.pop("throughput/samples_per_sec", None)
    shown |= {
        name: f"{name} {value:.4f}"
        for name, value in point.metrics.items()
        if name.startswith("eval/")
    }
    if widths is not None:
        widths |= {name: max(len(text), widths.get(name, 0)) for name, text in shown.items()}
        shown = {name: text.ljust(widths[name]) for name, text in shown.items()}
    for name in _LEFT_OUT_FIRST:
        if longest is not None and len("  ".join(shown.values())) > longest:
            shown.pop(name, None)
    return printable("  ".join(shown.values()).rstrip())


class Lines:
    """One line per logged point, its columns below those of the line before."""

    name = "terminal"

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._widths = dict(_USUAL_WIDTHS)

    def write(self, point: Point) -> None:
        width = len(str(self._total_steps))
        place = f"step {point.step:>{width}}/{self._total_steps}  epoch {point.epoch:.2f}"
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        if on_terminal:
            room = get_terminal_size().columns - len(place) - 2
        else:
            room = None
        # A closed terminal is no reason to lose a run.
        write(sys.stdout, f"{place}  {describe(point, longest=room, widths=self._widths)}\n")

    def close(self) -> None:
        pass


class Bar:
    """A progress bar; evaluations stay above it as lines."""

    name = "terminal"

    def __init__(self, total_steps: int, from_step: int) -> None:
        from rich import get_console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        # Where the terminal is narrow, the bar shrinks and then metrics are left out: the steps and
        # the time left stay whole.
        whole = Column(no_wrap=True)
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        columns = get_console().width
        bar = max(_SHORTEST_BAR, min(40, columns - _BESIDE_THE_BAR))
        # Four blanks between the columns, "step" and the time left.
        self._longest = columns - bar - 2 * len(str(total_steps)) - len("/step0:00:00") - 4
        self._progress = Progress(
            TextColumn("step", table_column=whole),
            MofNCompleteColumn(table_column=whole),
            BarColumn(bar, table_column=whole),
            TimeRemainingColumn(table_column=whole),
            # a metric's name may hold brackets
            TextColumn("{task.description}", markup=False, table_column=rest),
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=from_step)
        self._progress.start()

    def write(self, point: Point) -> None:
        with _whoever_reads():
            if any(name.startswith("eval/") for name in point.metrics):
                self._progress.console.print(
                    f"step {point.step}  {describe(point)}", highlight=False, markup=False
                )
            else:
                self._progress.update(
                    self._task,
                    completed=point.step,
                    description=describe(point, longest=self._longest),
                )

    def close(self) -> None:
        with _whoever_reads():
            self._progress.stop()


@contextmanager
def _whoever_reads() -> Iterator[None]:
    """A closed terminal is no reason to lose a run; of a closed pipe rich makes an exit."""
    try:
        yield
    except (OSError, SystemExit):
        leave(sys.stdout)


# The rank's own log: a line per logged point, on every rank, so that the log of one that died says
# how far it came.


class LogLines:
    """One line per logged point, also where the terminal shows a bar or nothing."""

    name = "log"

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def write(self, point: Point) -> None:
        note(f"step {point.step}/{self._total_steps}  epoch {point.epoch:.2f}  {describe(point)}")

    def close(self) -> None:
        """The log stays open: how the run ended follows."""
