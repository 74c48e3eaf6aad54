"""``doctor [CONFIG] [key=value ...]``: is this machine, or are these hosts, fit to train? Exit code
0: yes; 78: no.

It starts nothing, changes nothing, and imports no torch; only ``--bench`` and ``--nvme`` run a
small job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from framework.doctor.node.findings import Check, Report
from framework.doctor.node.machine import examine
from framework.doctor.node.requirements import Requirements
from framework.errors import EXIT_CONFIG, EXIT_OK, ConfigError, UsageError
from framework.hosts.hostfile import ChosenHost, choose_hosts, cluster_of, is_this_machine
from framework.hosts.topology import DEFAULT_PORT
from framework.launch.drive_check import drive_check
from framework.launch.inspection import DoctorOptions, bench, inspect_hosts
from framework.launch.inspection_agent import judge_config, local_devices
from framework.launch.options import LaunchOptions, refuse_choice, refuse_idle
from framework.launch.ssh import split_ssh_args
from framework.plan.cluster import RANKS_ON_CPU, Cluster
from framework.system.arguments import add_options
from framework.system.command_parser import CommandParser
from framework.system.output import write

_ONLY_WITH_HOSTS: Final = (
    "include",
    "exclude",
    "num_nodes",
    "master_addr",
    "master_port",
    "ssh_args",
)


def doctor(argv: Sequence[str]) -> int:
    """Check config and machines, print a report, and return the exit code.

    Raises:
        UsageError: the command line is wrong.
    """
    arguments = _parser().parse_intermixed_args(list(argv))
    try:
        options = _options(arguments)
        if arguments.nvme and options.hosts:
            raise UsageError("doctor: --nvme measures a drive of this machine; leave out the hosts")
        report, requirements = look(options)
    except ConfigError as error:  # the hostfile: it is not known which hosts to check
        report = Report(before=[Check("hostfile", "cannot be used", error.problems)])
        requirements = None
    if arguments.nvme:
        report = replace(report, measured=[drive_check(arguments.nvme)])
    if arguments.bench and requirements is not None and report.is_fine:
        report = replace(report, measured=[*report.measured, *bench(options, requirements)])
    text = _text_of(report, as_json=arguments.json)
    # Not print: the exit code is the report's, also if the reader of stdout has left.
    write(sys.stdout, f"{text}\n")
    if report.is_fine:
        return EXIT_OK
    return EXIT_CONFIG


def _text_of(report: Report, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(report.to_dict(), indent=2)
    return report.as_text()


def look(options: DoctorOptions) -> tuple[Report, Requirements]:
    """Check the config, then the machines: problems of the config do not hide the machines'. Waits
    for the hosts over ssh, if there are any.

    Raises:
        ConfigError: the hosts of the hostfile do not go together.
    """
    if options.chosen:  # each host reports its own devices; this machine may be another one
        cluster = cluster_of(options.hosts)
    else:
        cluster = _cluster_here(options)
    is_chosen = bool(options.num_ranks or options.chosen)
    before, requirements = judge_config(
        options.config, options.overrides, cluster, is_chosen=is_chosen
    )
    if not options.chosen:
        node = examine(requirements, os.environ, counts_replaced=True)
        return Report(before, [node]), requirements
    nodes, across = inspect_hosts(options, requirements)
    return Report(before, nodes, across), requirements


def _cluster_here(options: DoctorOptions) -> Cluster:
    device, count = local_devices()
    num_ranks = options.num_ranks or count or RANKS_ON_CPU
    return Cluster(devices_per_host=num_ranks, device=device)


def _options(arguments: argparse.Namespace) -> DoctorOptions:
    """Return the checks that the command line asks for; hosts that are this machine alone become
    its devices.
    """
    config, words = _config_and_settings(arguments.words)
    chosen = _choose_hosts(arguments)
    master_port = arguments.master_port or DEFAULT_PORT
    if is_this_machine(chosen, ssh_args=arguments.ssh_args):
        return DoctorOptions(config, tuple(words), (), len(chosen[0].devices), "", master_port)
    # refuses options with which ssh would prompt for a password
    split_ssh_args(arguments.ssh_args, command="doctor")
    address = arguments.master_addr or ""
    return DoctorOptions(
        config, tuple(words), chosen, arguments.num_gpus, address, master_port, arguments.ssh_args
    )


def _config_and_settings(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the run config, or None, and the settings after it."""
    if not words:
        return None, ()
    if "=" in words[0] and not Path(words[0]).exists():
        raise UsageError(f"doctor: {words[0]} is a setting; name the run config before it")
    return words[0], words[1:]


def _choose_hosts(arguments: argparse.Namespace) -> tuple[ChosenHost, ...]:
    """Return the hosts of the hostfile that the options choose; none without a hostfile."""
    if not arguments.hostfile:
        flags = [f"--{name}" for name in _ONLY_WITH_HOSTS if getattr(arguments, name)]
        refuse_idle("doctor", flags)
    refuse_choice("doctor", arguments)
    if not arguments.hostfile:
        return ()
    return choose_hosts(
        arguments.hostfile,
        include=arguments.include,
        exclude=arguments.exclude,
        num_nodes=arguments.num_nodes,
        num_gpus=arguments.num_gpus,
        num_gpus_flag=arguments.num_gpus_flag,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="dsf doctor",
        description="Is this machine, or are these hosts, fit to train?",
        allow_abbrev=False,
    )
    run = "the run that is meant, and settings that win over it; left out: any run"
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help=run)
    between = "look at these hosts over ssh, and at what is between them"
    add_options(parser, LaunchOptions, only=("num_gpus", "hostfile"))
    add_options(parser, LaunchOptions, only=_ONLY_WITH_HOSTS, grouped=f"with -H, {between}")
    parser.set_defaults(num_gpus_flag="--num_gpus")
    bench = "measure all-reduce and storage with a small job, up to three minutes"
    parser.add_argument("--bench", action="store_true", help=bench)
    nvme = "measure a folder on a drive as DeepSpeed uses it, and print its best section aio"
    parser.add_argument("--nvme", metavar="FOLDER", help=nvme)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser
