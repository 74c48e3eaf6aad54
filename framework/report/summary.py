"""Summaries that rank 0 prints before and after training."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from framework.checkpoint.names import CHECKPOINTS, tag_of
from framework.errors import counted, in_one_line
from framework.plan.cluster import RANKS_ON_CPU
from framework.plan.plan import Plan
from framework.system.log import print_line, warn
from framework.text.document import is_setting
from framework.train.best import Best
from framework.train.trainer import Outcome

if TYPE_CHECKING:
    from framework.plan.balance import StageTable

# From launch.sh, which puts its environment's programs in front of the PATH: what the person's own
# shell finds, and how the script is called from there.
SHELL_PATH: Final = "DSF_SHELL_PATH"
DOOR: Final = "DSF_DOOR"
# Of a step; without a device's clock only the first is known, and the rest is computing.
_PARTS: Final = (
    "data",
    "copy",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "bubble",
    "other",
)
# Half a million points of 500 bytes. To read them takes 0.7 s of a processor; a page may cost the
# end of a run one.
_LARGEST_METRICS: Final = 256 << 20


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        folder: the run folder.
        step: optimizer steps taken in all.
        metrics: the last value of every metric.
        samples_per_sec: mean training throughput without the first logged interval.
        start_step: the step that this process started from.
        tokens_per_sec: throughput in tokens; 0 where the data has none.
        best: the best value of the metric that `checkpoint.keep_best` names, from the first step
            on, also of the processes that this one went on from; None where it names none, or none
            was measured.
        ended_early: why a callback ended it before its last step; empty where none did.
    """

    folder: Path
    step: int
    metrics: Mapping[str, float]
    samples_per_sec: float
    start_step: int = 0
    tokens_per_sec: float = 0.0
    best: Best | None = None
    ended_early: str = ""

    @classmethod
    def of(cls, outcome: Outcome, *, folder: Path, start_step: int, best: Best | None) -> RunResult:
        """Build the result from the end of the training loop."""
        reached = {name: value for name, value in vars(outcome).items() if name != "stopped"}
        return cls(folder=folder, start_step=start_step, best=best, **reached)


def print_start(
    plan: Plan,
    folder: Path,
    *,
    start_step: int,
    stages: StageTable | None = None,
    evaluates: bool = True,
    num_params: int | None = None,
    num_trained: int | None = None,
) -> None:
    """The plan's warnings and notes, the balance of the stages, and what is about to happen: one
    line, and the sizes below it where they are known.

    `evaluates` says whether there is evaluation data, which the plan does not know, and
    `num_params` the size of the model, of which `num_trained` are trained.
    """
    for finding in plan.findings:
        print_line(f"{finding.severity}: {finding}")
    expected = plan.config.data.num_train_samples()
    found = plan.length.num_train_samples
    if None not in (expected, found) and expected != found:
        print_line(
            f"note: {found:,} training samples found ({expected:,} expected); steps and schedule "
            "follow what was found"
        )
    if not evaluates:
        for line in _without_evaluation_data(plan):
            print_line(line)
    for line in stages.lines() if stages else ():
        print_line(line)
    if start_step:
        begin = f"from step {start_step} "
    else:
        begin = ""
    steps = counted(plan.length.total_steps or 0, "step")
    print_line(
        f"training {plan.config.run.name} {begin}on {plan.cluster}: {steps}, {plan.layout}, "
        f"ZeRO {plan.config.zero.stage}, {plan.config.precision.dtype} -> {folder}"
    )
    if num_params is not None:
        _print_rows(_sizes(plan, num_params, num_params if num_trained is None else num_trained))


