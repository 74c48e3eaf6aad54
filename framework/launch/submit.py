"""What a run needs to be handed to a cluster: its check before anything is written, and where the result goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from framework.config.load import load_with_source
from framework.config.run_config import RunConfig
from framework.dslint.judge import judge_passed_through
from framework.errors import ConfigError, StorageError, UsageError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.plan.render import render


def checked_plan(config: str, overrides: Sequence[str], cluster: Cluster) -> Plan:
    """The plan of a run on a cluster; warnings and notes go to stderr.

    Raises:
        ConfigError: with everything for which it could not work there.
    """
    asked, source = load_with_source(config, overrides)
    plan = make_plan(asked, cluster, source=source)
    found = [*source.notes(), *plan.findings]
    if asked.deepspeed:
        found += judge_passed_through(plan, render(plan), source=source, release=None)
    wrong = [problem for problem in found if problem.severity == "error"]
    if wrong:
        raise ConfigError(wrong)
    for problem in found:
        print(f"{problem.severity}: {problem}", file=sys.stderr)
    return plan


def refuse_one_start(config: RunConfig, *, place: str, once: str) -> None:
    """A job that starts again would go back to the checkpoint that `checkpoint.resume` names, and lose what it did
    since.

    Args:
        config: of the run.
        place: what was asked for, such as ``launch slurm --requeue``.
        once: the option with which the job does not start again.

    Raises:
        UsageError: it names one.
    """
    if config.checkpoint.resume not in ("auto", "never"):
        raise UsageError(
            f"{place}: checkpoint.resume = {config.checkpoint.resume}: a job that starts again would go back there "
            f"each time; start once {once}, then go on with checkpoint.resume=auto"
        )


def hand_out(text: str, *, to: str | None) -> None:
    """Print a manifest or a script, or write it to a file.

    Raises:
        StorageError: the file cannot be written.
    """
    if to is None:
        print(text, end="")
        return
    try:
        Path(to).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{to}: cannot be written ({error.strerror}) [not-written]") from None
