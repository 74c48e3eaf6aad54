"""The run that is started: its config as this process has read it, and the words with which every rank reads it
again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.dslint.judge import judge_passed_through
from framework.errors import ConfigError, Problem, StorageError, UsageError
from framework.launch.hosts.devices import LocalDevices, unused_gpus
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.plan.render import render
from framework.system.output import write


@dataclass(frozen=True)
class Job:
    """A run config with its settings.

    Attributes:
        config_path, overrides, deepspeed_config: as they were given.
        config: what they make.
        source: where its values came from.
    """

    config_path: str
    overrides: tuple[str, ...]
    config: RunConfig
    source: Source
    deepspeed_config: str | None = None

    @property
    def words(self) -> list[str]:
        """Behind `launch`."""
        return [self.config_path, *self.overrides, *deepspeed_words(self.deepspeed_config)]

    @property
    def arguments(self) -> list[str]:
        """Of train.py."""
        return ["--config", self.config_path, *deepspeed_words(self.deepspeed_config), *self.overrides]

    def print_notes(self) -> None:
        """Print notes on what is allowed in the file, and seldom intended."""
        for note in self.source.notes():
            write(sys.stderr, f"{note.severity}: {note}\n")


def load_job(config_path: str, overrides: Sequence[str], *, deepspeed_config: str | None = None) -> Job:
    """Read the run config, its settings, and the DeepSpeed JSON that decides a part of it.

    Raises:
        ConfigError: with every problem found.
        UsageError: a setting that is none.
    """
    config, source = load_with_source(config_path, overrides)
    if deepspeed_config is not None:
        from framework.dslint.import_run import with_deepspeed_config

        config = with_deepspeed_config(config, deepspeed_config, source=source)
    return Job(config_path, tuple(overrides), config, source, deepspeed_config)


def deepspeed_words(path: str | None) -> list[str]:
    """The option of that JSON, which `launch` and train.py have alike."""
    return [] if path is None else ["--deepspeed_config", path]


def warn_of_unused(devices: LocalDevices) -> None:
    """Training on processors may be a mistake in an installation."""
    problem = unused_gpus(devices, os.environ)
    if problem is not None:
        write(sys.stderr, f"{problem.severity}: {problem}\n")


def refuse_too_few(job: Job, devices: LocalDevices, *, num_ranks: int, stated_by: str, where: str = "") -> None:
    """DeepSpeed would start more ranks than there are devices, and the surplus die with "invalid device ordinal".

    Args:
        job: what they would run.
        devices: of this machine.
        num_ranks: on it.
        stated_by: who asks for so many: an option, a key of the run config, a variable.
        where: for the fix, such as `` on every node``.

    Raises:
        ConfigError: that is so.
    """
    if not devices.count or num_ranks <= devices.count:
        return
    problem = Problem(
        kind="too-few-devices",
        key=stated_by,
        value=num_ranks,
        file="command line" if stated_by.startswith("-") else "",
        reason=f"this machine has {devices.count} {devices.kind} devices for it",
        fix=f"at most {devices.count}{where}, or DS_ACCELERATOR=cpu to try it on processors",
    )
    raise ConfigError(job.source.locate(problem) if stated_by.startswith("run.") else problem)


# Submission of a run to a cluster: its check before anything is written, and the file for the result.


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
