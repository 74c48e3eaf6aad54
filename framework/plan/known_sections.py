"""Errors of a config of which some sections cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan import rules
from framework.plan.cluster import Cluster
from framework.plan.layout import make_layout
from framework.plan.plan import default_cluster, errors_in
from framework.plan.rules.schedule import overruled


def errors_of_known(
    config: RunConfig, unknown: Set[str], cluster: Cluster | None, *, source: Source
) -> list[Problem]:
    """Find errors that follow from the sections that could be read; a rule ends where it reads
    another one.

    Args:
        config: the run config without the sections that cannot be read.
        unknown: their names; the values of these sections in `config` mean nothing.
        cluster: where it is to run; None: on what the config implies.
        source: where the config's values came from.
    """
    unknown = unknown | {key.partition(".")[0] for key in config.auto}
    # A rule that reads a section that is missing here raises AttributeError.
    sections = {name: getattr(config, name) for name in RunConfig.model_fields.keys() - unknown}
    known = cast(RunConfig, SimpleNamespace(**sections))
    where = cluster or cast(Cluster, SimpleNamespace())
    with suppress(AttributeError):
        where = cluster or default_cluster(known)

    checks: list[Iterable[Problem]] = [rule(known, where) for rule in rules.all_rules()]
    checks.append(overruled(known, source))
    checks.append(_layout_problem(known, where))
    return errors_in(_as_far_as_known(checks), source)


def _layout_problem(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    layout = make_layout(config.batch, world_size=cluster.world_size, **config.parallel.sizes())
    if isinstance(layout, Problem):
        yield layout


def _as_far_as_known(checks: Iterable[Iterable[Problem]]) -> list[Problem]:
    """List the problems that each check finds until it reads an unknown section, which raises
    AttributeError.
    """
    all_problems: list[Problem] = []
    for problems in checks:
        with suppress(AttributeError):
            all_problems.extend(problems)
    return all_problems
