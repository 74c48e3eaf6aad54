"""The `render` command: prints the DeepSpeed JSON of a run config."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from framework.commands.cluster_options import add_cluster_options, add_run_config, find_cluster
from framework.commands.target_search import missing_targets
from framework.errors import EXIT_OK, ConfigError
from framework.load_run import LoadedRun, load_run
from framework.plan.cluster import Cluster
from framework.plan.render import render
from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser
from framework.system.output import write


def main(words: Sequence[str]) -> int:
    """Print the JSON with which DeepSpeed would train; returns the exit code."""
    arguments = parse_command("render", _add_arguments, words)
    run = load_run(arguments.file, arguments.words)
    cluster = find_cluster(arguments)
    run = _without_auto(run, cluster, arguments)
    plan = run.plan(cluster)
    try:
        ds_config = render(plan)
    except ConfigError as error:
        raise ConfigError(map(run.source.locate, error.problems)) from None
    for warning in missing_targets(plan.config):
        write(sys.stderr, f"warning: {run.source.locate(warning)}\n")
    print(json.dumps(ds_config, indent=2))
    return EXIT_OK


def _add_arguments(parser: CommandParser) -> None:
    add_run_config(parser)
    add_cluster_options(parser)


def _without_auto(
    run: LoadedRun, cluster: Cluster | None, arguments: argparse.Namespace
) -> LoadedRun:
    """Return the run with its ``auto`` keys chosen, for the device of ``--gpu`` if there is one;
    prints the choice to stderr.
    """
    if run.config.auto and arguments.gpu:
        from framework.plan.auto import listed_target

        devices_per_host = 1
        if cluster:
            devices_per_host = cluster.devices_per_host
        target = listed_target(arguments.gpu, devices_per_host=devices_per_host)
        run = run.chosen(cluster, target)
    run = run.chosen(cluster)
    if run.choice:
        write(sys.stderr, f"{run.choice}\n")
    return run
