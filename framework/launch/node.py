"""One node of a job: ``dsf launch node CONFIG [...]``, or `launch` on one machine.

environment, flags -> HostTopology -> checked plan -> meet the other agents -> run_attempt -> exit
code, one last line
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

from framework.config.run_config import RunConfig
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
from framework.hosts.cores import NOT_BOUND, Binding, bind_ranks
from framework.hosts.devices import LocalDevices, find_devices, unused_gpus, visible_variable
from framework.hosts.hostfile import Host, is_loopback_name, read_hostfile
from framework.hosts.rank_environment import added_environment
from framework.hosts.topology import HostTopology, resolve_topology, slots_here
from framework.launch.deepspeed_command import (
    find_train_script,
    node_command,
    usable_port,
)
from framework.launch.job import print_line, refuse_too_few, show_settings, write_termination_log
from framework.launch.options import (
    GRACE_SECONDS,
    WAIT_SECONDS,
    NodeOptions,
    SharedOptions,
    parse_node,
    seconds,
)
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import (
    HOST_LOST,
    JobEnd,
    Restarts,
    further_settings,
    in_place,
)
from framework.load_run import LoadedRun, load_run
from framework.plan.cluster import Cluster
from framework.system.log import print_problem
from framework.system.ports import free_port

if TYPE_CHECKING:
    from framework.launch.ranks import Ranks
    from framework.launch.rendezvous.session import Session, Start

# All nodes are known to be there when ranks start, so a collective that takes longer is stuck.
_COLLECTIVE_MINUTES: Final = "10"
_LARGEST_TOKEN_BYTES: Final = 4096  # fits into a pipe
_LEAST_TOKEN_BYTES: Final = 16
_TOKEN_END: Final = "DSF_TOKEN_END"  # number of the descriptor from which `read_token` reads


Look = Callable[[], AbstractContextManager[Mapping[str, Any]]]
"""The preflight of this node; its facts hold inside the context."""


def main(argv: Sequence[str]) -> int:
    """Run one node of a job, and return its exit code.

    After a FrameworkError nothing has been started.
    """
    hide_token()
    # Signals are handled from the beginning: process 1 of a container gets no signal that it does
    # not handle, and would train on.
    with StopRequests().handling_signals() as requests:
        try:
            return _main(argv, requests)
        except FrameworkError as error:
            write_termination_log(str(error))
            raise


def _main(argv: Sequence[str], requests: StopRequests) -> int:
    """Check this node's part of the job, print it, and start it unless it is a dry run."""
    options = parse_node(argv)
    state: Mapping[str, Any] = {}
    if options.from_stdin:
        requests.hold(sys.stdin.buffer.fileno())
        order = requests.read_order()
        os.environ.update(order.environment)
        state = order.restarts
    devices = find_devices(os.environ).only(options.devices)
    if options.hostfile:
        hosts = read_hostfile(options.hostfile)
    else:
        hosts = ()
    topology = _topology(options, devices, hosts)
    is_alone = topology.nnodes + options.spares == 1
    job = check_node(options, options.overrides, topology, devices)
    refuse_idle_restarts(options, job.config, command="launch node")
    if not options.from_stdin:  # `launch -H` has printed them, once for all hosts
        job.print_notes(is_supervised=True)
    unused = unused_gpus(devices, os.environ)
    if unused:
        print_problem(unused)
    script = find_train_script()
    binding = bind_ranks(options.bind_cores, devices, topology.slots)
    added = added_environment(
        os.environ, device=devices.kind, num_ranks=topology.slots, threads=binding.threads()
    )
    if not is_alone and not os.environ.get("DEEPSPEED_TIMEOUT"):
        added["DEEPSPEED_TIMEOUT"] = _COLLECTIVE_MINUTES
    command = node_command(
        topology, job.arguments, script=script, devices=devices.chosen, hostfile=options.hostfile
    )
    if options.from_stdin and is_alone:
        print_line(f"ranks meet at port {topology.master_port}")  # this host has chosen it
    if options.dry_run or not options.from_stdin:
        show_settings(topology, command.as_line(added))
    if not is_alone:
        require_token(options)
    if options.dry_run:
        return EXIT_OK
    return _start(
        options,
        job,
        topology,
        devices,
        script=script,
        binding=binding,
        added=added,
        names=[host.name for host in hosts],
        requests=requests,
        state=state,
    )


