"""Progress of the training on rank 0: a bar on a terminal, or a line per logged step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from shutil import get_terminal_size
from typing import Literal

from framework.errors import is_terminal
from framework.system.output import leave, write
from framework.train.monitors.base import Monitor, Point
from framework.train.monitors.log_lines import describe

# Widths of a line's first metrics: enough for most values, so that columns seldom move.
_USUAL_WIDTHS = {
    "train/loss": len("loss 1.2345"),
    "train/lr": len("lr 0.000123"),
    "train/grad_norm": len("grad norm 0.0123"),
}
# Width of the steps, the time left and the metrics of a usual run.
_BESIDE_THE_BAR = 86
_SHORTEST_BAR = 8
_SHORTEST_TIME_LEFT = 10.0  # seconds


def make_console(
    mode: Literal["auto", "bar", "lines", "off"], *, total_steps: int, from_step: int
) -> Monitor | None:
    """Make the console of this mode; ``auto`` is a bar on a terminal, else lines."""
    if mode == "auto":
        mode = "bar" if is_terminal(sys.stdout) else "lines"
    if mode == "off":
        return None
    if mode == "bar":
        return Bar(total_steps, from_step)
    return Lines(total_steps)


class Lines:
    """One line per logged point, with its columns below the columns of the line before."""

    name = "terminal"

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._widths = dict(_USUAL_WIDTHS)
        self._first: Point | None = None

    def write(self, point: Point) -> None:
        width = len(str(self._total_steps))
        place = f"step {point.step:>{width}}/{self._total_steps}  epoch {point.epoch:.2f}"
        left = self._time_left(point)
        longest: int | None = None
        if is_terminal(sys.stdout):
            longest = get_terminal_size().columns - len(place) - len(left) - 2
        line = f"{place}  {describe(point, longest=longest, widths=self._widths)}{left}\n"
        write(sys.stdout, line)  # a closed terminal is no reason to lose a run

    def _time_left(self, point: Point) -> str:
        """Return the time to the last step at the pace since the first point, with evaluations and
        saves; empty for evaluations, for the first point, and in a run's last seconds.
        """
        if "train/loss" not in point.metrics:
            return ""
        if self._first is None:
            self._first = point
            return ""
        num_steps = point.step - self._first.step
        if num_steps <= 0:
            return ""
        pace = (point.time_seconds - self._first.time_seconds) / num_steps
        seconds = pace * (self._total_steps - point.step)
        if seconds < _SHORTEST_TIME_LEFT:
            return ""
        return f"  left {timedelta(seconds=round(seconds))}"

    def close(self) -> None:
        pass


class Bar:
    """A progress bar, with evaluations as lines above it."""

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
        fixed = Column(no_wrap=True)
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        terminal_width = get_console().width
        bar_width = max(_SHORTEST_BAR, min(40, terminal_width - _BESIDE_THE_BAR))
        steps_width = 2 * len(str(total_steps))
        # Beside the steps: "step", the "/" between them, the time left, and four blanks between the
        # columns.
        self._longest = terminal_width - bar_width - steps_width - len("/step0:00:00") - 4
        self._progress = Progress(
            TextColumn("step", table_column=fixed),
            MofNCompleteColumn(table_column=fixed),
            BarColumn(bar_width, table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            # a metric's name may hold brackets
            TextColumn("{task.description}", markup=False, table_column=rest),
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=from_step)
        self._progress.start()

    def write(self, point: Point) -> None:
        with _terminal_may_close():
            if any(name.startswith("eval/") for name in point.metrics):
                self._progress.console.print(
                    f"step {point.step}  {describe(point)}", highlight=False, markup=False
                )
            else:
                epoch = f"epoch {point.epoch:.2f}"
                metrics = describe(point, longest=self._longest - len(epoch) - 2)
                self._progress.update(
                    self._task, completed=point.step, description=f"{epoch}  {metrics}"
                )

    def close(self) -> None:
        with _terminal_may_close():
            self._progress.stop()


@contextmanager
def _terminal_may_close() -> Iterator[None]:
    """Go on without output when the terminal or pipe is closed.

    That is no reason to lose a run. rich turns the error of a closed pipe into an exit.
    """
    try:
        yield
    except (OSError, SystemExit):
        leave(sys.stdout)
