"""Start of a run on this machine, by ``dsf train CONFIG [key=value ...]``.

The `deepspeed` command that it prints, pasted into a shell, trains the same run. A machine that
would be one of several nodes is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from framework.errors import EXIT_OK, ConfigError, UsageError
from framework.hosts.cores import bind_ranks
from framework.hosts.devices import LocalDevices, find_devices, unused_gpus
from framework.hosts.hostfile import ChosenHost, is_this_machine
from framework.hosts.rank_environment import added_environment
from framework.hosts.topology import HostTopology, Setting, read_settings, slots_here
from framework.launch.deepspeed_command import (
    as_shell_line,
    find_train_script,
    local_command,
    usable_port,
)
from framework.launch.job import refuse_too_few, show_settings
from framework.launch.node import grace_seconds, read_token, require_deepspeed, run_node
from framework.launch.options import LaunchOptions, parse
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import Restarts
from framework.load_run import LoadedRun, load_run
from framework.plan.cluster import Cluster
from framework.system.log import print_problem
from framework.system.mpi_launchers import launched_rank
from framework.system.output import write


def launch(argv: Sequence[str]) -> int:
    """Check the run, print what is started, start it, and return its exit code.

    After a UsageError or ConfigError nothing has been started.
    """
    return _launched(parse(argv))


def train(argv: Sequence[str]) -> int:
    """Do the same under the name that most users know."""
    return _launched(parse(argv, command="train"))


def _launched(options: LaunchOptions) -> int:
    alone = None
    if options.hostfile is not None:
        alone = _alone_in_hostfile(options)
        if alone is None:
            from framework.launch.ssh import launch_over_ssh

            return launch_over_ssh(options)
    with StopRequests().handling_signals() as requests:
        return _launch_here(options, requests, alone=alone)


def _alone_in_hostfile(options: LaunchOptions) -> ChosenHost | None:
    """Return this machine with its devices if the hostfile leaves no other host, else None.

    Then ssh is not needed.
    """
    if options.remote_python or options.remote_folder:
        return None
    chosen = options.choose_hosts()
    if is_this_machine(chosen, ssh_args=options.ssh_args):
        return chosen[0]
    return None


def _launch_here(
    options: LaunchOptions, requests: StopRequests, *, alone: ChosenHost | None = None
) -> int:
    """Check, print and start the run here; `alone`: this host, as a hostfile has it."""
    devices = find_devices(os.environ)
    sources: dict[str, str] = {}
    if alone is not None:
        sources = options.sources
        options = replace(options, num_gpus=len(alone.devices), num_gpus_flag=sources["slots"])
        sources["nnodes"] += ": this machine, without ssh"
        # Numbers of a user's choice are numbers of the machine, even if the environment does not
        # leave these devices visible.
        is_named = options.include or options.exclude or not alone.is_first
        devices = devices.only(alone.devices if is_named else None)
        from framework.launch.ssh import passed_on

        # A variable that is not set, or a missing token file, is a mistake, although neither is
        # needed here.
        passed_on(os.environ, exports=options.exports)
        read_token(options.token_file)
    refuse_lone_start(os.environ, options)
    job, ranks = check(options, devices)
    unused = unused_gpus(devices, os.environ)
    if unused:
        print_problem(unused)
    num_ranks = int(ranks.value)
    address = options.master_addr
    script = find_train_script()
    port = usable_port(options.master_port)
    command = local_command(
        job.arguments,
        num_ranks=num_ranks,
        address=address,
        port=port,
        chosen=devices.chosen,
        script=script,
    )
    binding = bind_ranks(options.bind_cores, devices, num_ranks)
    added = added_environment(
        os.environ, device=devices.kind, num_ranks=num_ranks, threads=binding.threads()
    )
    sources["slots"] = ranks.source
    sources["master_port"] = "--master_port" if options.master_port else "a free one"
    if options.master_addr:
        sources["master_addr"] = "--master_addr"
    topology = HostTopology(1, num_ranks, 0, address or "127.0.0.1", port, sources)
    show_settings(topology, as_shell_line(command, added))
    if options.dry_run:
        return EXIT_OK
    require_deepspeed()
    if not options.no_preflight:
        cluster = Cluster(devices_per_host=num_ranks, device=devices.kind)
        _look_at_ops(job, cluster, {**os.environ, **added})
    os.environ.pop("DSF_TOKEN", None)  # ranks do not get it, and a single node does not need it
    return run_node(
        topology,
        [str(script), *job.arguments],
        devices=devices,
        binding=binding,
        environment={**os.environ, **added},
        requests=requests,
        grace_seconds=grace_seconds(options.grace_seconds),
        restarts=Restarts(job.config),
    ).code


def _look_at_ops(job: LoadedRun, cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Announce the ops that the first rank will compile, which may look like a hang.

    Raises:
        ConfigError: an op cannot be compiled here.
    """
    from framework.doctor.node.requirements import requirements_of
    from framework.doctor.node.software import check_ops, ops_to_compile

    requirements = requirements_of(job.plan(cluster))
    problems = check_ops(requirements, environment).problems
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    names = ops_to_compile(requirements, environment)
    if names:
        listed = ", ".join(names)
        write(
            sys.stderr,
            f"compiling DeepSpeed's {listed}: half a minute or more each, once on this machine\n",
        )


