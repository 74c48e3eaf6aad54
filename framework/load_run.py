"""Loading of a run: from the path of a run config and its settings to its plan, for every command
and for training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, accepted, default_cluster, make_plan
from framework.system.output import write

if TYPE_CHECKING:  # most configs leave nothing to be chosen
    from framework.plan.search import Hardware
    from framework.plan.work import ModelWork


@dataclass(frozen=True)
class LoadedRun:
    """A run config with its settings: as they were given, what they make, and where its values came
    from.
    """

    config_path: str
    overrides: tuple[str, ...]
    config: RunConfig
    source: Source
    deepspeed_config: str | None = None
    choice: str = ""

    @property
    def words(self) -> list[str]:
        """Arguments of `launch`."""
        return [self.config_path, *self.overrides, *deepspeed_words(self.deepspeed_config)]

    @property
    def arguments(self) -> list[str]:
        """Arguments of train.py."""
        return [
            "--config",
            self.config_path,
            *deepspeed_words(self.deepspeed_config),
            *self.overrides,
        ]

    def chosen(
        self,
        cluster: Cluster | None = None,
        target: Hardware | None = None,
        *,
        is_proposal: bool = False,
        work: ModelWork | None = None,
    ) -> LoadedRun:
        """The run with plain settings for what its config leaves to be chosen: for a device, or for
        those of this machine; `choice` says it in one line.

        Args:
            is_proposal: nothing is started, so that the device may be unknown.
            work: of a model of the user's own.

        Raises:
            ConfigError: nothing can be chosen.
        """
        if not self.config.auto:
            return self
        from framework.checkpoint.resume_point import saved_manifest
        from framework.plan.auto import resolve, target_at_hand

        cluster = cluster or default_cluster(self.config)
        target = target or target_at_hand(cluster)
        saved = saved_manifest(self.config)
        config, settings, line = resolve(
            self.config,
            cluster,
            target,
            source=self.source,
            saved=saved,
            is_proposal=is_proposal,
            work=work,
        )
        words = (*self.overrides, *(f"{key}={value}" for key, value in settings.items()))
        return replace(self, config=config, overrides=words, choice=line)

    def started(self, cluster: Cluster) -> LoadedRun:
        """As `chosen` for the devices of this machine, and print the choice to stderr, on one
        rank.
        """
        run = self.chosen(cluster)
        if run.choice and os.environ.get("RANK", "0") == "0":
            write(sys.stderr, f"{run.choice}\n")
        return run

    def print_notes(self, *, is_supervised: bool = False) -> None:
        """Print notes on what is allowed in the file, and seldom intended; `is_supervised`: by who
        starts the run.
        """
        notes = list(self.source.notes)
        most = self.config.supervision.max_restarts
        if most and not is_supervised:
            reason = "nobody starts the run again here"
            fix = "start it by `python -m framework launch`"
            key = "supervision.max_restarts"
            notes.append(
                self.source.locate(
                    Problem("not-supervised", reason, fix, key, most, severity="warning")
                )
            )
        for note in notes:
            write(sys.stderr, f"{note.severity}: {note}\n")

    def plan(self, cluster: Cluster | None = None) -> Plan:
        """Plan the run on a cluster, or on the one that its config implies; a ConfigError has every
        problem found.
        """
        return make_plan(self.config, cluster or default_cluster(self.config), source=self.source)

    def plan_with_data(
        self, cluster: Cluster | None = None, *, data_elsewhere: bool = True
    ) -> Plan:
        """Plan the run as `plan` does, with the size of its text, and with what is wrong with its
        data.
        """
        from framework.checkpoint.huggingface import published_problems
        from framework.plan.token_folder import look_at_data

        found, size = look_at_data(self.config, data_elsewhere=data_elsewhere)
        found += published_problems(self.config)
        cluster = cluster or default_cluster(self.config)
        return make_plan(
            self.config, cluster, num_train_samples=size, source=self.source, further=found
        )

    def checked_plan(self, cluster: Cluster) -> Plan:
        """Plan the run for a cluster that is elsewhere, its DeepSpeed JSON checked as well;
        warnings and notes go to stderr, and a ConfigError has everything for which it could not
        work there.
        """
        plan = self.chosen(cluster, is_proposal=True).plan(cluster)
        found = [*self.source.notes, *plan.findings]
        if self.config.deepspeed:
            from framework.dslint.judge import judge_passed_through
            from framework.plan.render import render

            found += judge_passed_through(plan, render(plan), source=self.source, release=None)
        for problem in accepted(found, self.source):
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
        text: what the run config holds, where it has been read already.

    Raises:
        ConfigError: with every problem found.
        UsageError: a setting that is none.
    """
    config, source = load_with_source(path, overrides, text=text)
    if deepspeed_config is not None:
        from framework.dslint.import_run import with_deepspeed_config

        config = with_deepspeed_config(config, deepspeed_config, source=source)
    return LoadedRun(path, tuple(overrides), config, source, deepspeed_config)


def deepspeed_words(path: str | None) -> list[str]:
    """Return the option of that JSON, which `launch` and train.py have alike."""
    return [] if path is None else ["--deepspeed_config", path]
