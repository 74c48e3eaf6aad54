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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from framework.config.load import load_with_source
from framework.config.run_config import RunConfig
from framework.ds_json.import_merge import with_deepspeed_config
from framework.errors import EXIT_OK, ConfigError, FrameworkError, Problem, UsageError
from framework.launch.devices import LocalDevices, find_devices
from framework.launch.hostfile import Host, read_hostfile
from framework.launch.meet.meeting import Meeting
from framework.launch.meet.messages import PROTOCOL
from framework.launch.options import GRACE_SECONDS, WAIT_SECONDS, parse_node, seconds
from framework.launch.plain import added_environment, as_shell_line, find_train_script, node_command, usable_port
from framework.launch.requests import Requests, read_order, say, write
from framework.launch.told import tell
from framework.launch.topology import Topology, resolve_topology, slots_here
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan

# All nodes are known to be there when ranks start, so a collective that takes as long is stuck (minutes).
_COLLECTIVE_MINUTES: Final = "10"
_LARGEST_TOKEN_BYTES: Final = 4096


@dataclass(frozen=True)
class Job:
    """What the ranks run: train.py with these arguments."""

    config_path: str
    overrides: tuple[str, ...]
    config: RunConfig
    deepspeed_config: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Of train.py."""
        beside = [] if self.deepspeed_config is None else ["--deepspeed_config", self.deepspeed_config]
        return ["--config", self.config_path, *beside, *self.overrides]


# What a preflight adds to the HELLO, for the time that the nodes need to meet.
Look = Callable[[], AbstractContextManager[Mapping[str, Any]]]


def _not_looking() -> AbstractContextManager[Mapping[str, Any]]:
    return nullcontext({})


@dataclass(frozen=True)
class Terms:
    """How a node meets the others and ends: seconds, ports, a shared secret, the hosts, a preflight."""

    grace_seconds: float = GRACE_SECONDS
    wait_seconds: float = WAIT_SECONDS
    control_port: int = 0
    token: str = ""
    job_id: str = ""
    attempt: int = 0
    hosts: tuple[Host, ...] = ()
    look: Look = _not_looking


def main(argv: Sequence[str]) -> int:
    """Be one member of a job; returns its exit code.

    Raises:
        FrameworkError: nothing has been started.
    """
    # From here on: process 1 of a container never gets a signal that it does not handle, and would train on.
    with Requests().heeding_signals() as requests:
        try:
            return _main(argv, requests)
        except FrameworkError as error:
            if importlib.util.find_spec("psutil") is not None:
                from framework.launch.agent import write_termination_log

                write_termination_log(str(error))
            raise


def _main(argv: Sequence[str], requests: Requests) -> int:
    found = parse_node(argv)
    if found.from_stdin:
        os.environ.update(read_order(sys.stdin.buffer.fileno(), requests))
        requests.hold(sys.stdin.buffer.fileno())
    devices = find_devices(os.environ)
    if found.devices is not None:
        devices = replace(devices, chosen=found.devices, count=len(found.devices) if devices.count else 0)
    hosts = read_hostfile(found.hostfile) if found.hostfile else ()
    flags = {"nnodes": found.nnodes, "node_rank": found.node_rank, "slots": found.num_gpus,
             "master_addr": found.master_addr, "master_port": found.master_port}  # fmt: skip
    topology = resolve_topology(flags, os.environ, hosts=hosts, default_slots=slots_here(devices))
    job = check_node(found.config, found.words, topology, devices, deepspeed_config=found.deepspeed_config)
    script = find_train_script()
    added = node_environment(os.environ, device=devices.kind, topology=topology)
    command = node_command(topology, job.arguments, script=script, devices=devices.chosen, hostfile=found.hostfile)
    if found.dry_run or not found.from_stdin:  # who started it through ssh has said it, once for all hosts
        tell(topology, as_shell_line(command.words, added, before=command.before))
    if found.dry_run:
        return EXIT_OK
    require_deepspeed()
    terms = Terms(grace_seconds=grace_seconds(found.grace_seconds), wait_seconds=found.wait_seconds,
                  control_port=found.control_port or topology.master_port + 1, token=read_token(found.token_file),
                  job_id=os.environ.get("DSF_JOB_ID", ""), hosts=hosts,
                  look=_not_looking if found.no_preflight
                  else _preflight(job, topology, devices, {**os.environ, **added}))  # fmt: skip
    from framework.launch.meet.hello import node_facts

    return run_node(topology, script=script, arguments=job.arguments, devices=devices, environment={**os.environ, **added},
                    terms=terms, facts=node_facts(job.config) if topology.nnodes > 1 else {}, requests=requests)  # fmt: skip


def check_node(config_path: str, overrides: Sequence[str], topology: Topology, devices: LocalDevices, *,
               deepspeed_config: str | None = None) -> Job:  # fmt: skip
    """The job, after everything that one node can know beforehand has been checked.

    Raises:
        ConfigError: with every problem found.
    """
    config, source = load_with_source(config_path, overrides)
    if deepspeed_config is not None:
        config = with_deepspeed_config(config, deepspeed_config, source=source)
    make_plan(config, Cluster(topology.nnodes, topology.slots, devices.kind), source=source)
    for note in source.notes():
        write(sys.stderr, f"{note.severity}: {note}\n")
    if devices.count and topology.slots > devices.count:
        given = topology.sources["slots"]
        raise ConfigError(Problem(
            kind="too-few-devices", file="command line" if given.startswith("-") else "", key=given, value=topology.slots,
            reason=f"this machine has {devices.count} {devices.kind} devices for it",
            fix=f"at most {devices.count} on every node, or DS_ACCELERATOR=cpu to try it on processors"))  # fmt: skip
    return Job(config_path, tuple(overrides), config, deepspeed_config)


def run_node(topology: Topology, *, script: Path, arguments: Sequence[str], devices: LocalDevices,
             environment: Mapping[str, str], terms: Terms, facts: Mapping[str, str], requests: Requests) -> int:  # fmt: skip
    """Meet the other nodes, run the script on every rank, and say how it ended; returns the exit code.

    Args:
        topology: this node's place.
        script, arguments: what each rank runs.
        devices: of this machine.
        environment: of the ranks.
        terms: how the nodes meet and end.
        facts: what has to be the same on every node.
        requests: to stop, since this process began; its signals are heeded.

    Raises:
        ConfigError, PeerLostError, RunStopped: no rank was started.
    """
    from framework.launch.agent import run_attempt, tell_end  # psutil comes with the train extra only
    from framework.launch.meet.rendezvous import meet
    from framework.launch.ranks import Ranks

    several = topology.nnodes > 1
    meeting = Meeting(topology, terms.control_port, _hello(topology, terms, facts), requests, token=terms.token,
                      deadline_seconds=terms.wait_seconds, names=[host.name for host in terms.hosts],
                      problems=_port_problems(topology) if several else ())  # fmt: skip
    with terms.look() as look:
        meeting.hello = {**meeting.hello, **look}
        peers = meet(meeting)
    if several:
        say(f"all {topology.nnodes} nodes are here and agree; starting {topology.slots} ranks of {topology.world_size}")
        environment = {**environment, **network_environment(environment, meeting.local_address)}
    else:
        requests.refuse_start()  # several heed requests while they meet, and tell each other of those that come after
    ranks = Ranks(script=script, arguments=arguments, topology=topology, environment=environment,
                  device=devices.kind, devices=devices.chosen)  # fmt: skip
    result = run_attempt(ranks, peers=peers, requests=requests, node_rank=topology.node_rank,
                         grace_seconds=terms.grace_seconds)  # fmt: skip
    tell_end(result.line)
    return result.code


def _port_problems(topology: Topology) -> Sequence[Problem]:
    """On node 0: the others would wait for ranks that cannot listen."""
    if topology.node_rank == 0:
        try:
            usable_port(topology.master_port)
        except ConfigError as error:
            fix = "give all nodes another --master_port"
            return [replace(problem, file=f"node 0 ({socket.gethostname()})", fix=fix) for problem in error.problems]
    return ()


def _hello(topology: Topology, terms: Terms, facts: Mapping[str, str]) -> dict[str, Any]:
    """What this node says about itself; `facts.HELLO` has the types."""
    from framework.launch.meet.hello import hosts_text

    return {
        "protocol": PROTOCOL, "job": terms.job_id, "attempt": terms.attempt, "node_rank": topology.node_rank,
        "nnodes": topology.nnodes, "slots": topology.slots, "master_port": topology.master_port, "host": socket.gethostname(),
        "hosts": hosts_text([host.name for host in terms.hosts]), "clock": time.time(), "facts": dict(facts),
    }  # fmt: skip


def _preflight(job: Job, topology: Topology, devices: LocalDevices, environment: Mapping[str, str]) -> Look:
    """This node's look at itself; what is wrong with it goes to node 0, which tells everybody."""
    from framework.launch.preflight.start import look_before_start

    if topology.nnodes == 1:
        return _not_looking
    chosen = {} if devices.chosen is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices.chosen))}
    cluster = Cluster(topology.nnodes, topology.slots, devices.kind)

    @contextmanager
    def look() -> Iterator[Mapping[str, Any]]:
        with look_before_start(job.config, cluster, {**environment, **chosen}, rank=topology.node_rank, warn=_warn) as told:
            yield {"look": told}

    return look


