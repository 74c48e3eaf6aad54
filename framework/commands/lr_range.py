"""``lr-range CONFIG [key=value ...]``: train for some steps at a rate that grows, and suggest one from the losses.

Step t of N runs at low x (high / low)^(t / (N - 1)), until the smoothed loss is four times its least (Smith 2017,
arXiv 1506.01186, section 3.3; fastai: Howard & Gugger 2020, arXiv 2002.04688). Weights, data and everything else are
the run's; nothing stays but a table and a picture.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.engine.distributed import from_rank0, process_group, rank, refuse_different_ranks
from framework.engine.failures import ExplainedData, explaining_failures
from framework.engine.plain_engine import arithmetic_of
from framework.engine.random_state import seed_ranks
from framework.errors import EXIT_OK, ConfigError, UsageError
from framework.report.draw import Line, line_chart, tick
from framework.report.records import Series
from framework.setup.assemble import assemble_engine
from framework.setup.parts import make_train_loader
from framework.setup.prepared import prepare
from framework.setup.start_point import agreed_weights, measure_cut, on_rank0
from framework.system.arguments import CommandParser, whole
from framework.system.files import replace_text

_EXPLODED: Final = 4.0  # times the least, as fastai's and Lightning's finders have it
_FEWEST: Final = 10


@dataclass
class Found:
    """Losses over rates, and what they suggest.

    Attributes:
        rates, losses: of each step.
        exploded: the mean of the last three losses is four times the least such mean, or a loss is not finite.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    exploded: bool = False
    _least: float = math.inf

    def add(self, rate: float, loss: float) -> None:
        """Take a step's rate and loss."""
        self.rates.append(rate)
        self.losses.append(loss)
        recent = fmean(self.losses[-3:])
        self._least = min(self._least, recent)
        risen = recent - self._least > (_EXPLODED - 1) * abs(self._least)  # losses may be below 0
        self.exploded = not math.isfinite(loss) or (len(self.losses) >= _FEWEST and risen)

    @cached_property
    def smoothed(self) -> dict[int, tuple[float, float]]:
        """Number of a step -> mean and slope of the line of least squares through the losses around it, a twelfth of
        all on each side: a mean of earlier losses would lag behind the rate.
        """
        losses = self.losses if math.isfinite(self.losses[-1]) else self.losses[:-1]
        reach = max(1, len(losses) // 12)
        offsets = range(-reach, reach + 1)
        squares = sum(offset * offset for offset in offsets)
        found = {}
        for number in range(reach, len(losses) - reach):
            slope = sum(offset * losses[number + offset] for offset in offsets) / squares
            found[number] = fmean(losses[number - reach : number + reach + 1]), slope
        return found

    @property
    def minimum(self) -> int:
        """Number of the step around which the mean is least."""
        return min(self.smoothed, key=lambda number: self.smoothed[number][0], default=0)

    @property
    def steepest(self) -> int | None:
        """Number of the step at which the loss falls fastest over log(rate); None where it falls at no rate."""
        before = (number for number in self.smoothed if number < self.minimum)
        number = min(before, key=lambda number: self.smoothed[number][1], default=None)
        return None if number is None or self.smoothed[number][1] >= 0 else number

    def sentences(self) -> list[str]:
        """What a person is to do with it."""
        ran = f"{len(self.rates)} steps from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        ran += ", where the loss exploded" if self.exploded else ""
        if self.steepest is None:
            return [f"{ran}: the loss falls at no rate; begin lower with --from, or take more steps with --steps"]
        if self.minimum == max(self.smoothed):
            ran += ", where the loss still falls: go on beyond it with --to"
        return [
            ran,
            f"optimizer.lr: {self.rates[self.steepest]:.2g}  where the loss falls fastest",
            f"optimizer.lr: {self.rates[self.minimum] / 10:.2g}  a tenth of the rate of the least loss",
        ]

    def write(self, folder: Path) -> list[Path]:
        """Write table and picture; returns their places."""
        folder.mkdir(parents=True, exist_ok=True)
        table, picture = folder / "lr-range.csv", folder / "lr-range.svg"
        with table.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("step", "lr", "loss"))
            rows.writerows(zip(range(1, len(self.rates) + 1), self.rates, self.losses, strict=True))
        powers: list[Any] = [math.log10(rate) for rate in self.rates]  # where other charts have steps
        means = {number: mean for number, (mean, _) in self.smoothed.items()}
        lines = [Line("loss", Series(powers, self.losses)), _line("mean", powers, means, 1)]
        if self.steepest is not None:
            marks = {"falls fastest": self.steepest, "least": self.minimum}
            for style, (name, at) in enumerate(marks.items(), 2):
                label = f"{name}: {self.rates[at]:.2g}"
                lines.append(_line(label, powers, {at: means[at]}, style, shows_points=True))
        across = ("learning rate", lambda power: tick(10.0**power))
        chart = line_chart("lr-range", "Loss over the learning rate", "loss", lines, has_wide=True, across=across)
        if chart is None:
            return [table]
        replace_text(picture, chart.file())
        return [table, picture]


