"""The load of a run: from the path of a run config and settings to its plan, for every command and
for training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, accepted, default_cluster, make_plan
from framework.system.output import write

if TYPE_CHECKING:  # needed for keys that are ``auto``, which most configs do not have
    from framework.checkpoint.resume_point import ResumeLookup
    from framework.plan.hardware import Hardware
    from framework.plan.work import ModelWork


@dataclass(frozen=True)
class LoadedRun:
    """A run config with the settings of the command line.

    Attributes:
        config_path: path of the run config.
        overrides: the settings, as ``key=value``.
        config: the run config with the settings.
        source: the place of every value.
        deepspeed_config: path of a DeepSpeed JSON that decides a part of the run, or None.
        choice: one line on the values that were chosen for ``auto``, or "".
        lookup: the search for the checkpoint to resume, if it was needed to choose them.
    """

    config_path: str
    overrides: tuple[str, ...]
    config: RunConfig
    source: Source
    deepspeed_config: str | None = None
    choice: str = ""
    lookup: ResumeLookup | None = None

    @property
    def words(self) -> list[str]:
        """Arguments of `launch`."""
        words = [self.config_path, *self.overrides]
        return words + deepspeed_words(self.deepspeed_config)

    @property
    def arguments(self) -> list[str]:
        """Arguments of train.py."""
        words = ["--config", self.config_path]
        words += deepspeed_words(self.deepspeed_config)
        words += self.overrides
        return words

    def chosen(
        self,
        cluster: Cluster | None = None,
        target: Hardware | None = None,
        *,
        is_proposal: bool = False,
        work: ModelWork | None = None,
    ) -> LoadedRun:
        """Return the run with a value for every key that its config leaves ``auto``, and `choice`.

        Args:
            cluster: by default the one that the config implies.
            target: devices to choose for; by default those of this machine.
            is_proposal: nothing is started, so that the device may be unknown.
            work: of a model of the user's own.

        Raises:
            ConfigError: no values work.
        """
        if not self.config.auto:
            return self
        from framework.checkpoint.resume_point import ResumeLookup
        from framework.plan.auto import resolve, target_at_hand

        cluster = cluster or default_cluster(self.config)
        target = target or target_at_hand(cluster)
        lookup = ResumeLookup(self.config)
        config, settings, line = resolve(
            self.config,
            cluster,
            target,
            source=self.source,
            saved=lookup.manifest(),
            is_proposal=is_proposal,
            work=work,
        )
        chosen_words = tuple(f"{key}={value}" for key, value in settings.items())
        return replace(
            self,
            config=config,
            overrides=self.overrides + chosen_words,
            choice=line,
            lookup=lookup,
        )

    def started(self, cluster: Cluster) -> LoadedRun:
        """Return the run as `chosen` does, for the devices of this machine, and print the choice to
        stderr on rank 0.
        """
        run = self.chosen(cluster)
        if run.choice and os.environ.get("RANK", "0") == "0":
            write(sys.stderr, f"{run.choice}\n")
        return run

    def print_notes(self, *, is_supervised: bool = False) -> None:
        """Print notes on what the file may have and is seldom intended to.

        Args:
            is_supervised: the process that starts the run starts it again after a failure.
        """
        notes = list(self.source.notes)
        max_restarts = self.config.supervision.max_restarts
        if max_restarts and not is_supervised:
            reason = "no launcher starts the run again here"
            fix = "start it by `dsf train`"
            key = "supervision.max_restarts"
            problem = Problem("not-supervised", reason, fix, key, max_restarts, severity="warning")
            notes.append(self.source.locate(problem))
        for note in notes:
            write(sys.stderr, f"{note.severity}: {note}\n")

    def plan(self, cluster: Cluster | None = None) -> Plan:
        """Plan the run on a cluster, or on the one that its config implies; raises a ConfigError
        with all problems.
        """
        return make_plan(self.config, cluster or default_cluster(self.config), source=self.source)

    def plan_with_data(
        self, cluster: Cluster | None = None, *, data_elsewhere: bool = True
    ) -> Plan:
        """Plan the run as `plan` does, with the number of samples and the problems of its data.

        With `data_elsewhere`, data that is not on this machine is a warning.
        """
        from framework.plan.data_files import look_at_data

        problems, size = look_at_data(self.config, data_elsewhere=data_elsewhere)
        if self.config.checkpoint.init_weights is not None:
            from framework.checkpoint.huggingface import published_problems

            problems += published_problems(self.config)
        training = self.config.training
        if training.first_adapter is not None and not self._resumes():
            from framework.checkpoint.adapter_files import adapter_problems
            from framework.plan.work import trained_shapes

            problems += adapter_problems(training.lora, partial(trained_shapes, self.config))
        cluster = cluster or default_cluster(self.config)
        return make_plan(
            self.config, cluster, num_train_samples=size, source=self.source, further=problems
        )

    def _resumes(self) -> bool:
        """Check whether a checkpoint is there that the run goes on from."""
        from framework.checkpoint.resume_point import ResumeLookup

        lookup = self.lookup or ResumeLookup(self.config)
        return bool(lookup.manifest())

    def checked_plan(self, cluster: Cluster) -> Plan:
        """Plan the run for a cluster that is elsewhere, and check its DeepSpeed JSON as well.

        Warnings and notes go to stderr; raises a ConfigError with all reasons for which the run
        cannot work there.
        """
        plan = self.chosen(cluster, is_proposal=True).plan(cluster)
        problems = [*self.source.notes, *plan.findings]
        if self.config.deepspeed:
            from framework.plan.judge_passed import judge_passed_through
            from framework.plan.render import render

            problems += judge_passed_through(plan, render(plan), source=self.source, release=None)
        for problem in accepted(problems, self.source):
            print(f"{problem.severity}: {problem}", file=sys.stderr)
        return plan


def load_run(
    path: str,
    overrides: Sequence[str] = (),
    *,
    deepspeed_config: str | None = None,
    text: str | None = None,
) -> LoadedRun:
    """Read the run config, its settings, and the DeepSpeed JSON that decides a part of it.

    Args:
        overrides: ``key=value`` settings.
        deepspeed_config: path of that JSON, if there is one.
        text: contents of the run config, if it has been read already.

    Raises:
        ConfigError: with all problems.
        UsageError: a word is no setting.
    """
    config, source = load_with_source(path, overrides, text=text)
    if deepspeed_config is not None:
        from framework.imports.deepspeed import with_deepspeed_config

        config = with_deepspeed_config(config, deepspeed_config, source=source)
    return LoadedRun(path, tuple(overrides), config, source, deepspeed_config)


def deepspeed_words(path: str | None) -> list[str]:
    """Return the option, of `launch` and of train.py, for the path of a DeepSpeed JSON."""
    if path is None:
        return []
    return ["--deepspeed_config", path]