def _warn(problem: Problem) -> None:
    write(sys.stderr, f"{problem.severity}: {problem}\n")


def node_environment(environment: Mapping[str, str], *, device: str, topology: Topology) -> dict[str, str]:
    """The variables that the ranks need and the user has not set."""
    added = added_environment(environment, device=device, num_ranks=topology.slots)
    if topology.nnodes > 1 and not environment.get("DEEPSPEED_TIMEOUT"):
        added["DEEPSPEED_TIMEOUT"] = _COLLECTIVE_MINUTES
    return added


def network_environment(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """gloo takes the address that the own name resolves to, often loopback; NCCL finds its interfaces better by itself."""
    from framework.launch.meet.addresses import interface_of

    name = "" if environment.get("GLOO_SOCKET_IFNAME") else interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def require_deepspeed() -> None:
    """Refuse what cannot train.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(Problem(kind="not-installed", reason=f"{sys.executable} has no deepspeed",
                                  fix="pip install 'dsframework[train]', or use ./launch.sh, which does"))  # fmt: skip


def grace_seconds(given: float | None) -> float:
    """The flag, DSF_GRACE_SECONDS, or the default.

    Raises:
        UsageError: the variable is no number of seconds.
    """
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
    try:
        text = Path(path).read_bytes()[:_LARGEST_TOKEN_BYTES].decode("utf-8").strip()
    except (OSError, ValueError) as error:
        text, reason = "", str(getattr(error, "strerror", None) or "it is not text")
    else:
        reason = "it is empty"
    if not text:
        raise ConfigError(Problem(kind="token-unreadable", file=path, reason=reason, fix="name a file that holds the secret"))
    return text
