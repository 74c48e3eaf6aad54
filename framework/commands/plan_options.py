"""The options of `plan`."""

from __future__ import annotations

from framework.commands.cluster_options import add_cluster_options, add_host_memory, add_run_config
from framework.system.arguments import whole
from framework.system.command_parser import CommandParser


def add_plan_options(plan: CommandParser) -> None:
    """Add everything that `plan` takes."""
    count = whole(1, 1000, "{} is not a number of strategies")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--explain-oom",
        metavar="LOG",
        help="explain an out-of-memory message by this plan: a rank's log, or - for stdin",
    )
    plan.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's rates first, about half a minute",
    )
    plan.add_argument(
        "--trials",
        type=count,
        metavar="N",
        help="run the best N for some steps each, here; implies --search",
    )
    plan.add_argument(
        "--network",
        metavar="NAME",
        help="between hosts, where it is not the usual one, such as infiniband-hdr",
    )
    plan.add_argument(
        "--search",
        action="store_true",
        help="choose micro-batch, accumulation and pipeline as well",
    )
    plan.add_argument(
        "--goal",
        choices=("throughput", "fewest-devices", "longest-sequence"),
        help="what the best strategy has most of, or takes least of; implies --search",
    )
    plan.add_argument("--top", type=count, metavar="N", help="show so many")
    plan.add_argument(
        "--apply",
        action="store_true",
        help="write the best strategy into the file; implies --search",
    )
    plan.add_argument(
        "--paper",
        action="store_true",
        help="the usual formulas beside it, and goodput between failures",
    )
    plan.add_argument(
        "--chart",
        metavar="FILE.svg",
        help="draw the memory of the best strategies; implies --search",
    )
    add_run_config(plan)
    add_cluster_options(plan)
    add_host_memory(plan)
