"""Findings of the rules on a run config with unreadable sections: as much as the other sections decide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any, cast

from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.layout import make_layout
from framework.plan.plan import default_cluster
from framework.plan.rules import ALL
from framework.plan.rules.schedule import overruled


class _UnknownError(Exception):
    """Somebody asked for what is not known."""


class _Known:
    """Stands for a run config or a cluster; a rule that asks it for what is not known ends there."""

    def __init__(self, known: RunConfig | Cluster | None, unknown: Set[str] = frozenset()) -> None:
        self._known, self._unknown = known, unknown

    def __getattr__(self, name: str) -> Any:
        if self._known is None or name in self._unknown:
            raise _UnknownError(name)
        return getattr(self._known, name)


def errors_of_known(config: RunConfig, unknown: Set[str], cluster: Cluster | None, *, source: Source) -> list[Problem]:
    """Errors that follow from the known sections alone.

    Args:
        config: the run config without the sections that cannot be read.
        unknown: their names; what stands in `config` under them means nothing.
        cluster: where it is to run; None: on what the config implies.
        source: where the config's values came from.
    """
    known = cast(RunConfig, _Known(config, unknown))
    try:
        where = cluster or default_cluster(known)
    except _UnknownError:
        where = cast(Cluster, _Known(None))
    findings = [*(rule(known, where) for rule in ALL), overruled(known, source), _layout(known, where)]
    return [
        source.locate(found) for reported in findings for found in _until_unknown(reported) if found.severity == "error"
    ]


def _layout(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    layout = make_layout(config.batch, world_size=cluster.world_size, pipe_size=config.parallel.pipe)
    if isinstance(layout, Problem):
        yield layout


def _until_unknown(reported: Iterable[Problem]) -> Iterator[Problem]:
    try:
        yield from reported
    except _UnknownError:
        return
