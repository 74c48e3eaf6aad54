"""One node of a job: ``python -m framework launch node CONFIG [...]``, and what `launch` does on
this machine alone.

environment, flags -> Topology -> checked plan -> meet the other agents -> run_attempt -> exit code,
one last line
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from framework.errors import (
    EXIT_NO_PROGRESS,
    EXIT_OK,
    ConfigError,
    FrameworkError,
    Problem,
    UsageError,
    counted,
    missing_package,
)
from framework.launch.deepspeed_command import (
    added_environment,
    find_train_script,
    node_command,
    usable_port,
)
from framework.launch.hosts.devices import LocalDevices, find_devices, unused_gpus, visible_variable
from framework.launch.hosts.hostfile import Host, is_loopback_name, read_hostfile
from framework.launch.hosts.topology import HostTopology, resolve_topology, slots_here
from framework.launch.job import print_line, refuse_too_few, show_settings, write_termination_log
from framework.launch.options import (
    GRACE_SECONDS,
    WAIT_SECONDS,
    NodeOptions,
    SharedOptions,
    parse_node,
    seconds,
)
from framework.launch.stop_requests import StopRequests, read_order
from framework.launch.supervision import JobEnd, Restarts, further_settings, in_place
from framework.load_run import LoadedRun, load_run
from framework.plan.cluster import Cluster
from framework.system.log import print_problem
from framework.system.ports import free_port

if TYPE_CHECKING:
    from framework.launch.ranks import Ranks
    from framework.launch.rendezvous.session import Session, Start

# All nodes are known to be there when ranks start, so a collective that takes as long is stuck
# (minutes).
_COLLECTIVE_MINUTES: Final = "10"
_LARGEST_TOKEN_BYTES: Final = 4096  # fits into a pipe
_LEAST_TOKEN_BYTES: Final = 16
_TOKEN_END: Final = "DSF_TOKEN_END"


Look = Callable[[], AbstractContextManager[Mapping[str, Any]]]


def main(argv: Sequence[str]) -> int:
    """Be one member of a job; returns its exit code. With a FrameworkError nothing has been
    started.
    """
    hide_token()
    # From here on: process 1 of a container never gets a signal that it does not handle, and would
    # train on.
    with StopRequests().handling_signals() as requests:
        try:
            return _main(argv, requests)
        except FrameworkError as error:
            write_termination_log(str(error))
            raise


def _main(argv: Sequence[str], requests: StopRequests) -> int:
    found = parse_node(argv)
    if found.from_stdin:
        os.environ.update(read_order(sys.stdin.buffer.fileno(), requests))
        requests.hold(sys.stdin.buffer.fileno())
    devices = find_devices(os.environ).only(found.devices)
    if found.hostfile:
        hosts = read_hostfile(found.hostfile)
    else:
        hosts = ()
    topology = _topology(found, devices, hosts)
    is_alone = topology.nnodes + found.spares == 1
    job = check_node(found, found.overrides, topology, devices)
    if (found.spares or found.min_nodes) and not job.config.supervision.max_restarts:
        raise UsageError(
            "launch node: --spares and --min_nodes are for restarts: set supervision.max_restarts"
        )
    if not found.from_stdin:  # who started it through ssh has told them, once for all hosts
        job.print_notes(is_supervised=True)
    unused = unused_gpus(devices, os.environ)
    if unused:
        print_problem(unused)
    script = find_train_script()
    added = added_environment(os.environ, device=devices.kind, num_ranks=topology.slots)
    if not is_alone and not os.environ.get("DEEPSPEED_TIMEOUT"):
        added["DEEPSPEED_TIMEOUT"] = _COLLECTIVE_MINUTES
    command = node_command(
        topology, job.arguments, script=script, devices=devices.chosen, hostfile=found.hostfile
    )
    if found.from_stdin and is_alone:
        print_line(f"ranks meet at port {topology.master_port}")  # which this host has found
    if found.dry_run or not found.from_stdin:
        show_settings(topology, command.as_line(added))
    if not is_alone:
        require_token(found)
    if found.dry_run:
        return EXIT_OK
    require_deepspeed()
    token = read_token(found.token_file)
    if not (token or is_alone):
        print_line(
            "no token: whoever reaches this port can end the job or take a place in it [no-token]"
        )
    environment = {**os.environ, **added}
    from framework.launch.rendezvous.handshake import node_facts

    # Who started it through ssh starts all again by himself.
    is_supervised = job.config.supervision.max_restarts and not found.from_stdin
    looks = not is_alone and not found.no_preflight
    return run_node(
        topology,
        [str(script), *job.arguments],
        devices=devices,
        environment=environment,
        requests=requests,
        grace_seconds=grace_seconds(found.grace_seconds),
        facts={} if is_alone else node_facts(job.config),
        look=_preflight(job, topology, devices, environment) if looks else None,
        names=[host.name for host in hosts],
        port=found.control_port or topology.master_port + 1,
        token=token,
        deadline_seconds=WAIT_SECONDS if found.wait_seconds is None else found.wait_seconds,
        spares=found.spares,
        restarts=Restarts(job.config) if is_supervised else None,
        fits=partial(fits, found, job.overrides, topology, devices),
    ).code


def _topology(found: NodeOptions, devices: LocalDevices, hosts: Sequence[Host]) -> HostTopology:
    flags = {
        name: getattr(found, name) for name in ("nnodes", "node_rank", "master_addr", "master_port")
    }
    flags["slots"], spelled = (
        found.num_gpus,
        {"nnodes": found.nnodes_flag, "slots": found.num_gpus_flag},
    )
    topology = resolve_topology(
        flags, os.environ, hosts=hosts, default_slots=slots_here(devices), spelled=spelled
    )
    # Where a port was given, a job that is still ending may hold it: rank 0 says so, with a code
    # that platforms retry.
    if topology.nnodes == 1 and topology.sources["master_port"] == "default":
        sources = {**topology.sources, "master_port": "a free one"}
        topology = replace(topology, master_port=free_port(), sources=sources)
    return _without_spares(topology, spares=found.spares, min_nodes=found.min_nodes)


def fits(
    asked: SharedOptions,
    words: Sequence[str],
    topology: HostTopology,
    devices: LocalDevices,
    count: int,
) -> bool:
    """Check whether the job may go on with so many nodes, and can, with these settings."""
    if count < (asked.min_nodes or topology.nnodes):
        return False
    with suppress(ConfigError):
        check_node(asked, words, replace(topology, nnodes=count), devices)
        return True
    return False


def _without_spares(topology: HostTopology, *, spares: int, min_nodes: int | None) -> HostTopology:
    """The nodes that train, as this node sees them; a UsageError where none would be left."""
    trained = topology.nnodes - spares
    if trained < 1:
        raise UsageError(
            f"launch node: --spares {spares}: of {counted(topology.nnodes, 'node')} none would "
            "train"
        )
    if min_nodes is not None and min_nodes > trained:
        raise UsageError(
            f"launch node: --min_nodes {min_nodes}: {counted(trained, 'node')} would train"
        )
    if not spares:
        return topology
    if topology.node_rank >= trained:
        print_line(
            f"node {topology.node_rank} is a spare: it waits for the place of one that is lost"
        )
    sources = {
        **topology.sources,
        "nnodes": f"{topology.sources.get('nnodes', 'given')}, less {counted(spares, 'spare')}",
    }
    return replace(topology, nnodes=trained, sources=sources)


def check_node(
    asked: SharedOptions, words: Sequence[str], topology: HostTopology, devices: LocalDevices
) -> LoadedRun:
    """The job, after everything that one node can know beforehand has been checked: a ConfigError
    has every problem.
    """
    job = load_run(asked.config, words, deepspeed_config=asked.deepspeed_config)
    # A node that alone refuses lets the others wait: what it lacks, its ranks tell all.
    cluster = Cluster(topology.nnodes, topology.slots, devices.kind)
    if devices.kind == "unknown" and job.config.auto:
        return job  # each host chooses by its own devices, and compares
    job = job.started(cluster)
    job.plan_with_data(cluster, data_elsewhere=topology.nnodes > 1)
    refuse_too_few(
        job,
        devices,
        num_ranks=topology.slots,
        stated_by=topology.sources["slots"],
        where=" on every node",
    )
    return job


def run_node(
    topology: HostTopology,
    command: Sequence[str],
    *,
    devices: LocalDevices,
    environment: Mapping[str, str],
    requests: StopRequests,
    grace_seconds: float,
    facts: Mapping[str, str] | None = None,
    look: Look | None = None,
    **terms: Any,
) -> JobEnd:
    """Meet the other nodes, run a script on every rank, and again as long as node 0 says so; say
    how it ended.

    Args:
        command: the script, and its arguments.
        requests: to stop, since this process began; its signals are heeded.
        facts: what has to be the same on every node.
        look: this node's look at itself, for the time that they need to meet.
        terms: further attributes of its `Session`.

    Raises:
        ConfigError, PeerLostError, RunStopped: no rank was started.
    """
    # with what stands on it, for starts alone: a check and a dry run need none of it
    import asyncio

    from framework.launch.rendezvous.channel import PROTOCOL
    from framework.launch.rendezvous.handshake import hosts_text, machine_mark
    from framework.launch.rendezvous.session import Session

    hello = {
        name: getattr(topology, name) for name in ("node_rank", "nnodes", "slots", "master_port")
    } | {
        "protocol": PROTOCOL,
        "job": environment.get("DSF_JOB_ID", ""),
        "spares": terms.get("spares", 0),
        "host": socket.gethostname(),
        "machine": "" if is_loopback_name(topology.master_addr) else machine_mark(),
        "hosts": hosts_text(terms.get("names", ())),
        "clock": time.time(),
        "facts": dict(facts or {}),
    }
    session = Session(
        topology, hello, requests, problems=partial(_port_problems, topology), **terms
    )

    def ranks(start: Start) -> Ranks:
        from framework.launch.ranks import Ranks  # psutil comes with the train extra only
        from framework.launch.rendezvous.connectivity import interface_of

        own = environment
        place = start.topology
        if place.nnodes > 1:
            started = f"starting {place.slots} ranks of {place.world_size}"
            print_line(f"all {place.nnodes} nodes are here and agree; {started}")
            # gloo takes the address that the own name resolves to, often loopback; NCCL finds its
            # interfaces better alone.
            if not own.get("GLOO_SOCKET_IFNAME") and (name := interface_of(session.local_address)):
                own = {**own, "GLOO_SOCKET_IFNAME": name}
        # Nothing that another node sends is a setting: it says whether to go on, and the setting is
        # ours.
        words = [command[0], *in_place(command[1:], further_settings(resumes=start.resumes))]
        return Ranks(words, place, own, device=devices.kind, devices=devices.chosen)

    return asyncio.run(_run(session, ranks, look=look, grace_seconds=grace_seconds))


async def _run(
    session: Session, ranks: Callable[[Start], Ranks], *, look: Look | None, grace_seconds: float
) -> JobEnd:
    import asyncio

    from framework.launch.agent import run_attempt
    from framework.launch.rendezvous.join import join
    from framework.launch.rendezvous.session import JobOver

    with ExitStack() as stack:
        if look is not None:
            session.hello = {**session.hello, "look": stack.enter_context(look())}
        job = await join(session)
        try:
            while True:
                try:
                    start = await job.begin()
                except JobOver as over:
                    print_line(str(over))
                    return JobEnd(over.code, str(over))
                await asyncio.to_thread(stack.close)  # the marks of this node's look at itself
                started = ranks(start)
                code, line, cause = await run_attempt(
                    started, start.peers, session.requests, grace_seconds=grace_seconds
                )
                print_line(line)
                write_termination_log(line)
                # nothing may start beside it; the others find this node lost
                if started.not_killed:
                    return JobEnd(code, line)
                decision = await job.decide_restart(JobEnd(cause, line))
                if not decision.is_again:
                    gave_up = decision.code == EXIT_NO_PROGRESS
                    return JobEnd(decision.code if gave_up else code, line)
        finally:
            await job.close()


def _port_problems(topology: HostTopology) -> Sequence[Problem]:
    """On node 0: the others would wait for ranks that cannot listen."""
    if topology.node_rank == 0 and topology.nnodes > 1:
        try:
            usable_port(topology.master_port)
        except ConfigError as error:
            fix = "give all nodes another --master_port"
            return [
                replace(problem, file=f"node 0 ({socket.gethostname()})", fix=fix)
                for problem in error.problems
            ]
    return ()


def _preflight(
    job: LoadedRun, topology: HostTopology, devices: LocalDevices, environment: Mapping[str, str]
) -> Look:
    from framework.doctor.node.start import look_before_start

    if devices.chosen is None:
        chosen = {}
    else:
        chosen = {visible_variable(devices.kind): ",".join(map(str, devices.chosen))}
    cluster = Cluster(topology.nnodes, topology.slots, devices.kind)
    return partial(
        look_before_start, job.config, cluster, {**environment, **chosen}, rank=topology.node_rank
    )


def require_deepspeed() -> None:
    """Refuse what cannot train: a ConfigError where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise missing_package("deepspeed", what="training")


