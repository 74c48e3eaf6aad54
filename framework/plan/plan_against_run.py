"""Plan against run: the estimates of a plan beside what its first steps took, logged once and kept
in ``plan.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from framework.errors import UsageError
from framework.plan.plan import Plan
from framework.system.files import replace_text
from framework.system.log import print_line

if TYPE_CHECKING:  # the planner is loaded when there is something to compare
    from framework.plan.candidate import Candidate


class MetricsPoint(Protocol):
    """Metrics at one step, as monitors get them."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """``area/name`` -> value."""
        ...


class PlanAgainstRun:
    """Monitor that compares once: peak memory at the first logged point, and the time of a step at
    the second one, because the first pays for warm-up; a run with one logged point has its time.
    It reads what is logged anyway, so that nothing waits for the device.
    """

    name = "plan against run"

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        print_line: Callable[[str], None] = print_line,
        estimated: Callable[[Plan], Candidate | None] | None = None,
    ) -> None:
        """Compare with the estimates of a plan, and add a section ``measured`` to its file.

        Args:
            plan: of the run.
            folder: of the run, where ``plan.json`` is.
            print_line: where the lines go.
            estimated: makes the estimates; left out: for this machine.
        """
        self._plan = plan
        self._file = folder / "plan.json"
        self._print_line = print_line
        self._estimated = estimated or estimates_here
        self._memory: dict[str, float | None] = {}
        self._time: dict[str, float | bool | None] = {}
        self._step = 0
        self._is_done = False
        self._unwritten: dict[str, Any] = {}

    def write(self, point: MetricsPoint) -> None:
        """Take a logged point: at the second one the estimates are made, logged and written."""
        self._write_measured()
        seconds = point.metrics.get("time/step_ms")
        if self._is_done or seconds is None:
            return
        if not self._step:
            self._memory = {"measured": point.metrics.get("memory/device_peak_bytes")}
        self._time = {"measured": seconds / 1000, "with_warm_up": not self._step}
        self._is_done = bool(self._step)
        self._step = point.step
        if self._is_done:
            self._compare()

    def close(self) -> None:
        """Compare what there is, if the run has ended before the second point.

        Raises:
            OSError: ``plan.json`` cannot be written.
        """
        if self._step and not self._is_done:
            self._is_done = True
            self._compare()
        self._write_measured(is_last=True)

    def _compare(self) -> None:
        """Make the estimates, log them beside what was measured, and write both."""
        from framework.plan.alternatives import size_text

        candidate = self._estimated(self._plan)
        self._memory["estimate"] = None
        self._time["estimate"] = None
        if candidate:
            self._memory["estimate"] = candidate.peak_bytes
            if candidate.time:
                self._time["estimate"] = candidate.time.total
        for name, values, text in (
            ("peak memory", self._memory, size_text),
            ("step time", self._time, _milliseconds),
        ):
            if values["measured"] and values["estimate"] is not None:
                compared = _compared(values["estimate"], values["measured"], text)
                self._print_line(f"plan against run: {name}: {compared}")
        self._unwritten = {
            "step": self._step,
            "device_peak_bytes": self._memory,
            "step_seconds": self._time,
        }
        self._write_measured()

    def _write_measured(self, *, is_last: bool = False) -> None:
        """Write what was measured, if that is still to be done; storage that fails is tried again
        at the next point, and raises OSError at the last one.
        """
        if not self._unwritten:
            return
        try:
            plan: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
            plan["measured"] = self._unwritten
            replace_text(self._file, json.dumps(plan, indent=2) + "\n")
        except OSError:
            if is_last:
                raise
        else:
            self._unwritten = {}


def _compared(estimate: float, measured: float, text: Callable[[float], str]) -> str:
    ratio = estimate / measured - 1
    return f"estimate {text(estimate)}, measured {text(measured)} ({ratio:+.1%})"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def estimates_here(plan: Plan) -> Candidate | None:
    """Return the estimates of a plan for this machine, by its measured rates if there are any; None
    if the plan's memory is not known.
    """
    from framework.plan.auto import measured_target, target_at_hand
    from framework.plan.candidate import judge
    from framework.plan.memory import NotEstimatedError

    try:
        return judge(plan, measured_target(plan.cluster) or target_at_hand(plan.cluster))
    except (NotEstimatedError, UsageError):  # DSF_GPU names a device that is not listed
        return None