def _start(
    options: NodeOptions,
    job: LoadedRun,
    topology: HostTopology,
    devices: LocalDevices,
    *,
    script: Path,
    binding: Binding,
    added: Mapping[str, str],
    names: Sequence[str],
    requests: StopRequests,
    state: Mapping[str, Any],
) -> int:
    """Take part in a job that has been checked, and return its exit code.

    Args:
        script: train.py.
        binding: cores of the ranks.
        added: further environment variables of the ranks.
        names: of the hosts, if there is a hostfile.
        requests: to stop.
        state: of the restarts, from a launcher that has lost this host before.
    """
    from framework.launch.rendezvous.handshake import node_facts

    require_deepspeed()
    is_alone = topology.nnodes + options.spares == 1
    token = read_token(options.token_file)
    if not (token or is_alone):
        print_line(
            "no token: any program that reaches this port can end the job or take a place in it "
            "[no-token]"
        )
    environment = {**os.environ, **added}  # without the token, which `read_token` has removed
    save_seconds = grace_seconds(options.grace_seconds)
    facts: Mapping[str, str] = {}
    look = None
    if not is_alone:
        facts = node_facts(job.config)
        if not options.no_preflight:
            look = _preflight(job, topology, devices, environment)
    restarts = None
    if job.config.supervision.max_restarts:
        restarts = Restarts(job.config)
        restarts.restore(state)
    end = run_node(
        topology,
        [str(script), *job.arguments],
        devices=devices,
        binding=binding,
        environment=environment,
        requests=requests,
        grace_seconds=save_seconds,
        facts=facts,
        look=look,
        names=names,
        port=options.control_port or topology.master_port + 1,
        token=token,
        deadline_seconds=WAIT_SECONDS if options.wait_seconds is None else options.wait_seconds,
        spares=options.spares,
        restarts=restarts,
        fits=partial(fits, options, job.overrides, topology, devices),
    )
    if end.has_left and options.from_stdin:
        return HOST_LOST
    return end.code


def _topology(options: NodeOptions, devices: LocalDevices, hosts: Sequence[Host]) -> HostTopology:
    """Return the topology of the nodes that train, without spares."""
    flags = {
        "nnodes": options.nnodes,
        "node_rank": options.node_rank,
        "master_addr": options.master_addr,
        "master_port": options.master_port,
        "slots": options.num_gpus,
    }
    spelled = {"nnodes": options.nnodes_flag, "slots": options.num_gpus_flag}
    topology = resolve_topology(
        flags, os.environ, hosts=hosts, default_slots=slots_here(devices), spelled=spelled
    )
    # A port that was given stays, even if a job that is still ending holds it: rank 0 then fails
    # with an exit code that platforms retry.
    if topology.nnodes == 1 and topology.sources["master_port"] == "default":
        sources = {**topology.sources, "master_port": "a free one"}
        topology = replace(topology, master_port=free_port(), sources=sources)
    return _without_spares(topology, spares=options.spares, min_nodes=options.min_nodes)


def refuse_idle_restarts(options: SharedOptions, config: RunConfig, *, command: str) -> None:
    """Raise a UsageError for options of restarts in a job that never starts again."""
    spares = getattr(options, "spares", 0)
    if (spares or options.min_nodes) and not config.supervision.max_restarts:
        raise UsageError(
            f"{command}: --spares and --min_nodes are for restarts: set supervision.max_restarts"
        )


def fits(
    options: SharedOptions,
    words: Sequence[str],
    topology: HostTopology,
    devices: LocalDevices,
    count: int,
) -> bool:
    """Check whether the job may go on with `count` nodes, and can; `words`: settings of the run."""
    if count < (options.min_nodes or topology.nnodes):
        return False
    try:
        check_node(options, words, replace(topology, nnodes=count), devices)
    except ConfigError:
        return False
    return True