def _sizes(plan: Plan, num_params: int, num_trained: int) -> Iterator[tuple[str, str]]:
    config, save = plan.config, plan.config.checkpoint
    model = next(
        getattr(config.model, tag)
        for tag in ("kind", "target", "object")
        if hasattr(config.model, tag)
    )
    if num_trained < num_params:
        trained = f", {num_trained:,} of them trained ({num_trained / num_params:.2%})"
    else:
        trained = ""
    yield "model", f"{model}, {num_params:,} parameters{trained}"
    compiled = config.training.compile
    if compiled is not None:
        yield (
            "compiled",
            f"per {compiled.per} by {compiled.backend}, in the first step and where shapes change",
        )
    yield "length", str(plan.length)
    from framework.plan.memory import NotEstimatedError, estimate  # rank 0 alone prints it

    with suppress(NotEstimatedError):
        memory = estimate(plan)
        where = "host memory" if plan.cluster.device == "cpu" else "device memory"
        yield (
            "estimate",
            f"{_size(memory.total(memory.peak))} of {where} per rank, without activations",
        )
    every = [
        f"every {counted(count, unit)}"
        for count, unit in ((save.every_steps, "step"), (save.every_epochs, "epoch"))
        if count
    ][:1]
    every += [f"every {save.every_minutes:g} minutes"] if save.every_minutes else []
    yield "checkpoints", ", ".join([*every, *(["at the end"] if save.at_end else [])]) or "none"
    csv = ["metrics.csv"] if config.monitors.csv else []
    others = [*config.monitors.sinks(), *(other.target for other in config.monitors.others)]
    yield "metrics", ", ".join(["metrics.jsonl", *csv, *others])


def _size(count: float) -> str:
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB"


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print_line(f"  {label:<{width}}  {text}")


def _without_evaluation_data(plan: Plan) -> Iterator[str]:
    """List evaluations that are configured and will not happen; evaluating the last step is a
    default and not listed.
    """
    evaluation = plan.config.evaluation
    metric = plan.config.checkpoint.keep_best or ""
    for name in ("every_steps", "every_epochs", "every_minutes", "at_start"):
        if getattr(evaluation, name):
            value = getattr(evaluation, name)
            yield (
                f"note: evaluation.{name} = {value}: there is no evaluation data "
                "[no-evaluation-data]"
            )
    if metric.startswith("eval/"):
        yield (
            f"warning: checkpoint.keep_best = {metric}: there is no evaluation data, so it is "
            "never measured, and no checkpoint is deleted [no-evaluation-data]"
        )


def write_report(folder: Path) -> Path | None:
    """Write the page of a run that has ended; a failure costs the page alone, with a warning.

    Returns:
        its place, or None.
    """
    try:
        # Here, so that nothing of a page can keep a run from starting.
        from framework.report.page import REPORT, write_page

        if (folder / "metrics.jsonl").stat().st_size > _LARGEST_METRICS:
            print_line(
                "note: metrics.jsonl is large; for its page: python -m framework report "
                f"{shlex.quote(str(folder))}"
            )
            return None
        write_page(folder, folder / REPORT)
    except Exception as error:
        warn(
            f"report.html was not written ({in_one_line(error)}); the run is not affected "
            "[report-not-written]"
        )
        return None
    return folder / REPORT


def describe_goodput(folder: Path) -> str:
    """Share of the time of a run, over all of its starts, that trained something; empty where
    nothing is known.
    """
    with suppress(Exception):  # as with a page: nothing of it may end a run otherwise
        from framework.report.figures import goodput_line
        from framework.report.goodput import goodput
        from framework.report.page import MOST_POINTS_AT_END
        from framework.report.records import read_run

        if (folder / "metrics.jsonl").stat().st_size <= _LARGEST_METRICS:
            found = goodput(read_run(folder, most_points=MOST_POINTS_AT_END))
            if found is None:
                return ""
            return goodput_line(found)
    return ""


def print_end(
    result: RunResult,
    plan: Plan,
    *,
    environment: Mapping[str, str],
    report: Path | None = None,
    goodput: str = "",
) -> None:
    """The summary: what was reached, how fast, where it is; `report` is the place of its page."""
    print_line()
    if result.step == result.start_step:
        print_line(
            f"{plan.config.run.name}: nothing left to do, step {result.step} was reached before"
        )
    else:
        if result.ended_early:
            early = f" of {plan.length.total_steps}: {result.ended_early}"
        else:
            early = ""
        print_line(f"{plan.config.run.name}: finished after {counted(result.step, 'step')}{early}")
    rows = [
        (f"final {name}", f"{value:.4f}")
        for name, value in sorted(result.metrics.items())
        if name.startswith("eval/")
    ]
    if result.best is not None:
        rows.append(
            (f"best {result.best.metric}", f"{result.best.value:.4f} at step {result.best.step}")
        )
    if "train/loss" in result.metrics:
        rows.append(("final train/loss", f"{result.metrics['train/loss']:.4f}"))
    if result.samples_per_sec:
        if result.tokens_per_sec:
            tokens = f" = {result.tokens_per_sec:,.0f} tokens/s"
        else:
            tokens = ""
        rows.append(("throughput", f"{result.samples_per_sec:,.0f} samples/s{tokens}"))
    rows += _bounded_by(result.metrics)
    if goodput:
        rows.append(("goodput", goodput))
    rows.append(("run folder", str(result.folder)))
    if report is not None:
        rows.append(("report", str(report)))
    if plan.config.monitors.tensorboard:
        rows.append(
            (
                "TensorBoard",
                f"{_tensorboard(environment)} --logdir {shlex.quote(str(result.folder.parent))}",
            )
        )
    _print_rows(rows)


