"""Summaries that rank 0 prints before and after training."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deepspeed_lint.text.document import is_setting
from framework.checkpoint.names import CHECKPOINTS, tag_of
from framework.config.training import Checkpoint
from framework.errors import counted, in_one_line
from framework.plan.cluster import RANKS_ON_CPU
from framework.plan.compiling import compile_choice
from framework.plan.plan import Plan, describe_packed_rows
from framework.report.run_result import RunResult
from framework.system.command_names import PROGRAM
from framework.system.log import print_line, warn
from framework.system.metric_names import PHASES, time_of

if TYPE_CHECKING:
    from framework.config.run_config import RunConfig
    from framework.config.training import Monitors
    from framework.plan.balance import StageTable

# From launch.sh, which puts its environment's programs in front of the PATH: the PATH of the
# person's own shell, and how the script is called from there.
SHELL_PATH: Final = "DSF_SHELL_PATH"
DOOR: Final = "DSF_DOOR"
# Half a million points of 500 bytes. To read them takes 0.7 s of a processor; a page may cost the
# end of a run one.
_LARGEST_METRICS: Final = 256 << 20


def _other_size(plan: Plan) -> Iterator[str]:
    """Note training data of another size than the config expects."""
    expected = plan.config.data.num_train_samples()
    num_found = plan.length.num_train_samples
    if None not in (expected, num_found) and expected != num_found:
        yield (
            f"note: {num_found:,} training samples found ({expected:,} expected); "
            "steps and schedule follow what was found"
        )


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
    """Print the plan's warnings and notes, the balance of the stages, and one line about the run
    that begins, with sizes below it if they are known.

    Args:
        plan: of the run.
        folder: its folder.
        start_step: the step that it starts from.
        stages: of its pipeline.
        evaluates: whether there is evaluation data, which is not in the plan.
        num_params: size of the model.
        num_trained: how many of them are trained; None: all.
    """
    lines = [f"{finding.severity}: {finding}" for finding in plan.findings]
    lines += _other_size(plan)
    if not evaluates:
        lines += _without_evaluation_data(plan)
    if stages:
        lines += stages.lines()
    for line in lines:
        print_line(line)
    begin = f"from step {start_step} " if start_step else ""
    steps = counted(plan.length.total_steps or 0, "step")
    print_line(
        f"training {plan.config.run.name} {begin}on {plan.cluster}: {steps}, {plan.layout}, "
        f"ZeRO {plan.config.zero.stage}, {plan.config.precision.dtype} -> {folder}"
    )
    if num_params is not None:
        if num_trained is None:
            num_trained = num_params
        _print_rows(_start_rows(plan, num_params, num_trained))


def _start_rows(plan: Plan, num_params: int, num_trained: int) -> Iterator[tuple[str, str]]:
    """Yield label and text of what a run begins with: model, compiling, length, memory estimate,
    checkpoints and metrics.
    """
    config = plan.config
    yield "model", _model_text(config.model, num_params, num_trained)
    choice = compile_choice(config, plan.cluster.device, os.environ)
    compiled = choice.section
    if compiled is not None:
        where = ", if the first micro-batch then gives the same" if choice.is_auto else ""
        yield "compiled", f"per {compiled.per} by {compiled.backend}, in the first step{where}"
    elif choice.reason:
        yield "compiled", f"no: {choice.reason}"
    yield "length", str(plan.length)
    packed = describe_packed_rows(plan)
    if packed:
        yield "rows", packed
    from framework.plan.memory import NotEstimatedError, estimate  # rank 0 alone prints it

    with suppress(NotEstimatedError):
        memory = estimate(plan)
        where = "host memory" if plan.cluster.device == "cpu" else "device memory"
        lacks = ", without activations" if memory.lacks else ""
        yield "estimate", f"{_size(memory.total(memory.peak))} of {where} per rank{lacks}"
    yield "checkpoints", ", ".join(_saves(config.checkpoint)) or "none"
    yield "metrics", ", ".join(_sinks(config.monitors))


def _model_text(model: Any, num_params: int, num_trained: int) -> str:
    """Return the model's kind, or the import path of its code, and its parameters."""
    tags = [tag for tag in ("kind", "target", "object") if hasattr(model, tag)]
    text = f"{getattr(model, tags[0])}, {num_params:,} parameters"
    if num_trained < num_params:
        text += f", {num_trained:,} of them trained ({num_trained / num_params:.2%})"
    return text


