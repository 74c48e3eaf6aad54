"""Starts a run on this machine: ``python -m framework launch CONFIG [key=value ...] [--num_gpus N] [--master_port P]``.

Nothing here but convenience: it checks the config, finds the devices, picks a port, prints the plain `deepspeed` command
and starts the ranks as that would. The printed line, pasted into a shell, trains the same run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from framework.config.load import load_with_source
from framework.config.run_config import RunConfig
from framework.ds_json.import_merge import with_deepspeed_config
from framework.errors import EXIT_OK, ConfigError, Problem, UsageError
from framework.launch.devices import LocalDevices, find_devices
from framework.launch.node import Terms, grace_seconds, require_deepspeed, run_node
from framework.launch.node import main as be_a_node
from framework.launch.options import Request, parse
from framework.launch.plain import added_environment as added_environment  # for the preflight's modules
from framework.launch.plain import as_shell_line, find_train_script, local_command
from framework.launch.plain import usable_port as usable_port
from framework.launch.requests import Requests, write
from framework.launch.told import tell
from framework.launch.topology import Said, Topology, described, slots_here
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan


def launch(argv: Sequence[str]) -> int:
    """Check, say what is started, start it, and return the exit code of the run.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: the run cannot work here; nothing has been started.
    """
    if argv[:1] == ["node"]:
        return be_a_node(argv[1:])
    if argv[:1] == ["k8s"]:
        from framework.launch.k8s.command import main as print_manifests

        return print_manifests(argv[1:])
    if argv[:1] == ["slurm"]:
        from framework.launch.slurm import main as print_script

        return print_script(argv[1:])
    request = parse(argv)
    if request.hostfile is not None:
        from framework.launch.ssh import launch_over_ssh

        return launch_over_ssh(request)
    with Requests().heeding_signals() as requests:
        return _launch_here(request, requests)


def _launch_here(request: Request, requests: Requests) -> int:
    refuse_lone_start(os.environ, request)
    devices = find_devices(os.environ)
    ranks = check(request, devices)
    num_ranks = int(ranks.value)
    script, port = find_train_script(), usable_port(request.port)
    command = local_command(request.config, request.overrides, num_ranks=num_ranks, port=port,
                            chosen=devices.chosen, script=script, deepspeed_config=request.deepspeed_config)  # fmt: skip
    added = added_environment(os.environ, device=devices.kind, num_ranks=num_ranks)
    sources = {"slots": ranks.source, "master_port": "--master_port" if request.port else "a free one"}
    topology = Topology(1, num_ranks, 0, "127.0.0.1", port, sources)
    tell(topology, as_shell_line(command, added))
    if request.dry_run:
        return EXIT_OK
    require_deepspeed()
    os.environ.pop("DSF_TOKEN", None)  # no rank has it, and one node has nobody to show it to
    arguments = command[command.index(str(script)) + 1 :]
    return run_node(topology, script=script, arguments=arguments, devices=devices,
                    environment={**os.environ, **added}, facts={}, requests=requests,
                    terms=Terms(grace_seconds=grace_seconds(request.grace_seconds)))  # fmt: skip


def check(request: Request, devices: LocalDevices) -> Said:
    """Number of ranks and who decided it, after everything that can be known beforehand has been checked.

    Raises:
        ConfigError: with every problem found.
        UsageError: the number of ranks must be given.
    """
    config, source = load_with_source(request.config, request.overrides)
    for note in source.notes():
        write(sys.stderr, f"{note.severity}: {note}\n")
    if request.deepspeed_config is not None:
        config = with_deepspeed_config(config, request.deepspeed_config, source=source)
    ranks = _ranks(request, config, devices)
    num_ranks = int(ranks.value)
    make_plan(config, Cluster(devices_per_host=num_ranks, device=devices.kind), source=source)
    if devices.count and num_ranks > devices.count:
        # DeepSpeed would start them, and the surplus die with "invalid device ordinal".
        given = request.num_ranks is not None
        problem = Problem(
            kind="too-few-devices", key=ranks.source, value=num_ranks,
            file="command line" if given else "", reason=f"this machine has {devices.count} {devices.kind} devices for it",
            fix=f"at most {devices.count}, or DS_ACCELERATOR=cpu to try it on processors",
        )  # fmt: skip
        raise ConfigError(source.locate(problem))
    return ranks


def _ranks(request: Request, config: RunConfig, devices: LocalDevices) -> Said:
    """As many as the flag says, else the config, else the devices.

    Raises:
        UsageError: nobody can tell.
    """
    if request.num_ranks:
        return Said("slots", str(request.num_ranks), "--num_gpus")
    if config.run.world_size:
        return Said("slots", str(config.run.world_size), "run.world_size")
    here = slots_here(devices)
    if here is None:
        kind = os.environ.get("DS_ACCELERATOR")
        raise UsageError(f"launch: devices of kind {kind} are not counted; give --num_gpus N")
    return _fitting(here, config, devices) if request.fit_batch else here


def _fitting(here: Said, config: RunConfig, devices: LocalDevices) -> Said:
    """The most ranks that the run can be split over; all of them where it can over none, so that it is said why."""
    for count in range(int(here.value), 0, -1):
        with suppress(ConfigError):
            make_plan(config, Cluster(devices_per_host=count, device=devices.kind))
            if count == int(here.value):
                return here
            return Said("slots", str(count), f"of {here.value} {here.source}: the most that divide batch.global_size")
    return here


def refuse_lone_start(environment: Mapping[str, str], request: Request) -> None:
    """Several pods or tasks that each train alone would all end well, and none with the run that was meant.

    Raises:
        ConfigError: the environment describes several nodes.
    """
    several = [item for item in described(environment) if item.name == "nnodes" and item.value not in ("", "1")]
    if several and "LOCAL_RANK" not in environment and request.num_ranks is None:
        raise ConfigError(Problem(kind="several-nodes", file="environment", key=several[0].source, value=several[0].value,
                                  reason="this is one of several nodes, and would train alone",
                                  fix="start `launch node CONFIG`, or say --num_gpus N for this machine alone"))  # fmt: skip