def _without_spares(topology: HostTopology, *, spares: int, min_nodes: int | None) -> HostTopology:
    """Return the topology of the nodes that train, and log it if this node is a spare.

    Raises:
        UsageError: no node would train, or fewer than `min_nodes`.
    """
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
    options: SharedOptions, words: Sequence[str], topology: HostTopology, devices: LocalDevices
) -> LoadedRun:
    """Load the job, and check everything that one node can know beforehand.

    Args:
        options: of the command line.
        words: settings of the run.
        topology: of the nodes that train.
        devices: of this node; of kind ``unknown``, only what holds on any machine is checked.

    Raises:
        ConfigError: every problem that was found.
    """
    job = load_run(options.config, words, deepspeed_config=options.deepspeed_config)
    # A node that fails here alone keeps the others waiting. So missing data is left to its ranks,
    # which report it to all.
    cluster = Cluster(topology.nnodes, topology.slots, devices.kind)
    if devices.kind == "unknown" and job.config.auto:
        return job  # each host chooses by its own devices, and the agents compare the choices
    job = job.started(cluster)
    job.plan_with_data(cluster, data_elsewhere=topology.nnodes > 1)
    refuse_too_few(
        job,
        devices,
        num_ranks=topology.slots,
        source=topology.sources["slots"],
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
    binding: Binding = NOT_BOUND,
    facts: Mapping[str, str] | None = None,
    look: Look | None = None,
    port: int = 0,
    token: str = "",
    deadline_seconds: float = WAIT_SECONDS,
    names: Sequence[str] = (),
    restarts: Restarts | None = None,
    spares: int = 0,
    fits: Callable[[int], bool] = lambda count: False,
) -> JobEnd:
    """Meet the other nodes, run a script on every rank, and again as long as node 0 decides so.

    Args:
        command: the script, and its arguments.
        requests: to stop, since this process began; its signals are handled already.
        binding: cores of the ranks, which a line of the log names.
        facts: values that have to be the same on every node.
        look: this node's preflight, until the nodes have met.
        port, token, deadline_seconds, names, restarts, spares, fits: see `Session`.

    Returns:
        The end of the job on this node.

    Raises:
        ConfigError, PeerLostError, RunStopped: no rank was started.
    """
    # Imported here, with all that they import: a check and a dry run need none of it.
    import asyncio

    from framework.launch.rendezvous.session import Session

    if binding.line:
        print_line(f"cores: {binding.line}")
    job_id = environment.get("DSF_JOB_ID", "")
    session = Session(
        topology,
        hello_of(topology, job_id, spares=spares, names=names, facts=facts or {}),
        requests,
        port=port,
        token=token,
        deadline_seconds=deadline_seconds,
        names=names,
        problems=partial(_port_problems, topology),
        restarts=restarts,
        spares=spares,
        fits=fits,
    )

    def make_ranks(start: Start) -> Ranks:
        variables = environment
        if start.topology.nnodes > 1:
            variables = _with_gloo_interface(environment, session.local_address)
        return _make_ranks(start, command, devices, variables, binding)

    return asyncio.run(_run(session, make_ranks, look=look, grace_seconds=grace_seconds))


def _make_ranks(
    start: Start,
    command: Sequence[str],
    devices: LocalDevices,
    environment: Mapping[str, str],
    binding: Binding,
) -> Ranks:
    """Return the ranks of a start, not started; the arguments are as `run_node` has them."""
    from framework.launch.ranks import Ranks  # psutil comes with the train extra only

    topology = start.topology
    if topology.nnodes > 1:
        print_line(
            f"all {topology.nnodes} nodes are here and agree; starting {topology.slots} ranks of "
            f"{topology.world_size}"
        )
    # No setting comes from another node: that sends whether to resume, and the setting for it is
    # made here.
    settings = in_place(command[1:], further_settings(resumes=start.resumes))
    return Ranks(
        [command[0], *settings],
        topology,
        environment,
        device=devices.kind,
        devices=devices.chosen,
        processors=binding.processors,
    )


def hello_of(
    topology: HostTopology,
    job_id: str,
    *,
    spares: int,
    names: Sequence[str],
    facts: Mapping[str, str],
) -> dict[str, Any]:
    """Return this node's part of its HELLO, by the names of `messages.Hello`."""
    from framework.launch.rendezvous.channel import PROTOCOL
    from framework.launch.rendezvous.handshake import hosts_text, machine_mark

    return {
        "node_rank": topology.node_rank,
        "nnodes": topology.nnodes,
        "slots": topology.slots,
        "master_port": topology.master_port,
        "protocol": PROTOCOL,
        "job": job_id,
        "spares": spares,
        "host": socket.gethostname(),
        "machine": "" if is_loopback_name(topology.master_addr) else machine_mark(),
        "hosts": hosts_text(names),
        "clock": time.time(),
        "facts": dict(facts),
    }


