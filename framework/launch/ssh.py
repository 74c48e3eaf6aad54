"""`launch -H HOSTFILE`: one agent on each host, started through the system's `ssh`, held by its
standard input.

The command line there holds a folder, a Python and fixed words, quoted. Everything else travels
over stdin, which stays open as a life line: when this process ends, even if it is killed, the
agents see it close and stop their ranks. No process of another machine is ever killed by name.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, TextIO

import framework
from framework.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, ConfigError, Problem, UsageError
from framework.hosts.devices import LocalDevices
from framework.hosts.hostfile import (
    ChosenHost,
    Host,
    first_few,
    is_host,
    is_loopback_name,
    one_spelling,
)
from framework.hosts.topology import DEFAULT_PORT, HostTopology
from framework.launch.deepspeed_command import find_train_script, hosts_command
from framework.launch.job import print_line, show_settings
from framework.launch.node import check_node, grace_seconds, read_token, refuse_idle_restarts
from framework.launch.options import GRACE_SECONDS, KILL_SECONDS, WAIT_SECONDS, LaunchOptions
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import HOST_LOST, Restarts, is_final
from framework.load_run import deepspeed_words
from framework.system.json_lines import encode
from framework.system.open_files import require
from framework.system.output import write

# Variables that a run may depend on. Everything else stays here: a name like AWS_SECRET_ACCESS_KEY
# goes with --export only.
_PREFIXES: Final = "DS|DSF|NCCL|GLOO|UCX|FI|OMP|MKL|TORCH|PYTORCH"
_VARIABLES: Final = (
    "CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING|HOME)",
    "DEEPSPEED_TIMEOUT",
    "HF_(HOME|HUB_OFFLINE|DATASETS_OFFLINE)",
    "TRANSFORMERS_OFFLINE",
    "TRITON_CACHE_DIR",
    "TOKENIZERS_PARALLELISM",
    "PYTHON(HASHSEED|UNBUFFERED)",
    "LANG",
    "LC_ALL",
    "TZ",
)
_PASSED_ON: Final = re.compile(f"({_PREFIXES})_.*|{'|'.join(_VARIABLES)}")
# Variables of those prefixes that are meant for this process alone.
_KEPT: Final = ("DSF_AGENT", "DSF_WORLD_SIZE", "DSF_TERMINATION_LOG")
# A silent host is given up one interval after the last of three keep-alive messages: within 16 s,
# so that the whole job has ended within 20.
_OPTIONS: Final = shlex.split(
    "-o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=4 -o ServerAliveCountMax=3 -o "
    "ControlMaster=no -o ControlPath=none -o ForwardAgent=no -o ForwardX11=no -o "
    "ClearAllForwardings=yes -T"
)
_BATCH_MODE_OFF: Final = re.compile(r"(-o)?\s*batchmode[\s=]+(?![\s=]|yes)", re.IGNORECASE)
_REPORTED: Final = 3  # commands of agents that are printed
_NO_PLAIN: Final = (
    "none; DeepSpeed's launcher has no words for these hosts, devices, folder or Python"
)
# Three pipes to every ssh, and some for this process itself.
_FILES_PER_HOST: Final = 3
_OWN_FILES: Final = 32
_LOOK_SECONDS: Final = 0.2
_LARGEST_LINE_BYTES: Final = 1 << 16
_CALL_AGAIN_SECONDS: Final = 5.0
# longer than `ssh` takes to connect, or to find out that it cannot
_REACHED_SECONDS: Final = 45.0
# Once the first host has failed, the agents end the others within 20 s by themselves; an agent
# takes longer to find out that a rank of its own cannot be killed.
_WAIT_SECONDS: Final = 30.0 + KILL_SECONDS
# a process that an agent has left behind may hold the other end of its output
_DRAIN_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 5.0
_ELSEWHERE: Final = LocalDevices("unknown", 0)  # only what holds on any machine is checked here
# more hosts are not looked up by `ssh -G`: each call takes some milliseconds
_MOST_LOOKED_UP: Final = 128
_LOOKED_UP_AT_ONCE: Final = 8
_ENDS_REPORTED: Final = 4  # up to this number, hosts are named one by one at the end of the job


def launch_over_ssh(options: LaunchOptions) -> int:
    """Start an agent on every host, pass on their output, and return the exit code of the job.

    After a UsageError or ConfigError nothing has been started.
    """
    assert options.hostfile is not None
    chosen = options.choose_hosts()
    topology = _topology(options, chosen)
    num_files = _OWN_FILES + _FILES_PER_HOST * len(chosen)
    require(num_files, f"{len(chosen)} hosts", fix="leave hosts out with --exclude")
    refuse_one_host_twice(chosen, ssh_args=options.ssh_args, path=options.hostfile)
    job = check_node(options, options.overrides, topology, _ELSEWHERE)
    refuse_idle_restarts(options, job.config, command="launch")
    job.print_notes(is_supervised=True)
    commands = _commands(options, chosen, topology)
    plain = hosts_command(options, topology, chosen, job.arguments, script=find_train_script())
    rows = _agent_rows(chosen, commands, prints_all=options.verbose)
    show_settings(topology, plain.as_line() if plain else _NO_PLAIN, *rows)
    if options.dry_run:
        return EXIT_OK
    # The user need not make up a secret: the life line carries one to every host.
    environment = passed_on(os.environ, exports=options.exports) | {
        "DSF_JOB_ID": secrets.token_hex(8),
        "DSF_TOKEN": read_token(options.token_file) or secrets.token_hex(16),
        "DSF_GRACE_SECONDS": str(grace_seconds(options.grace_seconds)),
    }

    restarts = None
    if job.config.supervision.max_restarts:
        restarts = Restarts(job.config)
    agents = Agents(
        commands,
        environment,
        grace_seconds=float(environment["DSF_GRACE_SECONDS"]),
        restarts=restarts,
        wait_seconds=WAIT_SECONDS if options.wait_seconds is None else options.wait_seconds,
    )
    with StopRequests().handling_signals() as requests:
        return agents.run(requests)


def _agent_rows(
    chosen: Sequence[ChosenHost], commands: Sequence[tuple[str, Sequence[str]]], *, prints_all: bool
) -> list[str]:
    """Format the commands that start the agents; the rest of their order goes over stdin."""
    if prints_all or len(commands) <= _REPORTED + 1:
        printed = commands
    else:
        printed = commands[:_REPORTED]
    rows = []
    for item, (_, command) in zip(chosen, printed, strict=False):
        rows.append(f"agent on {item.host.name}: {shlex.join(command)}")
    left = len(commands) - len(printed)
    if left:
        rows.append(f"and {left} more agents; --verbose prints them all")
    return rows


def _commands(
    options: LaunchOptions, chosen: Sequence[ChosenHost], topology: HostTopology
) -> list[tuple[str, Sequence[str]]]:
    """Return each host's name without its user, and the `ssh` that starts its agent."""
    commands: list[tuple[str, Sequence[str]]] = []
    for node, item in enumerate(chosen):
        name = item.host.name.rpartition("@")[2]
        command = agent_command(options, item, node, topology)
        commands.append((name, ssh_command(item.host, command, ssh_args=options.ssh_args)))
    return commands


def _topology(options: LaunchOptions, chosen: Sequence[ChosenHost]) -> HostTopology:
    """Return the topology as node 0 sees it; its port is 0 if a single host finds one itself."""
    sources = options.sources | {"master_addr": "the first host", "master_port": "default"}
    master = options.master_addr
    port = DEFAULT_PORT
    if len(chosen) == 1:
        # Its ranks need no name that other hosts know, which it might not reach itself, and no
        # fixed port, which another program may have.
        master = master or "127.0.0.1"
        port = 0
        sources |= {"master_addr": "one host", "master_port": "one that the host finds"}
    if options.master_addr:
        sources["master_addr"] = "--master_addr"
    if options.master_port:
        sources["master_port"] = "--master_port"
    master = master or address_of(chosen[0].host.name, ssh_args=options.ssh_args)
    return HostTopology(
        len(chosen), len(chosen[0].devices), 0, master, options.master_port or port, sources
    )


def agent_command(
    options: LaunchOptions, chosen: ChosenHost, node_rank: int, topology: HostTopology
) -> list[str]:
    """Return the words that start an agent on a host, for its shell; `&&` is the shell's own."""
    root = str(Path(framework.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    # The package may be found by PYTHONPATH alone, and the folder need not be the checkout.
    words = [
        "env",
        f"PYTHONPATH={path}",
        options.remote_python or sys.executable,
        "-m",
        "framework",
        "launch",
        "node",
    ]
    words += ["--config", options.config, *deepspeed_words(options.deepspeed_config)]
    words += ["--nnodes", str(topology.nnodes), "--node_rank", str(node_rank)]
    words += ["--num_gpus", str(topology.slots), "--master_addr", topology.master_addr]
    if topology.master_port:
        words += ["--master_port", str(topology.master_port)]
    if options.min_nodes is not None:
        words += ["--min_nodes", str(options.min_nodes)]
    if options.no_preflight:
        words.append("--no_preflight")
    if options.bind_cores != "auto":
        words += ["--bind_cores", options.bind_cores]
    if options.wait_seconds is not None:
        words += ["--wait_seconds", f"{options.wait_seconds:.3f}"]
    if options.control_port:
        words += ["--control_port", str(options.control_port)]
    if not chosen.is_first:
        words += ["--devices", ",".join(map(str, chosen.devices))]
    words += ["--from_stdin", "--", *options.overrides]
    return ["cd", options.remote_folder or str(Path.cwd()), "&&", "exec", *words]


def ssh_command(host: Host, command: Sequence[str], *, ssh_args: str) -> list[str]:
    """Return the `ssh` command that runs `command` on a host.

    Its words are quoted for the shell there, except `&&`.
    """
    there = " ".join(word if word == "&&" else shlex.quote(word) for word in command)
    # Of two values ssh takes the first, so the user's options win over ours.
    return ["ssh", *split_ssh_args(ssh_args), *_OPTIONS, "--", host.name, there]


def passed_on(environment: Mapping[str, str], *, exports: Sequence[str]) -> dict[str, str]:
    """Return the variables that go to the hosts; a UsageError if one of `exports` is not set."""
    absent = [name for name in exports if name not in environment]
    if absent:
        raise UsageError(f"launch: --export {' '.join(absent)}: not set here")
    variables = {}
    for name, value in environment.items():
        if name in exports or (_PASSED_ON.fullmatch(name) and name not in _KEPT):
            variables[name] = value
    return variables


def address_of(name: str, *, ssh_args: str = "") -> str:
    """Return the address by which the other hosts call this one.

    It is the HostName that ~/.ssh/config gives it, or its name.
    """
    return _ssh_endpoint(name, ssh_args=ssh_args)[0]


def _ssh_endpoint(name: str, *, ssh_args: str) -> tuple[str, str]:
    """Return the address and the port at which `ssh` reaches a host; takes 20 s at most.

    Where `ssh -G` fails, they are the host's name and an empty text.
    """
    settings: dict[str, str] = {}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["ssh", *split_ssh_args(ssh_args), "-G", "--", name]
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
        settings = dict(re.findall("^(hostname|port) (.*)$", text, re.MULTILINE))
    return settings.get("hostname", name.rpartition("@")[2]), settings.get("port", "")


def refuse_one_host_twice(chosen: Sequence[ChosenHost], *, ssh_args: str, path: str) -> None:
    """Raise a ConfigError where two names of a hostfile lead `ssh` to one host.

    ~/.ssh/config or /etc/hosts may lead them there, and the host's devices would be taken twice. If
    there are more than `_MOST_LOOKED_UP` hosts, the agents find it out when they meet.
    """
    if not 1 < len(chosen) <= _MOST_LOOKED_UP:
        return
    names = [item.host.name for item in chosen]
    with ThreadPoolExecutor(max_workers=_LOOKED_UP_AT_ONCE) as pool:
        endpoints = list(pool.map(partial(_ssh_endpoint, ssh_args=ssh_args), names))
    addresses = known_addresses()
    first_names: dict[tuple[str, str], str] = {}
    problems = []
    for name, (host, port) in zip(names, endpoints, strict=True):
        spelling = one_spelling(host)
        endpoint = (addresses.get(spelling, spelling), port)
        other = first_names.setdefault(endpoint, name)
        if other != name:
            reason = f"it is the same host as {other}: {endpoint[0]}"
            fix = "keep one line with all its slots"
            problems.append(
                Problem("hostfile-duplicate-host", reason, fix, file=path, key="host", value=name)
            )
    if problems:
        raise ConfigError(problems)


def known_addresses(file: Path = Path("/etc/hosts")) -> dict[str, str]:
    """Return the addresses, by name, that this machine knows without asking a name server.

    Loopback addresses are left out: they mean another machine on each host.
    """
    addresses: dict[str, str] = {}
    with suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            if is_host(address) and not is_loopback_name(address):
                for name in names:
                    addresses.setdefault(one_spelling(name), one_spelling(address))
    return addresses


def split_ssh_args(text: str, *, command: str = "launch") -> list[str]:
    """Split the value of ``--ssh_args``; messages name `command`.

    Raises:
        UsageError: the quotes are wrong, or BatchMode is turned off, so that `ssh` could ask for a
            password.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{command}: --ssh_args: {error}") from None
    for word in words:
        if _BATCH_MODE_OFF.match(word):
            reason = "no password can be asked for; use a key, or an agent that holds it"
            raise UsageError(f"{command}: --ssh_args: {word}: {reason}")
    return words


HostEnd = tuple[str, int]  # a host's name, and the exit code of its agent


def job_code(ends: Sequence[HostEnd]) -> int:
    """Return the code of the first host that failed by itself.

    If there is none, it is the code of a lost host, then that of a stopped one, then 0.
    """
    order = {EXIT_PEER_LOST: 1, EXIT_STOPPED: 2, EXIT_OK: 3}
    codes = [code for _, code in ends]
    return min(codes, key=lambda code: order.get(code, 0), default=EXIT_OK)


def ends_reported(ends: Sequence[HostEnd]) -> str:
    """Describe the ends, the first one first; many hosts are grouped by their exit codes."""
    if len(ends) <= _ENDS_REPORTED:
        return ", ".join(f"{host} ended with {code}" for host, code in ends)
    by_code: dict[int, list[str]] = {}
    for host, code in ends:
        by_code.setdefault(code, []).append(host)
    return ", ".join(f"{first_few(names)} ended with {code}" for code, names in by_code.items())


@dataclass
class _Agent:
    """The agent of one host.

    Attributes:
        name: of the host.
        command: the `ssh` that starts the agent.
        process: that `ssh`; None while none runs.
        started_at: `time.monotonic()` at its start.
        losses: how often the host was lost.
        lost_since: `time.monotonic()` of the last loss.
        again_at: when `ssh` is started again; infinite if not.
    """

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = -math.inf
    losses: int = 0
    lost_since: float = math.inf
    again_at: float = math.inf


class Agents:
    """The `ssh` processes of all hosts: their output and requests to stop are passed on.

    Agents start their ranks again by themselves. A host that is lost is called again, as a platform
    starts a lost pod again.
    """

    def __init__(
        self,
        commands: Sequence[tuple[str, Sequence[str]]],
        environment: Mapping[str, str],
        *,
        grace_seconds: float = GRACE_SECONDS,
        restarts: Restarts | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Start nothing yet.

        Args:
            commands: each host's name, and the `ssh` that starts its agent.
            environment: is sent to every agent first.
            grace_seconds: for ranks to save in after a request to stop.
            restarts: knows what the job has saved, for hosts that were lost; None: nothing starts
                again.
            wait_seconds: how long a lost host is called.
        """
        self._agents = [_Agent(name, command) for name, command in commands]
        self._environment = environment
        self._streams: dict[IO[bytes], tuple[str, TextIO, bytearray]] = {}
        self._ends: list[HostEnd] = []  # of agents that have ended by themselves
        self._given_up: list[HostEnd] = []  # of hosts that were lost, or did not end in time
        self._restarts = restarts
        self._wait_seconds = wait_seconds
        self._is_ending = False
        self._request_sent = ""
        self._give_up_at = math.inf  # when agents that still run are given up
        self._drained_at = math.inf  # when output is left that no agent writes any more
        self._grace_seconds = grace_seconds

    def run(self, requests: StopRequests) -> int:
        """Start the agents, pass on output and requests, and return the exit code of the job."""
        try:
            for agent in self._agents:
                self._start(agent)
            while not self._is_over():
                self._pass_on_output()
                self._look_for_ends()
                self._pass_on_request(requests)
                self._call_lost_hosts()
        finally:
            self._close_life_lines()
        # a host that was given up counts only where no agent has the end of the job
        code = job_code(self._ends or self._given_up)
        print_line(f"{ends_reported(self._ends + self._given_up)}; the job ends with {code}")
        return code

    @property
    def _running(self) -> list[tuple[_Agent, subprocess.Popen[bytes]]]:
        return [(agent, agent.process) for agent in self._agents if agent.process is not None]

    def _is_over(self) -> bool:
        """Check whether all agents have ended and their output is read, or had the time to.

        So this process does not wait for an `ssh` that hangs, nor for output that stays open: a
        rank that cannot be killed holds its agent's.
        """
        now = time.monotonic()
        if self._running:
            return now > self._give_up_at
        if any(agent.again_at < math.inf for agent in self._agents):
            return False
        self._drained_at = min(self._drained_at, now + _DRAIN_SECONDS)
        return not self._streams or now > self._drained_at

    def _start(self, agent: _Agent) -> None:
        """Start an agent's `ssh`, and send it its order. Raises ConfigError if there is no ssh."""
        agent.again_at = math.inf
        agent.started_at = time.monotonic()
        try:
            # A session of its own: Ctrl-C reaches this process only, which informs the agents.
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                agent.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except FileNotFoundError:
            fix = "install OpenSSH's client, or start `launch node` on every host"
            raise ConfigError.of("not-installed", "there is no ssh on PATH", fix) from None
        agent.process = process
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            self._streams[stream] = (agent.name, out, bytearray())
        order: dict[str, object] = {"environment": self._environment}
        if agent.losses and self._restarts is not None:
            order["restarts"] = self._restarts.state_after_losses(agent.losses)
        self._send_to(process, order)

    def _pass_on_output(self) -> None:
        """Wait for output, for `_LOOK_SECONDS`, and print its lines after the names of hosts."""
        if not self._streams:
            time.sleep(_LOOK_SECONDS)
            return
        for stream in readable(self._streams, _LOOK_SECONDS):
            name, out, buffer = self._streams[stream]
            content = os.read(stream.fileno(), 1 << 16)
            buffer += content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if buffer and (not content or len(buffer) > _LARGEST_LINE_BYTES):
                buffer += b"\n"
            complete, _, rest = bytes(buffer).rpartition(b"\n")
            if complete:
                lines = complete.decode("utf-8", errors="replace").split("\n")
                write(out, "".join(f"{name}: {line}\n" for line in lines if line))
            buffer[:] = rest
            if not content:
                del self._streams[stream]
                stream.close()

    def _look_for_ends(self) -> None:
        """Note the agents that have ended, and the hosts that were lost."""
        for agent, process in self._running:
            code = process.poll()
            if code is None:
                continue
            agent.process = None
            if code != HOST_LOST and code >= 0:
                self._note_end(agent, code)
                continue
            print_line(
                f"{agent.name}: ssh ended with {code}; the host was not reached, or was lost"
            )
            if self._restarts is None:
                self._note_end(agent, EXIT_PEER_LOST)
            else:
                self._call_again_later(agent, self._restarts)

    def _note_end(self, agent: _Agent, code: int) -> None:
        """Note the end of an agent, and inform the others if it is the first failure of the job.

        Without restarts each agent's end is the end of the job. With them it is the end of node 0,
        which leaves last, of all hosts but one, or with a code that no other start would change.
        """
        has_failed_before = any(earlier for _, earlier in self._ends)
        self._ends.append((agent.name, code))
        num_left = len(self._agents) - len(self._ends) - len(self._given_up)
        leaves_last = self._restarts is None or agent is self._agents[0] or num_left <= 1
        if leaves_last and not self._request_sent:
            self._give_up_after(saves=code == EXIT_STOPPED)
        self._is_ending = self._is_ending or leaves_last or is_final(code)
        if code == EXIT_OK or has_failed_before or not self._is_ending:
            return
        # Agents that have met know of it; the ones that still wait for this host do not.
        self._send_to_all("stop" if code == EXIT_STOPPED else "lost")

    def _call_again_later(self, agent: _Agent, restarts: Restarts) -> None:
        """Call a lost host again after a pause, or give it up."""
        now = time.monotonic()
        # an `ssh` that ends sooner may never have reached the host: it is the same loss
        if not agent.losses or now - agent.started_at > _REACHED_SECONDS:
            agent.losses += 1
            agent.lost_since = now
        is_again = (
            not self._is_ending
            and not self._request_sent
            and agent.losses <= restarts.most
            and now - agent.lost_since < self._wait_seconds
        )
        if is_again:
            agent.again_at = now + _CALL_AGAIN_SECONDS
        else:
            self._give_up(agent)

    def _give_up(self, agent: _Agent) -> None:
        agent.again_at = math.inf
        self._given_up.append((agent.name, EXIT_PEER_LOST))

    def _call_lost_hosts(self) -> None:
        """Call lost hosts again once their pause is over; give them up if the job ends."""
        for agent in self._agents:
            if agent.again_at == math.inf:
                continue
            if self._is_ending or self._request_sent:
                self._give_up(agent)
            elif time.monotonic() > agent.again_at:
                self._start(agent)

    def _pass_on_request(self, requests: StopRequests) -> None:
        """Send a new request to stop, or the one to kill, to all hosts."""
        if requests.insists:
            request = "kill"
        elif requests.asked:
            request = "stop"
        else:
            request = ""
        if request and request != self._request_sent:
            self._request_sent = request
            self._give_up_after(saves=request == "stop")
            more = "; once more kills" if request == "stop" else ""
            print_line(f"{requests.asked}: passing it on to {len(self._running)} hosts{more}")
            self._send_to_all(request)

    def _give_up_after(self, *, saves: bool) -> None:
        """Set the time to give up agents that still run; `saves`: their ranks may save first."""
        seconds = self._grace_seconds if saves else 0.0
        self._give_up_at = time.monotonic() + seconds + _WAIT_SECONDS

    def _send_to_all(self, kind: str) -> None:
        for _, process in self._running:
            self._send_to(process, {"type": kind})

    def _send_to(self, process: subprocess.Popen[bytes], message: Mapping[str, object]) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(encode(message) + b"\n")
            process.stdin.flush()

    def _close_life_lines(self) -> None:
        """Close the life lines, at which every agent ends its ranks, and all output.

        An `ssh` that does not end within `_LEAVE_SECONDS` is killed. Hosts whose `ssh` ran until
        now are given up.
        """
        running = self._running
        for _, process in running:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for agent, process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._given_up.append((agent.name, EXIT_PEER_LOST))
        for stream in self._streams:
            stream.close()


def readable(waiting: Iterable[IO[bytes]], seconds: float) -> set[IO[bytes]]:
    """Return the streams that have something to read, within `seconds`.

    This polls, because `select` takes no descriptor above 1023.
    """
    with selectors.PollSelector() as selector:
        for stream in waiting:
            selector.register(stream, selectors.EVENT_READ, stream)
        return {key.data for key, _ in selector.select(seconds)}