def _bounded_by(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The parts of the last interval's steps, the largest first: what to look at where a run is too
    slow.
    """
    step = metrics.get("time/step_ms", 0.0)
    parts = {name: metrics[f"time/{name}_ms"] for name in _PARTS if f"time/{name}_ms" in metrics}
    known = sorted(
        ((value / step, name) for name, value in parts.items() if step and value >= step / 100),
        reverse=True,
    )
    if parts and step:
        rest = 1 - sum(parts.values()) / step
        shares = [f"{name} {share:.0%}" for share, name in known] + (
            [f"computing {rest:.0%}"] if rest >= 0.01 else []
        )
        yield "step", f"{step:,.1f} ms: {', '.join(shares)}"
    peak = metrics.get("memory/device_peak_bytes")
    if peak is not None:
        yield "peak memory", f"{_size(peak)} on this rank's device"


def print_next(plan: Plan, words: Sequence[str], *, environment: Mapping[str, str]) -> None:
    """Print the next command to try, for whoever started from the command line: it can be pasted.

    Args:
        plan: of the run that has ended.
        words: its config and its settings, as they were given.
        environment: the process's own.
    """
    config = plan.config
    plain_fp32 = config.precision.dtype == "fp32" and config.precision.model_fields_set <= {"dtype"}
    name = "second" if config.run.name != "second" else "third"
    changed = [
        "precision.dtype=autocast" if plain_fp32 else f"run.seed={config.run.seed + 1}",
        f"run.name={name}",
    ]
    replaced = {setting.partition("=")[0] for setting in changed} | {
        "checkpoint.resume"
    }  # the new run has nothing to resume
    words = [
        word for word in words if not (is_setting(word) and word.partition("=")[0] in replaced)
    ]
    if plan.cluster.num_hosts > 1:  # who starts several hosts, and how, is not known here
        print_line(f"try next: the same command with {' '.join(changed)}")
        return
    python = _program(Path(sys.executable).name, environment)
    if DOOR in environment:
        door = f"{environment[DOOR]} train"
    else:
        door = f"{python} -m framework launch"
    implied = config.run.world_size or (RANKS_ON_CPU if plan.cluster.device == "cpu" else None)
    ranks = plan.cluster.world_size
    if ranks == implied:
        where = []
    else:
        where = ["--num_gpus", str(ranks)]
    print_line(f"try next: {door} {shlex.join([*words, *where, *changed])}")


def _tensorboard(environment: Mapping[str, str]) -> str:
    """Return the command that starts TensorBoard in the shell that the run was started from."""
    if Path(sys.executable).with_name("tensorboard").exists():
        return _program("tensorboard", environment)
    return f"{_program(Path(sys.executable).name, environment)} -m tensorboard.main"


def _program(name: str, environment: Mapping[str, str]) -> str:
    """A program of this Python's environment: its name where the shell finds that one, else its
    path.
    """
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name, path=environment.get(SHELL_PATH, environment.get("PATH", "")))
    if found is not None and Path(found).absolute() == own:
        return name
    inside = own.is_relative_to(Path.cwd())
    return shlex.quote(str(own.relative_to(Path.cwd()) if inside else own))


def describe_stop(result: RunResult, stopped: str, plan: Plan) -> str:
    """Describe where a run stopped on request, and how it goes on."""
    if result.step == result.start_step:
        return f"{stopped}: stopped before the first step: nothing new to save [stopped]"
    saved = result.folder / CHECKPOINTS / tag_of(result.step)
    return (
        f"{stopped}: stopped after step {result.step} of {plan.length.total_steps}; {saved} is "
        "complete; go on with checkpoint.resume=auto [stopped]"
    )