def _line(name: str, powers: list[Any], values: dict[int, float], style: int, **more: bool) -> Line:
    return Line(name, Series([powers[number] for number in values], [*values.values()]), style, **more)


def main(words: Sequence[str]) -> int:
    """Run the command on this rank, print on rank 0; returns the exit code."""
    arguments = _parse(words)
    low, high, steps = arguments.low, arguments.high, arguments.steps
    if not 0 < low < high < math.inf:
        raise UsageError(f"lr-range: --from {low:g} --to {high:g}: the rates are to grow, from more than 0")
    asked, _ = load_with_source(arguments.config, arguments.settings)
    config, source = config_of_range(asked, arguments.config, steps=steps)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    prepared = prepare(config, source=source)
    found = Found()
    with ExitStack() as stack:
        stack.enter_context(explaining_failures(Path(tempfile.gettempdir()), prepared.plan))
        stack.enter_context(process_group(config.run.backend))
        refuse_different_ranks(prepared.fingerprint())
        prepared = agreed_weights(measure_cut(prepared, None), None)
        stack.enter_context(arithmetic_of(prepared.plan))
        engine = assemble_engine(prepared)
        plan = prepared.plan
        seed_ranks(config.run.seed, rank=rank() - plan.layout.tensor_rank(rank()), step=0)
        groups = engine.engine.optimizer.param_groups
        first = [float(group["lr"]) for group in groups]
        if not first[0] > 0:
            reason = "the rates of all weights grow from it by one factor"
            raise ConfigError.of("lr-range-from-zero", reason, "set one above 0", "optimizer.lr", first[0])
        stream = ExplainedData(make_train_loader(plan, prepared.parts.splits, rank=rank())).stream(0)
        for number in range(steps):
            lr = low * (high / low) ** (number / (steps - 1))
            for group, own in zip(groups, first, strict=True):
                group["lr"] = own / first[0] * lr
            # A mean over all ranks, equal on all: they end together.
            found.add(lr, engine.train_step(stream).read()["train/loss"])
            if found.exploded:
                break
        stream.close()
        if rank() == 0:
            print("\n".join(found.sentences()))
        out = Path(arguments.out or f"{asked.run.folder}-lr-range")
        for place in from_rank0(on_rank0(lambda: found.write(out))):
            if rank() == 0:
                print(place)
        engine.close()
    return EXIT_OK


def config_of_range(config: RunConfig, name: str, *, steps: int) -> tuple[RunConfig, Source]:
    """The config for these steps alone: a constant schedule, and nothing that is measured or kept beside them."""
    values = config.to_dict()
    values["run"] |= {"output_dir": tempfile.gettempdir()}
    values["training"] |= {"max_steps": steps, "max_epochs": None, "max_minutes": None, "ema": None}
    values |= {"scheduler": {"kind": "constant"}, "callbacks": [], "profile": None, "evaluation": {}}
    values["monitors"] = {"tensorboard": False, "csv": False, "report": False, "progress": "off"}
    kept = {key: values["checkpoint"][key] for key in ("init_weights", "allow_unverified")}
    values["checkpoint"] = kept
    return load_with_source(name, (), text=json.dumps(values))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Find a learning rate: train for some steps at one that grows until the loss explodes."
    parser = CommandParser(prog="python -m framework lr-range", allow_abbrev=False, description=about)
    option = parser.add_argument
    option("config", metavar="CONFIG", help="run config, YAML or JSON")
    option("settings", nargs="*", metavar="key=value", help="settings that win over the file")
    option("--from", dest="low", type=float, default=1e-7, metavar="LR", help="first rate (1e-7)")
    option("--to", dest="high", type=float, default=10.0, metavar="LR", help="last rate (10)")
    count = whole(_FEWEST, 10**6, f"{{}} is not a number of steps; write {_FEWEST} or more")
    option("--steps", type=count, default=100, metavar="N", help="steps between them (100)")
    option("--out", metavar="DIR", help="folder of table and picture; left out: the run folder's name with -lr-range")
    return parser.parse_intermixed_args(list(words))
