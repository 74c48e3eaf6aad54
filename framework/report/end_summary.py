"""The summary that rank 0 prints after training, and the report that it writes."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepspeed_lint.text.document import is_setting
from framework.checkpoint.names import CHECKPOINTS, tag_of
from framework.errors import counted, in_one_line
from framework.plan.cluster import RANKS_ON_CPU
from framework.plan.plan import Plan
from framework.report.run_result import RunResult
from framework.report.start_summary import bytes_text, print_rows
from framework.system.command_names import PROGRAM
from framework.system.log import print_line, warn
from framework.system.metric_names import PHASES, time_of

if TYPE_CHECKING:
    from framework.config.run_config import RunConfig

# From launch.sh, which puts its environment's programs in front of the PATH: the PATH of the
# person's own shell, and how the script is called from there.
SHELL_PATH: Final = "DSF_SHELL_PATH"
DOOR: Final = "DSF_DOOR"
# Half a million points of 500 bytes. To read them takes 0.7 s of a processor; a page may cost the
# end of a run one.
_LARGEST_METRICS: Final = 256 << 20


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
    print_rows(rows)


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
        yield "peak memory", f"{bytes_text(peak)} on this rank's device"


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
