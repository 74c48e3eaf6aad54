"""One node of a job: ``python -m framework launch node CONFIG [...]``, and what `launch` does on this machine alone.

environment, flags -> Topology -> checked plan -> meet the other agents -> run_attempt -> exit code, one last line
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from framework.errors import EXIT_OK, ConfigError, FrameworkError, Problem, UsageError, missing_package
from framework.launch.deepspeed_command import added_environment, find_train_script, node_command, usable_port
from framework.launch.hosts.devices import LocalDevices, find_devices, unused_gpus, visible_variable
from framework.launch.hosts.hostfile import Host, read_hostfile
from framework.launch.hosts.topology import Topology, resolve_topology, slots_here
from framework.launch.job import print_line, refuse_too_few, show_settings, write_termination_log
from framework.launch.options import GRACE_SECONDS, WAIT_SECONDS, parse_node, seconds
from framework.launch.rendezvous.messages import PROTOCOL
from framework.launch.rendezvous.session import Session
from framework.launch.stop_requests import StopRequests, read_order
from framework.launch.supervision import JobEnd
from framework.load_run import LoadedRun, load_run
from framework.plan.cluster import Cluster
from framework.system.log import print_problem
from framework.system.ports import free_port

# All nodes are known to be there when ranks start, so a collective that takes as long is stuck (minutes).
_COLLECTIVE_MINUTES: Final = "10"
_LARGEST_TOKEN_BYTES: Final = 4096


Look = Callable[[], AbstractContextManager[Mapping[str, Any]]]


@dataclass(frozen=True)
class NodeOptions:
    """How nodes meet and end; `look`: this node's look at itself, for the time that they need to meet."""

    grace_seconds: float = GRACE_SECONDS
    wait_seconds: float = WAIT_SECONDS
    control_port: int = 0
    token: str = ""
    job_id: str = ""
    hosts: tuple[Host, ...] = ()
    look: Look | None = None


def main(argv: Sequence[str]) -> int:
    """Be one member of a job; returns its exit code.

    Raises:
        FrameworkError: nothing has been started.
    """
    # From here on: process 1 of a container never gets a signal that it does not handle, and would train on.
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
    hosts = read_hostfile(found.hostfile) if found.hostfile else ()
    flags = {name: getattr(found, name) for name in ("nnodes", "node_rank", "master_addr", "master_port")}
    flags["slots"], spelled = found.num_gpus, {"nnodes": found.nnodes_flag, "slots": found.num_gpus_flag}
    topology = resolve_topology(flags, os.environ, hosts=hosts, default_slots=slots_here(devices), spelled=spelled)
    # Where a port was given, a job that is still ending may hold it: rank 0 says so, with a code that platforms retry.
    if topology.nnodes == 1 and topology.sources["master_port"] == "default":
        sources = {**topology.sources, "master_port": "a free one"}
        topology = replace(topology, master_port=free_port(), sources=sources)
    job = check_node(found.config, found.words, topology, devices, deepspeed_config=found.deepspeed_config)
    if not found.from_stdin:  # who started it through ssh has told them, once for all hosts
        job.print_notes()
    if unused := unused_gpus(devices, os.environ):
        print_problem(unused)
    script = find_train_script()
    added = added_environment(os.environ, device=devices.kind, num_ranks=topology.slots)
    if topology.nnodes > 1 and not os.environ.get("DEEPSPEED_TIMEOUT"):
        added["DEEPSPEED_TIMEOUT"] = _COLLECTIVE_MINUTES
    command = node_command(topology, job.arguments, script=script, devices=devices.chosen, hostfile=found.hostfile)
    if found.from_stdin and topology.nnodes == 1:
        print_line(f"ranks meet at port {topology.master_port}")  # which this host has found
    if found.dry_run or not found.from_stdin:
        show_settings(topology, command.as_line(added))
    if found.dry_run:
        return EXIT_OK
    require_deepspeed()
    token = read_token(found.token_file)
    environment = {**os.environ, **added}
    from framework.launch.rendezvous.handshake import node_facts

    looks = topology.nnodes > 1 and not found.no_preflight
    terms = NodeOptions(
        grace_seconds=grace_seconds(found.grace_seconds),
        wait_seconds=found.wait_seconds,
        control_port=found.control_port or topology.master_port + 1,
        token=token,
        job_id=os.environ.get("DSF_JOB_ID", ""),
        hosts=hosts,
        look=_preflight(job, topology, devices, environment) if looks else None,
    )

    return run_node(
        topology,
        [str(script), *job.arguments],
        devices=devices,
        environment=environment,
        terms=terms,
        facts=node_facts(job.config) if topology.nnodes > 1 else {},
        requests=requests,
    ).code