def _sinks(monitors: Monitors) -> Iterator[str]:
    """Yield what metrics are written to."""
    yield "metrics.jsonl"
    if monitors.csv:
        yield "metrics.csv"
    yield from monitors.sinks()
    for other in monitors.others:
        yield other.factory().path


def _saves(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.every_steps:
        yield f"every {counted(checkpoint.every_steps, 'step')}"
    elif checkpoint.every_epochs:
        yield f"every {counted(checkpoint.every_epochs, 'epoch')}"
    if checkpoint.every_minutes:
        yield f"every {checkpoint.every_minutes:g} minutes"
    if checkpoint.at_end:
        yield "at the end"


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
    """Write the page of a run that has ended, and return its path; None if the metrics are too
    large, with a note, or if it failed, with a warning.
    """
    try:
        # Here, so that nothing of a page can keep a run from starting.
        from framework.report.page import REPORT, write_page

        if (folder / "metrics.jsonl").stat().st_size > _LARGEST_METRICS:
            print_line(
                f"note: metrics.jsonl is large; for its page: dsf report {shlex.quote(str(folder))}"
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
    """Return a line with the share of the time of a run, over all of its starts, in which it
    trained; empty if that is not known, too large to read, or fails.
    """
    with suppress(Exception):  # as with a page: nothing of it may end a run otherwise
        from framework.report.figures import goodput_line
        from framework.report.goodput import goodput
        from framework.report.page import MOST_POINTS_AT_END
        from framework.report.records import read_run

        if (folder / "metrics.jsonl").stat().st_size <= _LARGEST_METRICS:
            attributed = goodput(read_run(folder, most_points=MOST_POINTS_AT_END))
            if attributed is None:
                return ""
            return goodput_line(attributed)
    return ""


def _ended(result: RunResult, plan: Plan) -> str:
    """Return how the run ended, in words."""
    if result.step == result.start_step:
        return f"nothing left to do, step {result.step} was reached before"
    text = f"finished after {counted(result.step, 'step')}"
    if result.ended_early:
        text += f" of {plan.length.total_steps}: {result.ended_early}"
    return text


def _throughput(result: RunResult) -> Iterator[tuple[str, str]]:
    if result.samples_per_sec:
        text = f"{result.samples_per_sec:,.0f} samples/s"
        if result.tokens_per_sec:
            text += f" = {result.tokens_per_sec:,.0f} tokens/s"
        yield "throughput", text


def print_end(
    result: RunResult,
    plan: Plan,
    *,
    environment: Mapping[str, str],
    report: Path | None = None,
    goodput: str = "",
) -> None:
    """Print the summary of a run that has ended.

    Args:
        result: of the run.
        plan: of the run.
        environment: the process's own.
        report: path of its page.
        goodput: line about its goodput.
    """
    print_line()
    print_line(f"{plan.config.run.name}: {_ended(result, plan)}")
    rows = _losses(result)
    rows += _throughput(result)
    rows += _bounded_by(result.metrics)
    if goodput:
        rows.append(("goodput", goodput))
    rows.append(("run folder", str(result.folder)))
    rows += _best_checkpoint(result, environment)
    if report is not None:
        rows.append(("report", str(report)))
    if plan.config.monitors.tensorboard:
        folder = shlex.quote(str(result.folder.parent))
        rows.append(("TensorBoard", f"{_tensorboard(environment)} --logdir {folder}"))
    _print_rows(rows)


def _losses(result: RunResult) -> list[tuple[str, str]]:
    rows = []
    for name, value in sorted(result.metrics.items()):
        if name.startswith("eval/"):
            rows.append((f"final {name}", f"{value:.4f}"))
    best = result.best
    if best is not None:
        rows.append((f"best {best.metric}", f"{best.value:.4f} at step {best.step}"))
    if "train/loss" in result.metrics:
        rows.append(("final train/loss", f"{result.metrics['train/loss']:.4f}"))
    return rows


def _best_checkpoint(
    result: RunResult, environment: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield where the best checkpoint is, and the command that exports it."""
    if result.best is None:
        return
    checkpoint = result.folder / CHECKPOINTS / tag_of(result.best.step)
    if not checkpoint.is_dir():
        yield "best checkpoint", "none was saved at that step"
        return
    yield "best checkpoint", str(checkpoint)
    folder = shlex.quote(str(result.folder))
    yield "to export it", f"{_door(environment)} export {folder} OUT --step best"


def _phases(metrics: Mapping[str, float], step: float) -> list[str]:
    """Return each timed phase of a step of `step` ms with its share, the largest first, and the
    rest as "computing": without a device's clock only the wait for data is timed.
    """
    shares = []
    for name in PHASES:
        time = metrics.get(time_of(name))
        if step and time is not None:
            shares.append((time / step, name))
    texts = []
    rest = 1.0
    for share, name in sorted(shares, reverse=True):
        rest -= share
        if share >= 0.01:
            texts.append(f"{name} {share:.0%}")
    if shares and rest >= 0.01:
        texts.append(f"computing {rest:.0%}")
    return texts


def _bounded_by(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the parts of the last interval's steps, the largest first, and the peak memory: they
    show why a run is slow.
    """
    step = metrics.get("time/step_ms", 0.0)
    texts = _phases(metrics, step)
    if texts:
        yield "step", f"{step:,.1f} ms: {', '.join(texts)}"
    peak = metrics.get("memory/device_peak_bytes")
    if peak is not None:
        yield "peak memory", f"{_size(peak)} on this rank's device"


def print_next(plan: Plan, words: Sequence[str], *, environment: Mapping[str, str]) -> None:
    """Print the next command to try, so that a person can paste it into the command line.

    Args:
        plan: of the run that has ended.
        words: its config and its settings, as they were given.
        environment: the process's own.
    """
    changed = _next_settings(plan.config)
    if plan.cluster.num_hosts > 1:  # how several hosts are started is not known here
        print_line(f"try next: the same command with {' '.join(changed)}")
        return
    replaced = {"checkpoint.resume"}  # the new run has nothing to resume
    for setting in changed:
        replaced.add(setting.partition("=")[0])
    command = [word for word in words if not _sets(word, replaced)]
    command += _rank_options(plan)
    print_line(f"try next: {_door(environment)} train {shlex.join(command + changed)}")


def _door(environment: Mapping[str, str]) -> str:
    """Return how the calling shell starts a command of ours, without the command's name."""
    if DOOR in environment:
        return environment[DOOR]
    if Path(sys.executable).with_name(PROGRAM).exists():
        return _program(PROGRAM, environment)
    return f"{_program(Path(sys.executable).name, environment)} -m framework"


def _next_settings(config: RunConfig) -> list[str]:
    """Return the settings of a run that is worth a try after this one."""
    changed = f"run.seed={config.run.seed + 1}"
    if config.precision.dtype == "fp32" and config.precision.model_fields_set <= {"dtype"}:
        changed = "precision.dtype=autocast"
    name = "second" if config.run.name != "second" else "third"
    return [changed, f"run.name={name}"]


def _sets(word: str, keys: Collection[str]) -> bool:
    return is_setting(word) and word.partition("=")[0] in keys


def _rank_options(plan: Plan) -> list[str]:
    """Return the option for the number of ranks, if a launch here would choose another one."""
    implied_ranks = plan.config.run.world_size
    if not implied_ranks and plan.cluster.device == "cpu":
        implied_ranks = RANKS_ON_CPU
    if plan.cluster.world_size == implied_ranks:
        return []
    return ["--num_gpus", str(plan.cluster.world_size)]


def _tensorboard(environment: Mapping[str, str]) -> str:
    """Return the command that starts TensorBoard in the shell that the run was started from."""
    if Path(sys.executable).with_name("tensorboard").exists():
        return _program("tensorboard", environment)
    return f"{_program(Path(sys.executable).name, environment)} -m tensorboard.main"


def _program(name: str, environment: Mapping[str, str]) -> str:
    """Return how the calling shell starts a program of this Python's environment: by its name if
    the shell finds that program, else by its path.
    """
    program = Path(sys.executable).with_name(name)
    in_shell = shutil.which(name, path=environment.get(SHELL_PATH, environment.get("PATH", "")))
    if in_shell is not None and Path(in_shell).absolute() == program:
        return name
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.quote(str(program))


def describe_stop(result: RunResult, stopped: str, plan: Plan) -> str:
    """Describe where a run stopped on request, and how it goes on."""
    if result.step == result.start_step:
        return f"{stopped}: stopped before the first step: nothing new to save [stopped]"
    saved = result.folder / CHECKPOINTS / tag_of(result.step)
    return (
        f"{stopped}: stopped after step {result.step} of {plan.length.total_steps}; {saved} is "
        "complete; go on with checkpoint.resume=auto [stopped]"
    )
