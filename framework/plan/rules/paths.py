"""Rule about paths with what only a shell replaces."""

from __future__ import annotations

from framework.config.paths import unexpanded_paths
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule


@rule()
def paths_are_complete(config: RunConfig, cluster: Cluster) -> Found:
    """Find paths that would make or seek a folder with the name of a variable, or of ``~``."""
    for key, path in unexpanded_paths(config):
        if path.startswith("~"):
            reason = f"{path.partition('/')[0]} is the home folder of no user of this machine"
            fix = "write the path itself"
        else:
            reason = "variables are not replaced in a run config, and the folder would be named so"
            fix = f"write the path itself, or let the shell replace it: {key}={path}"
        yield Problem("path-not-complete", reason, fix, key, path)
