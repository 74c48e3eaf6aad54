"""Words of several commands: options that name a cluster, run configs with settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final

from deepspeed_lint.text.document import is_setting
from framework.errors import UsageError
from framework.plan.cluster import Cluster
from framework.system.arguments import whole

_num_devices: Final = whole(1, 10**18, "{} is not a number of devices; write 1 or more")
_num_nodes: Final = whole(1, 10**18, "{} is not a number of nodes; write 1 or more")


_UNITS: Final = {"GiB": 2**30, "TiB": 2**40, "GB": 10**9, "TB": 10**12}


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--num_gpus``, ``--nodes`` and ``--hostfile``."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num_gpus", type=_num_devices, metavar="N", help="devices on one host")
    parser.add_argument(
        "--nodes", type=_num_nodes, metavar="N", help="hosts, each with --num_gpus devices"
    )
    where.add_argument(
        "-H",
        "--hostfile",
        metavar="FILE",
        help="hosts and their devices, in DeepSpeed's format",
    )


def add_run_config(parser: argparse.ArgumentParser) -> None:
    """Add the run config with its settings, and the device that it is planned for."""
    parser.add_argument("--gpu", metavar="KIND", help="for this device, for example h100-80gb")
    parser.add_argument("file", metavar="FILE", help="run config, YAML or JSON")
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that win over the file",
    )


def add_host_memory(parser: argparse.ArgumentParser) -> None:
    """Add ``--host_memory``: what no list of devices knows."""
    parser.add_argument(
        "--host_memory",
        type=_size,
        metavar="SIZE",
        help="memory of a host, for example 1500GiB or 2TB, which offloading must fit",
    )


def _size(text: str) -> int:
    """Return a size with its unit in bytes."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?(\w+)", text, re.ASCII)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(_UNITS)
        raise argparse.ArgumentTypeError(f"{text} is not a size: write a number and one of {units}")
    return int(float(match[1]) * _UNITS[match[2]])


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files among words of a command line, and the settings ``key=value``."""
    files = []
    settings = []
    for word in words:
        if is_setting(word):
            settings.append(word)
        else:
            files.append(word)
    return files, settings


def find_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster that the options name, or None without them.

    Raises:
        UsageError: ``--nodes`` without devices.
        ConfigError: the hostfile cannot be used.
    """
    if arguments.num_gpus is not None:
        return Cluster(num_hosts=arguments.nodes or 1, devices_per_host=arguments.num_gpus)
    if arguments.nodes is not None:
        raise UsageError("--nodes: how many devices does each host have? give --num_gpus as well")
    if arguments.hostfile is None:
        return None
    from framework.hosts.hostfile import cluster_of, read_hostfile

    return cluster_of(read_hostfile(arguments.hostfile), path=arguments.hostfile)