def check_node(
    config_path: str,
    overrides: Sequence[str],
    topology: Topology,
    devices: LocalDevices,
    *,
    deepspeed_config: str | None = None,
) -> LoadedRun:
    """The job, after everything that one node can know beforehand has been checked: a ConfigError has every problem."""
    job = load_run(config_path, overrides, deepspeed_config=deepspeed_config)
    # A node that alone refuses lets the others wait: what it lacks, its ranks tell all.
    cluster = Cluster(topology.nnodes, topology.slots, devices.kind)
    if devices.kind == "unknown" and job.config.auto:
        return job  # each host chooses by its own devices, and compares
    job = job.started(cluster)
    job.plan_with_data(cluster, data_elsewhere=topology.nnodes > 1)
    refuse_too_few(job, devices, num_ranks=topology.slots, stated_by=topology.sources["slots"], where=" on every node")
    return job


def run_node(
    topology: Topology,
    command: Sequence[str],
    *,
    devices: LocalDevices,
    environment: Mapping[str, str],
    requests: StopRequests,
    terms: NodeOptions,
    facts: Mapping[str, str] | None = None,
) -> JobEnd:
    """Meet the other nodes, run a script on every rank, and say how it ended.

    Args:
        command: the script, and its arguments.
        facts: what has to be the same on every node.
        requests: to stop, since this process began; its signals are heeded.

    Raises:
        ConfigError, PeerLostError, RunStopped: no rank was started.
    """
    from framework.launch.agent import run_attempt  # psutil comes with the train extra only
    from framework.launch.ranks import Ranks
    from framework.launch.rendezvous.connectivity import interface_of
    from framework.launch.rendezvous.handshake import hosts_text
    from framework.launch.rendezvous.member import meet

    names = [host.name for host in terms.hosts]
    hello = {
        "protocol": PROTOCOL,
        "job": terms.job_id,
        "attempt": 0,
        "node_rank": topology.node_rank,
        "nnodes": topology.nnodes,
        "slots": topology.slots,
        "master_port": topology.master_port,
        "host": socket.gethostname(),
        "hosts": hosts_text(names),
        "clock": time.time(),
        "facts": dict(facts or {}),
    }
    meeting = Session(topology, terms.control_port, hello, requests, terms.token, terms.wait_seconds, names)
    meeting.problems = _port_problems(topology)
    with ExitStack() as stack:
        if terms.look is not None:
            meeting.hello = {**meeting.hello, "look": stack.enter_context(terms.look())}
        peers = meet(meeting)
    if topology.nnodes > 1:
        started = f"starting {topology.slots} ranks of {topology.world_size}"
        print_line(f"all {topology.nnodes} nodes are here and agree; {started}")
        # gloo takes the address that the own name resolves to, often loopback; NCCL finds its interfaces better alone.
        if not environment.get("GLOO_SOCKET_IFNAME") and (name := interface_of(meeting.local_address)):
            environment = {**environment, "GLOO_SOCKET_IFNAME": name}
    else:
        requests.refuse_start()  # several heed requests while they meet, and tell each other of those that come after
    ranks = Ranks(command, topology, environment, device=devices.kind, devices=devices.chosen)
    code, line = run_attempt(ranks, peers, requests, node_rank=topology.node_rank, grace_seconds=terms.grace_seconds)
    print_line(line)
    write_termination_log(line)
    return JobEnd(code, line)


def _port_problems(topology: Topology) -> Sequence[Problem]:
    """On node 0: the others would wait for ranks that cannot listen."""
    if topology.node_rank == 0 and topology.nnodes > 1:
        try:
            usable_port(topology.master_port)
        except ConfigError as error:
            fix = "give all nodes another --master_port"
            return [replace(problem, file=f"node 0 ({socket.gethostname()})", fix=fix) for problem in error.problems]
    return ()


def _preflight(job: LoadedRun, topology: Topology, devices: LocalDevices, environment: Mapping[str, str]) -> Look:
    from framework.doctor.node.start import look_before_start

    chosen = {} if devices.chosen is None else {visible_variable(devices.kind): ",".join(map(str, devices.chosen))}
    cluster = Cluster(topology.nnodes, topology.slots, devices.kind)
    return partial(look_before_start, job.config, cluster, {**environment, **chosen}, rank=topology.node_rank)


def require_deepspeed() -> None:
    """Refuse what cannot train: a ConfigError where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise missing_package("deepspeed", what="training")


def grace_seconds(given: float | None) -> float:
    """The flag, DSF_GRACE_SECONDS, or the default; a UsageError where the variable is no number of seconds."""
    text = os.environ.get("DSF_GRACE_SECONDS", "")
    if given is not None or not text:
        return GRACE_SECONDS if given is None else given
    try:
        return seconds(text)
    except ArgumentTypeError as error:
        raise UsageError(f"environment variable DSF_GRACE_SECONDS: {error}") from None


def read_token(path: str | None) -> str:
    """The shared secret: of the file, or of DSF_TOKEN; it leaves the environment, so that no rank has it.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    token = os.environ.pop("DSF_TOKEN", "")
    if path is None:
        return token
    text, reason = "", "it is empty"
    try:
        text = Path(path).read_bytes()[:_LARGEST_TOKEN_BYTES].decode("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or "it is not text")
    if not text:
        raise ConfigError.of("token-unreadable", reason, "name a file that holds the secret", file=path)
    return text
