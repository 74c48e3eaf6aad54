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
from framework.report.chart import tick
from framework.report.line_chart import Line, line_chart
from framework.report.series import Series
from framework.run import run_prepared
from framework.setup.prepare_run import prepare
from framework.setup.user_code import Objects
from framework.system.arguments import whole
from framework.system.command_parser import CommandParser
from framework.system.files import replace_text
from framework.system.stopping import StopRequest
from framework.train.callbacks import State

_EXPLODED: Final = 4.0  # times the least, as fastai's and Lightning's finders have it
_FEWEST: Final = 10


class RangeTest:
    """Losses over learning rates, collected by a callback of the run, and the rates they suggest.

    `exploded` is true once the mean of the last three losses is four times the least such mean, or
    a loss is not finite.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.exploded = False
        self._least = math.inf

    def on_log(self, state: State) -> None:
        """Add a step's rate and loss, and end the run if the loss explodes."""
        self.add(state.metrics["train/lr"], state.metrics["train/loss"])
        if self.exploded:
            state.stop("the loss exploded")

    def add(self, rate: float, loss: float) -> None:
        """Add a rate and its loss."""
        self.rates.append(rate)
        self.losses.append(loss)
        recent = fmean(self.losses[-3:])
        self._least = min(self._least, recent)
        rise = recent - self._least
        has_risen = rise > (_EXPLODED - 1) * abs(self._least)  # losses may be below 0
        self.exploded = not math.isfinite(loss) or (len(self.losses) >= _FEWEST and has_risen)

    @cached_property
    def smoothed(self) -> dict[int, tuple[float, float]]:
        """Step number -> mean and slope of the least-squares line through the losses around it.

        The window has a twelfth of all losses on each side: a mean of earlier losses alone would
        lag behind the rate.
        """
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        reach = max(1, len(losses) // 12)
        # Of the offsets -reach to reach; the least-squares slope is moment / sum_of_squares.
        sum_of_squares = reach * (reach + 1) * (2 * reach + 1) / 3
        means_and_slopes = {}
        for step in range(reach, len(losses) - reach):
            window = losses[step - reach : step + reach + 1]
            moment = sum(offset * loss for offset, loss in enumerate(window, -reach))
            means_and_slopes[step] = (fmean(window), moment / sum_of_squares)
        return means_and_slopes

    @property
    def minimum(self) -> int:
        """Number of the step around which the mean is least."""
        return min(self.smoothed, key=lambda step: self.smoothed[step][0], default=0)

    @property
    def steepest(self) -> int | None:
        """Number of the step at which the loss falls fastest over log(rate), or None if it falls
        at no rate.
        """
        steps = [step for step in self.smoothed if step < self.minimum]
        if not steps:
            return None
        steepest = min(steps, key=lambda step: self.smoothed[step][1])
        if self.smoothed[steepest][1] >= 0:
            return None
        return steepest

    def sentences(self) -> list[str]:
        """Describe the steps and the rates to take, a line for each."""
        steps = f"{len(self.rates)} steps from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        if self.exploded:
            steps += ", where the loss exploded"
        if self.steepest is None:
            return [
                f"{steps}: the loss falls at no rate; begin lower with --from, or take more steps "
                "with --steps"
            ]
        if self.minimum == max(self.smoothed):
            steps += ", where the loss still falls: go on beyond it with --to"
        return [
            steps,
            f"optimizer.lr: {self.rates[self.steepest]:.2g}  where the loss falls fastest",
            f"optimizer.lr: {self.rates[self.minimum] / 10:.2g}  a tenth of the rate of the least "
            "loss",
        ]

    def write(self, folder: Path) -> list[Path]:
        """Draw the picture beside the table, metrics.csv; returns the paths of both."""
        lines = []
        for style, (name, curve) in enumerate(self._curves().items()):
            # the x axis has powers of ten where other charts have steps
            powers: list[Any] = [math.log10(self.rates[step]) for step in curve]
            series = Series(powers, list(curve.values()))
            lines.append(Line(name, series, style, shows_points=len(curve) == 1))
        across = ("learning rate", lambda power: tick(10.0**power))
        chart = line_chart(
            "lr-range", "Loss over the learning rate", "loss", lines, has_wide=True, across=across
        )
        text = ""
        if chart:
            text = chart.file()
        replace_text(folder / "lr-range.svg", text)
        return [folder / "metrics.csv", folder / "lr-range.svg"]

    def _curves(self) -> dict[str, dict[int, float]]:
        """Return name of a curve -> step number -> loss; the suggested rates are curves of one
        point.
        """
        means = {step: mean for step, (mean, _) in self.smoothed.items()}
        curves = {"loss": dict(enumerate(self.losses)), "mean": means}
        if self.steepest is not None:
            for name, step in (("falls fastest", self.steepest), ("least", self.minimum)):
                curves[f"{name}: {self.rates[step]:.2g}"] = {step: means[step]}
        return curves


def main(words: Sequence[str]) -> int:
    """Train at a growing rate on this rank, and on rank 0 print the rates to take and write the
    picture; returns the exit code. Collective.

    Raises:
        UsageError: the rates do not grow from more than 0.
        ConfigError: the config cannot train, or has the rate 0.
        TrainingError: training failed, and not because the loss exploded.
    """
    arguments = _parse(words)
    low = arguments.low
    high = arguments.high
    steps = arguments.steps
    range_test = RangeTest()
    if not 0 < low < high < math.inf:
        raise UsageError(
            f"lr-range: --from {low:g} --to {high:g}: the rates are to grow, from more than 0"
        )
    training_config, _ = load_with_source(arguments.config, arguments.settings)
    values = config_alone(training_config, steps=steps, log_every=1).to_dict()
    values["scheduler"] = {"kind": "constant"}
    values["run"]["name"] += "-lr-range"
    values["monitors"]["csv"] = True
    values["evaluation"]["weights"] = "trained"
    values["training"]["ema"] = None
    values["callbacks"] = []
    values["training"]["bad_steps"] = None
    config, source = load_with_source(arguments.config, (), text=json.dumps(values))

    if optimizer_lr(config.optimizer) == 0:
        raise ConfigError.of(
            "lr-range-from-zero", "it cannot grow", "set one above 0", "optimizer.lr", 0
        )

    def make_growing_schedule(optimizer: torch.optim.Optimizer) -> StepSchedule:
        configured_lr: float = optimizer.param_groups[0]["lr"]

        def factor(step: int) -> float:
            lr: float = low * (high / low) ** (step / (steps - 1))
            return lr / configured_lr

        return StepSchedule(optimizer, factor=factor)

    try:
        objects = Objects(callbacks=[range_test], scheduler=make_growing_schedule)
        prepared = prepare(config, objects=objects, source=source)
        run_prepared(prepared, StopRequest())
    except TrainingError:
        if not range_test.exploded:
            raise
    if os.environ.get("RANK", "0") == "0":
        print(*range_test.sentences(), *range_test.write(config.run.folder), sep="\n")
    return EXIT_OK


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Find a learning rate: train for some steps at one that grows until the loss explodes."
    parser = CommandParser(prog="dsf lr-range", allow_abbrev=False, description=about)
    option = parser.add_argument
    option("config", metavar="CONFIG", help="run config, YAML or JSON")
    option("settings", nargs="*", metavar="key=value", help="settings that win over the file")
    option("--from", dest="low", type=float, default=1e-7, metavar="LR", help="first rate (1e-7)")
    option("--to", dest="high", type=float, default=10.0, metavar="LR", help="last rate (10)")
    count = whole(_FEWEST, 10**6, f"{{}} is not a number of steps; write {_FEWEST} or more")
    option("--steps", type=count, default=100, metavar="N", help="steps between them (100)")
    return parser.parse_intermixed_args(list(words))
