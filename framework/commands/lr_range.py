"""``lr-range CONFIG [key=value ...]``: train for some steps at a rate that grows, and suggest one
from the losses.

Step t of N runs at low x (high / low)^(t / (N - 1)), until the loss is four times its least (Smith
2017, arXiv 1506.01186, section 3.3; fastai: Howard & Gugger 2020, arXiv 2002.04688). The run folder
has no checkpoint, but a table and a picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from framework.commands.timed_runs import config_alone
from framework.config.load import load_with_source
from framework.config.optimizer import optimizer_lr
from framework.engine.schedules import StepSchedule
from framework.errors import EXIT_OK, ConfigError, TrainingError, UsageError
from framework.report.draw import Line, line_chart, tick
from framework.report.series import Series
from framework.run import run_prepared
from framework.setup.prepare_run import prepare
from framework.setup.user_code import Objects
from framework.system.arguments import CommandParser, whole
from framework.system.files import replace_text
from framework.system.stopping import StopRequest
from framework.train.callbacks import State

_EXPLODED: Final = 4.0  # times the least, as fastai's and Lightning's finders have it
_FEWEST: Final = 10


class Found:
    """Losses over rates, as a callback of the run notes them, and what they suggest; `exploded`
    when the mean of the last three is four times the least such mean, or a loss is not finite.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.exploded = False
        self._least = math.inf

    def on_log(self, state: State) -> None:
        """Take a step, and end the run where the loss explodes."""
        self.add(state.metrics["train/lr"], state.metrics["train/loss"])
        if self.exploded:
            state.stop("the loss exploded")

    def add(self, rate: float, loss: float) -> None:
        """Take a rate and a loss."""
        self.rates.append(rate)
        self.losses.append(loss)
        recent = fmean(self.losses[-3:])
        self._least = min(self._least, recent)
        risen = recent - self._least > (_EXPLODED - 1) * abs(self._least)  # losses may be below 0
        self.exploded = not math.isfinite(loss) or (len(self.losses) >= _FEWEST and risen)

    @cached_property
    def smoothed(self) -> dict[int, tuple[float, float]]:
        """Number of a step -> mean and slope of the line of least squares through the losses around
        it, a twelfth of all on each side: a mean of earlier losses would lag behind the rate.
        """
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        reach = max(1, len(losses) // 12)
        squares = reach * (reach + 1) * (2 * reach + 1) / 3
        windows = {
            at: losses[at - reach : at + reach + 1] for at in range(reach, len(losses) - reach)
        }
        return {
            at: (
                fmean(near),
                sum(place * loss for place, loss in enumerate(near, -reach)) / squares,
            )
            for at, near in windows.items()
        }

    @property
    def minimum(self) -> int:
        """Number of the step around which the mean is least."""
        return min(self.smoothed, key=lambda at: self.smoothed[at][0], default=0)

    @property
    def steepest(self) -> int | None:
        """Number of the step at which the loss falls fastest over log(rate); None where it falls at
        no rate.
        """
        before = (at for at in self.smoothed if at < self.minimum)
        at = min(before, key=lambda at: self.smoothed[at][1], default=None)
        return None if at is None or self.smoothed[at][1] >= 0 else at

    def sentences(self) -> list[str]:
        """Describe what was found, and the rates to take."""
        ran = f"{len(self.rates)} steps from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        ran += ", where the loss exploded" if self.exploded else ""
        if self.steepest is None:
            return [
                f"{ran}: the loss falls at no rate; begin lower with --from, or take more steps "
                "with --steps"
            ]
        still = ", where the loss still falls: go on beyond it with --to"
        return [
            f"{ran}{still if self.minimum == max(self.smoothed) else ''}",
            f"optimizer.lr: {self.rates[self.steepest]:.2g}  where the loss falls fastest",
            f"optimizer.lr: {self.rates[self.minimum] / 10:.2g}  a tenth of the rate of the least "
            "loss",
        ]

    def write(self, folder: Path) -> list[Path]:
        """Draw the picture beside the table, metrics.csv; returns the places of both."""
        curves = {
            "loss": dict(enumerate(self.losses)),
            "mean": {at: mean for at, (mean, _) in self.smoothed.items()},
        }
        if self.steepest is None:
            marks = {}
        else:
            marks = {"falls fastest": self.steepest, "least": self.minimum}
        curves |= {
            f"{name}: {self.rates[at]:.2g}": {at: self.smoothed[at][0]}
            for name, at in marks.items()
        }
        lines = []
        for style, (name, curve) in enumerate(curves.items()):
            # where other charts have steps
            powers: list[Any] = [math.log10(self.rates[at]) for at in curve]
            lines.append(
                Line(name, Series(powers, [*curve.values()]), style, shows_points=len(curve) == 1)
            )
        across = ("learning rate", lambda power: tick(10.0**power))
        chart = line_chart(
            "lr-range", "Loss over the learning rate", "loss", lines, has_wide=True, across=across
        )
        replace_text(folder / "lr-range.svg", chart.file() if chart else "")
        return [folder / "metrics.csv", folder / "lr-range.svg"]


def main(words: Sequence[str]) -> int:
    """Run the command on this rank, print on rank 0; returns the exit code."""
    arguments = _parse(words)
    low = arguments.low
    high = arguments.high
    steps = arguments.steps
    found = Found()
    if not 0 < low < high < math.inf:
        raise UsageError(
            f"lr-range: --from {low:g} --to {high:g}: the rates are to grow, from more than 0"
        )
    asked, _ = load_with_source(arguments.config, arguments.settings)
    values = config_alone(asked, steps=steps, log_every=1).to_dict() | {
        "scheduler": {"kind": "constant"}
    }
    values["run"]["name"] += "-lr-range"
    values["monitors"]["csv"] = True
    values["evaluation"]["weights"], values["training"]["ema"], values["callbacks"] = (
        "trained",
        None,
        [],
    )
    values["training"]["bad_steps"] = None
    config, source = load_with_source(arguments.config, (), text=json.dumps(values))

    if optimizer_lr(config.optimizer) == 0:
        raise ConfigError.of(
            "lr-range-from-zero", "it cannot grow", "set one above 0", "optimizer.lr", 0
        )

    def growing(optimizer: torch.optim.Optimizer) -> StepSchedule:
        first = optimizer.param_groups[0]["lr"]
        return StepSchedule(
            optimizer, factor=lambda step: low * (high / low) ** (step / (steps - 1)) / first
        )

    try:
        prepared = prepare(
            config, objects=Objects(callbacks=[found], scheduler=growing), source=source
        )
        run_prepared(prepared, StopRequest())
    except TrainingError:
        if not found.exploded:
            raise
    if os.environ.get("RANK", "0") == "0":
        print(*found.sentences(), *found.write(config.run.folder), sep="\n")
    return EXIT_OK


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Find a learning rate: train for some steps at one that grows until the loss explodes."
    parser = CommandParser(
        prog="python -m framework lr-range", allow_abbrev=False, description=about
    )
    option = parser.add_argument
    option("config", metavar="CONFIG", help="run config, YAML or JSON")
    option("settings", nargs="*", metavar="key=value", help="settings that win over the file")
    option("--from", dest="low", type=float, default=1e-7, metavar="LR", help="first rate (1e-7)")
    option("--to", dest="high", type=float, default=10.0, metavar="LR", help="last rate (10)")
    count = whole(_FEWEST, 10**6, f"{{}} is not a number of steps; write {_FEWEST} or more")
    option("--steps", type=count, default=100, metavar="N", help="steps between them (100)")
    return parser.parse_intermixed_args(list(words))
