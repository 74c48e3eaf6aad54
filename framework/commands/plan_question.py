"""The question that a command line of `plan` asks: the run, its cluster and devices, and what is
free to be chosen.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any, Final, TextIO

from deepspeed_lint.text.document import COMMAND_LINE
from framework.commands.plan_lines import other_lines
from framework.commands.torch_child import NoAnswerError
from framework.commands.traced_work import (
    find_own_optimizer,
    find_own_work,
    refuse_unlike_model,
)
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem, UsageError
from framework.load_run import LoadedRun
from framework.plan.alternatives import with_settings
from framework.plan.auto import listed_target, measured_target
from framework.plan.cluster import Cluster
from framework.plan.data_files import look_at_data
from framework.plan.hardware import Hardware
from framework.plan.layout import Layout
from framework.plan.memory import NotEstimatedError
from framework.plan.nearest_plan import nearest_plan
from framework.plan.otherwise import runs_that_fit
from framework.plan.plan import Length, Plan, make_plan
from framework.plan.search import SearchResult, search
from framework.plan.search_goals import search_fewest_devices, search_longest_sequence
from framework.plan.search_space import (
    EVERYTHING,
    MICRO,
    WITHOUT_BATCH,
    Request,
    sizes_of_groups,
)
from framework.plan.work import ModelWork
from framework.system.output import write

# Kinds of problems that a plan with another batch, fewer stages or fewer devices would not have.
_NO_LAYOUT: Final = frozenset(
    {
        "batch-not-divisible",
        "pipe-not-divisible",
        "pipe-exceeds-layers",
        "dataset-smaller-than-batch",
    }
)

_SEARCHES: Final = {
    None: search,
    "longest-sequence": search_longest_sequence,
    "fewest-devices": search_fewest_devices,
}


@dataclass(frozen=True)
class Question:
    """The plan of the command line, and what the options request beside it.

    Attributes:
        arguments: the command line.
        run: the run config with its settings.
        plan: its plan.
        target: the devices, and their rates as far as they are known.
        work: of a model of the user's own.
        why: the reason why the memory of an optimizer of the user's own is not known.
        written: the run config before its ``auto`` keys were chosen; None: it has none.
        refused: the problem of the config as it is written, where the plan is the best that a
            search found in its place.
        result: of that search.
    """

    arguments: argparse.Namespace
    run: LoadedRun
    plan: Plan
    target: Hardware
    work: ModelWork | None = None
    why: str = ""
    written: RunConfig | None = None
    refused: Problem | None = None
    result: SearchResult | None = None

    @property
    def is_wide(self) -> bool:
        """Whether everything that the command line does not set may be chosen."""
        options = self.arguments
        return bool(
            options.search or options.goal or options.apply or options.chart or options.trials
        )

    def _is_set_here(self, key: str) -> bool:
        """Check whether the command line gives the key a value, alone or with its section."""
        names = key.split(".")
        section = self.run.config
        if self.run.source.place(tuple(names))[0] != COMMAND_LINE:
            return False
        for name in names:
            if name not in section.model_fields_set:
                return False
            section = getattr(section, name)
        return section is not None

    @property
    def request(self) -> Request:
        """The search's request: without a wide one only settings that leave the batch as it is."""
        if self.is_wide:
            free_keys = {key for key in EVERYTHING if not self._is_set_here(key)}
            free_keys |= self.run.config.auto
        else:
            free_keys = set(WITHOUT_BATCH)
        return Request(
            self.run.config,
            self.plan.cluster,
            self.target,
            free_keys,
            self.plan.length.num_train_samples,
            self.work,
        )

    @property
    def widest_request(self) -> Request:
        """The request of a search in which all keys of a strategy are free."""
        if self.is_wide:
            return self.request
        return replace(self.request, free=EVERYTHING)

    def search(self) -> SearchResult:
        """Return the result of the search that the options ask for, which a refused config has.

        Raises:
            NotEstimatedError: the model's memory is not known.
        """
        if self.result is not None:
            return self.result
        return _SEARCHES[self.arguments.goal](self.request)


def stream_of_notes(arguments: argparse.Namespace) -> TextIO:
    """Return the stream for what is printed beside the plan: stdout is a tool's with ``--json``."""
    if arguments.json:
        return sys.stderr
    return sys.stdout