def grace_seconds(given: float | None) -> float:
    """The flag, DSF_GRACE_SECONDS, or the default; a UsageError where the variable is no number of
    seconds.
    """
    text = os.environ.get("DSF_GRACE_SECONDS", "")
    if given is not None or not text:
        return GRACE_SECONDS if given is None else given
    try:
        return seconds(text)
    except ArgumentTypeError as error:
        raise UsageError(f"environment variable DSF_GRACE_SECONDS: {error}") from None


def hide_token() -> None:
    """Begin again without DSF_TOKEN, if that is set: ranks, and `ps`, see what a process was
    started with. The token goes to the new program, which is this one, through a pipe.
    """
    token = os.environ.pop("DSF_TOKEN", "")
    if token:
        read_end, write_end = os.pipe()
        os.write(write_end, token.encode("utf-8", "surrogateescape")[:_LARGEST_TOKEN_BYTES])
        os.close(write_end)
        os.set_inheritable(read_end, True)
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            {**os.environ, _TOKEN_END: str(read_end)},
        )


def require_token(options: NodeOptions) -> None:
    """Refuse a job of several nodes that shares no secret, unless that is asked for; a
    ConfigError.
    """
    has_token = bool(
        options.token_file or os.environ.get("DSF_TOKEN") or os.environ.get(_TOKEN_END)
    )
    if has_token and options.no_token:
        raise UsageError("launch node: --no_token, and a token is given; leave one of them out")
    if not has_token and not options.no_token:
        raise ConfigError.of(
            "no-token",
            "several nodes need a secret in common: whoever answers at node 0's port would be "
            "taken for node 0",
            "give every node --token_file FILE with the same secret (head -c 32 /dev/urandom | "
            "base64 > FILE), or --no_token where all who reach this port may take part",
            key="--token_file",
            file="command line",
        )


def read_token(path: str | None) -> str:
    """The shared secret: of the file, of what `hide_token` has put aside, or of an ssh launcher; a
    ConfigError where it cannot be read or could be guessed.
    """
    token = os.environ.pop("DSF_TOKEN", "")
    number = os.environ.pop(_TOKEN_END, "")
    if number.isdecimal():
        with suppress(OSError), os.fdopen(int(number), "rb") as end:
            token = end.read().decode("utf-8", "surrogateescape")
    place = "environment variable DSF_TOKEN"
    if path is not None:
        token = ""
        reason = "it is empty"
        place = path
        try:
            token = Path(path).read_bytes()[:_LARGEST_TOKEN_BYTES].decode("utf-8").strip()
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or "it is not text")
        if not token:
            raise ConfigError.of(
                "token-unreadable", reason, "name a file that holds the secret", file=path
            )
    if token and len(token.encode("utf-8", "surrogateescape")) < _LEAST_TOKEN_BYTES:
        reason = f"it has fewer than {_LEAST_TOKEN_BYTES} bytes, and could be guessed"
        fix = "make one with: head -c 32 /dev/urandom | base64"
        raise ConfigError.of("token-too-short", reason, fix, file=place)
    return token