def _with_gloo_interface(environment: Mapping[str, str], address: str) -> Mapping[str, str]:
    """Return the environment with gloo's interface: the user's, or the one that has `address`.

    By itself gloo takes the address to which the host's own name resolves, which is often loopback.
    NCCL finds its interfaces better without a name.
    """
    from framework.launch.rendezvous.connectivity import interface_of

    if environment.get("GLOO_SOCKET_IFNAME"):
        return environment
    name = interface_of(address)
    if not name:
        return environment
    return {**environment, "GLOO_SOCKET_IFNAME": name}


async def _run(
    session: Session,
    make_ranks: Callable[[Start], Ranks],
    *,
    look: Look | None,
    grace_seconds: float,
) -> JobEnd:
    """Meet the other nodes, and run one start after the other until there is no other."""
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
                await asyncio.to_thread(stack.close)  # removes the mark of the preflight
                ranks = make_ranks(start)
                code, end = await run_attempt(
                    ranks, start.peers, session.requests, grace_seconds=grace_seconds
                )
                print_line(end.line)
                write_termination_log(end.line)
                # no rank may start beside one that runs; the others find this node lost
                if ranks.not_killed:
                    return JobEnd(code, end.line, has_left=True)
                decision = await job.decide_restart(end)
                if not decision.is_again:
                    gave_up = decision.code == EXIT_NO_PROGRESS
                    return JobEnd(decision.code if gave_up else code, end.line)
        finally:
            await job.close()


def _port_problems(topology: HostTopology) -> Sequence[Problem]:
    """Return the problems of the port where the ranks of several nodes meet, if this is node 0: the
    other nodes would wait for it in vain.
    """
    if topology.node_rank != 0 or topology.nnodes == 1:
        return ()
    try:
        usable_port(topology.master_port)
    except ConfigError as error:
        fix = "give all nodes another --master_port"
        file = f"node 0 ({socket.gethostname()})"
        return [replace(problem, file=file, fix=fix) for problem in error.problems]
    return ()


def _preflight(
    job: LoadedRun, topology: HostTopology, devices: LocalDevices, environment: Mapping[str, str]
) -> Look:
    """Return this node's preflight, which runs when its context is entered."""
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
    """Raise a ConfigError if DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise missing_package("deepspeed", what="training")


def grace_seconds(flag: float | None) -> float:
    """Return the flag's value, that of DSF_GRACE_SECONDS, or the default.

    Raises:
        UsageError: the variable is not a number of seconds.
    """
    text = os.environ.get("DSF_GRACE_SECONDS", "")
    if flag is not None:
        return flag
    if not text:
        return GRACE_SECONDS
    try:
        return seconds(text)
    except ArgumentTypeError as error:
        raise UsageError(f"environment variable DSF_GRACE_SECONDS: {error}") from None


def hide_token() -> None:
    """Replace this process by itself without DSF_TOKEN, if that is set; does not return then.

    Ranks, and `ps`, see the environment with which a process was started. The token goes through a
    pipe to the new program, which is this one again.
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
    """Check that a job of several nodes has either a secret or --no_token.

    Raises:
        UsageError: it has both.
        ConfigError: it has neither.
    """
    has_token = bool(
        options.token_file or os.environ.get("DSF_TOKEN") or os.environ.get(_TOKEN_END)
    )
    if has_token and options.no_token:
        raise UsageError("launch node: --no_token, and a token is given; leave one of them out")
    if not has_token and not options.no_token:
        raise ConfigError.of(
            "no-token",
            "several nodes need a secret in common: any program that answers at node 0's port "
            "would be taken for node 0",
            "give every node --token_file FILE with the same secret (head -c 32 /dev/urandom | "
            "base64 > FILE), or --no_token where all who reach this port may take part",
            key="--token_file",
            file="command line",
        )


def read_token(path: str | None) -> str:
    """Return the shared secret, and remove it from the environment; empty if there is none.

    It is in the file at `path`, in the pipe of `hide_token`, or comes from `launch -H`.

    Raises:
        ConfigError: it cannot be read, or could be guessed.
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