def ask(arguments: argparse.Namespace, run: LoadedRun, cluster: Cluster) -> Question:
    """Plan the run. If no layout fits the cluster, the nearest plan that would is printed before
    the error.

    Raises:
        ConfigError: there is no such plan.
    """
    target = _find_target(arguments, cluster)
    written = run.config
    work: ModelWork | None = None
    why = ""
    try:
        work, why = _own_work(arguments, run, cluster, target)
        run = run.chosen(cluster, target, is_proposal=True, work=work)
        plan = run.plan_with_data(cluster)
        if work is not None:
            refuse_unlike_model(plan, work)
    except ConfigError as raised:
        error = ConfigError(map(run.source.locate, raised.problems))
        as_written = _question_as_written(arguments, run, cluster, target, work)
        instead = _found_instead(as_written)
        if instead is not None:
            return replace(instead, refused=error.problems[0])
        kinds = {problem.kind for problem in error.problems}
        if kinds & _NO_LAYOUT and not run.config.auto:
            _print_nearest(run, cluster, stream_of_notes(arguments))
        if "auto-nothing-fits" in kinds:
            _print_others(as_written.widest_request, stream_of_notes(arguments))
        if why and kinds == {"auto-not-estimated"}:
            raise _not_looked_at(error.problems[0], why) from None
        raise error from None
    return Question(arguments, run, plan, target, work, why, written)


def _not_looked_at(problem: Problem, why: str) -> ConfigError:
    """Return the error for `auto` keys of a model that this command could not look at."""
    fix = "write the values of the keys that are auto"
    return ConfigError([replace(problem, reason=f"{problem.reason} ({why})", fix=fix)])


def _question_as_written(
    arguments: argparse.Namespace,
    run: LoadedRun,
    cluster: Cluster,
    target: Hardware,
    work: ModelWork | None,
) -> Question:
    """Return the question about a config that cannot be as it is written, in place of a plan with
    its cluster and data alone; `work` is of a model of the user's own, if it is known.
    """
    _, size = look_at_data(run.config, data_elsewhere=True)
    length = Length(None, None, size, 0)
    plan = Plan(run.config, cluster, Layout(1, 1, 1, 1, 1), length, ())
    return Question(arguments, run, plan, target, work)


def _found_instead(as_written: Question) -> Question | None:
    """Return the question with the best plan that a wide search finds for a config that cannot be
    as it is written; None without one.
    """
    if not as_written.is_wide:
        return None
    try:
        result = as_written.search()
    except (NotEstimatedError, UsageError):
        return None
    if not result.ranked:
        return None
    return replace(as_written, plan=result.ranked[0].plan, result=result)


def _find_target(arguments: argparse.Namespace, cluster: Cluster) -> Hardware:
    """Return the devices of ``--gpu`` as they are listed, or this machine as it was measured."""
    if arguments.gpu:
        return listed_target(
            arguments.gpu,
            devices_per_host=cluster.devices_per_host,
            network=arguments.network,
            host_bytes=arguments.host_memory,
        )
    target = measured_target(cluster) or Hardware()
    return replace(target, host_bytes=arguments.host_memory)


def _own_work(
    arguments: argparse.Namespace, run: LoadedRun, cluster: Cluster, target: Hardware
) -> tuple[ModelWork | None, str]:
    """Return the work of a model of the user's own, or None, and a text: why that work, or the
    memory of an optimizer of the user's own, is not known. Both take a child process; a named model
    and optimizer need none.
    """
    if not run.config.model.is_own_code and run.config.optimizer.own_factory() is None:
        return None, ""
    plan = make_plan(_without_auto(run.config), cluster, source=run.source)
    why = find_own_optimizer(plan)
    free = Question(arguments, run, plan, target).request.free | run.config.auto
    try:
        return find_own_work(plan, sizes_of_groups(plan.config, cluster, free)), why
    except NoAnswerError as error:
        return None, str(error)


def _without_auto(config: RunConfig) -> RunConfig:
    """Set plain values for the keys to be chosen: they do not change the model."""
    settings: dict[str, Any] = dict.fromkeys(config.auto, 1)
    if MICRO in settings:
        settings[MICRO] = None
    if settings:
        return with_settings(config, settings)
    return config


def _print_others(request: Request, out: TextIO) -> None:
    """Print the other runs that fit."""
    for line in other_lines(list(runs_that_fit(request))):
        write(out, f"{line}\n")


def _print_nearest(run: LoadedRun, cluster: Cluster, out: TextIO) -> None:
    """Print the nearest plan that is possible, if there is one."""
    _, size = look_at_data(run.config, data_elsewhere=True)
    nearest = nearest_plan(run.config, cluster, num_train_samples=size)
    if nearest:
        change, plan = nearest
        layout = str(plan.layout)
        if change != layout:
            layout = f"{change}: {layout}"
        write(out, f"{'nearest':<10}{layout}\n")
