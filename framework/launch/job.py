"""The run that is started: its config as this process has read it, and the words with which every rank reads it
again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.launch.hosts.devices import LocalDevices, unused_gpus
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
        """What is allowed in the file, and seldom meant."""
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
        from framework.dslint.import_merge import with_deepspeed_config

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
