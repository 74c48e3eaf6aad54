"""From the path of a run config to what the run asks of a host, with everything that is wrong on the way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from framework.doctor.node.findings import Check
from framework.doctor.node.need import Need, need_of, need_without_config
from framework.errors import ConfigError
from framework.launch.hosts.devices import find_devices
from framework.load_run import load_run
from framework.plan.cluster import Cluster, Device


def judge_config(
    path: str | None, overrides: Sequence[str], cluster: Cluster, *, is_chosen: bool = True
) -> tuple[tuple[Check, ...], Need]:
    """Judge a run config and return its requirements on each host; those of any run, where there is no plan.

    Args:
        path: of the run config; None: no run in particular is meant.
        overrides: settings that win over it.
        cluster: where it would run.
        is_chosen: whether somebody named the number of ranks; otherwise that of the config wins.
    """
    if path is None:
        return (), need_without_config(cluster)
    try:
        run = load_run(path, overrides)
        if run.config.run.world_size and not is_chosen:
            cluster = replace(cluster, devices_per_host=run.config.run.world_size)
        plan = run.plan(cluster)
    except ConfigError as error:
        return (Check("config", f"{path}: refused on {cluster}", tuple(error.problems)),), need_without_config(cluster)
    problems = (*run.source.notes(), *plan.findings)
    return (Check("config", f"{path} on {cluster}: {plan.layout}", problems),), need_of(plan)


def local_devices() -> tuple[Device, int]:
    """Kind and number of devices here; what is wrong with them is said by the check of devices."""
    try:
        found = find_devices(os.environ)
    except ConfigError:
        asked = os.environ.get("DS_ACCELERATOR")
        return ("cuda" if asked == "cuda" else "npu" if asked == "npu" else "cpu"), 0
    return found.kind, found.count