def check(options: LaunchOptions, devices: LocalDevices) -> tuple[LoadedRun, Setting]:
    """Load the job, print its notes, and do all checks that are possible beforehand.

    Returns:
        The job, and its number of ranks with the source of that number.

    Raises:
        ConfigError: every problem that was found.
        UsageError: the number of ranks must be given.
    """
    job = load_run(options.config, options.overrides, deepspeed_config=options.deepspeed_config)
    job.print_notes(is_supervised=True)
    ranks = _ranks(options, job, devices)
    num_ranks = int(ranks.value)
    cluster = Cluster(devices_per_host=num_ranks, device=devices.kind)
    job = job.started(cluster)
    job.plan_with_data(cluster, data_elsewhere=options.dry_run)
    refuse_too_few(job, devices, num_ranks=num_ranks, source=ranks.source)
    return job, ranks


def _ranks(options: LaunchOptions, job: LoadedRun, devices: LocalDevices) -> Setting:
    """Return the number of ranks of the flag, else of the config, else of the devices.

    Raises:
        UsageError: none of them has it.
    """
    if options.num_gpus:
        return Setting("slots", str(options.num_gpus), options.num_gpus_flag)
    if job.config.run.world_size:
        return Setting("slots", str(job.config.run.world_size), "run.world_size")
    here = slots_here(devices)
    if here is None:
        kind = os.environ.get("DS_ACCELERATOR") or devices.kind
        if options.fit_batch:
            how = "start dsf train CONFIG --num_gpus N"
        else:
            how = "give --num_gpus N"
        raise UsageError(
            f"launch: devices of kind {kind} are not counted; {how}, or set DS_ACCELERATOR=cpu"
        )
    if options.fit_batch:
        return _fitting(here, job, devices)
    return here


def _fitting(here: Setting, job: LoadedRun, devices: LocalDevices) -> Setting:
    """Return the largest number of ranks that the run can be split over.

    If there is no such number, it is the number of devices, for which the plan has the reason.
    """
    for count in range(int(here.value), 0, -1):
        cluster = Cluster(devices_per_host=count, device=devices.kind)
        try:
            job.chosen(cluster).plan(cluster)
        except ConfigError:
            continue
        if count == int(here.value):
            return here
        source = f"of {here.value} {here.source}: the most that divide batch.global_size"
        return Setting("slots", str(count), source)
    return here


def _refuse_one_of_several_nodes(environment: Mapping[str, str]) -> None:
    for item in read_settings(environment):
        if item.name == "nnodes" and item.value not in ("", "1"):
            reason = "this is one of several nodes, and would train alone"
            fix = "start `launch node CONFIG`, or say --num_gpus N for this machine alone"
            raise ConfigError.of(
                "several-nodes",
                reason,
                fix,
                key=item.source,
                value=item.value,
                file="environment",
            )


def refuse_lone_start(environment: Mapping[str, str], options: LaunchOptions) -> None:
    """Raise a ConfigError if the environment describes several nodes, or several tasks of this one.

    Each of them would train alone and end well.
    """
    if "LOCAL_RANK" in environment:
        return
    if options.num_gpus is None:
        _refuse_one_of_several_nodes(environment)
    task = launched_rank(environment)
    if task is not None and task.values.get("LOCAL_WORLD_SIZE", task.size) > 1:
        reason = (
            f"this is one of {task.size} processes that {task.launcher} started, and each "
            "would start all ranks"
        )
        fix = f"let {task.launcher} start `train.py --config CONFIG`, or one process"
        variable = task.sources["WORLD_SIZE"]
        raise ConfigError.of(
            "several-nodes", reason, fix, key=variable, value=task.size, file="environment"
        )
