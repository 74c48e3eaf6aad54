"""`launch -H HOSTFILE`: one agent on each host, started through the system's `ssh`, held by its
standard input.

The command line there holds a folder, a Python and fixed words, quoted. Everything else travels
over stdin, which stays open as a life line: when this process ends, even if it is killed, the
agents see it close and stop their ranks. No process of another machine is ever killed by name.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Final, TextIO

import framework
from framework.errors import EXIT_OK, EXIT_PEER_LOST, EXIT_STOPPED, ConfigError, Problem, UsageError
from framework.launch.deepspeed_command import find_train_script, hosts_command
from framework.launch.hosts.devices import LocalDevices
from framework.launch.hosts.hostfile import (
    ChosenHost,
    Host,
    first_few,
    is_host,
    is_loopback_name,
    one_spelling,
)
from framework.launch.hosts.topology import DEFAULT_PORT, HostTopology
from framework.launch.job import print_line, show_settings
from framework.launch.node import check_node, fits, grace_seconds, read_token
from framework.launch.options import GRACE_SECONDS, KILL_SECONDS, WAIT_SECONDS, LaunchOptions
from framework.launch.returning_hosts import answering
from framework.launch.stop_requests import StopRequests
from framework.launch.supervision import JobEnd, in_place, supervised
from framework.load_run import deepspeed_words
from framework.system.limits import require
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
_PROMPTS: Final = re.compile(r"(-o)?\s*batchmode[\s=]+(?!yes)", re.IGNORECASE)
_REPORTED: Final = 3  # commands of agents that are printed
_NO_PLAIN: Final = (
    "none; DeepSpeed's launcher has no words for these hosts, devices, folder or Python"
)
# Three pipes to every ssh, and some for this process itself.
_FILES_PER_HOST: Final = 3
_OWN_FILES: Final = 32
_LOOK_SECONDS: Final = 0.2
_LARGEST_LINE_BYTES: Final = 1 << 16
_STUCK: Final = re.compile(r"launch: .*\(process (\d+), state .*\[rank-not-killed\]")
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
    job.print_notes(is_supervised=True)
    commands = _commands(options, chosen, topology)
    plain = hosts_command(options, topology, chosen, job.arguments, script=find_train_script())
    rows = _agent_rows(chosen, commands, prints_all=options.verbose)
    show_settings(topology, plain.as_line() if plain else _NO_PLAIN, *rows)
    if options.dry_run:
        return EXIT_OK
    # The user need not make up a secret: the life line carries one to every host.
    order = passed_on(os.environ, exports=options.exports) | {
        "DSF_TOKEN": read_token(options.token_file) or secrets.token_hex(16),
        "DSF_GRACE_SECONDS": str(grace_seconds(options.grace_seconds)),
    }

    with StopRequests().handling_signals() as requests:
        starts = _Starts(options, chosen, order, requests)
        return supervised(job.config, requests, starts.start)


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


class _Starts:
    """Starts of one job, on all hosts or on those that are left."""

    def __init__(
        self,
        options: LaunchOptions,
        chosen: Sequence[ChosenHost],
        order: Mapping[str, str],
        requests: StopRequests,
    ) -> None:
        self._options = options
        self._chosen = chosen
        self._order = order
        self._requests = requests
        self._expected = list(range(len(chosen)))
        self._stuck: dict[str, str] = {}
        self._number = 0

    def start(self, words: tuple[str, ...]) -> JobEnd:
        """Start once, with further settings of the run."""
        options = replace(self._options, overrides=in_place(self._options.overrides, words))
        if self._number:
            self._wait_for_hosts(options)
        chosen = [self._chosen[number] for number in self._expected]
        topology = _topology(options, chosen)
        # processes that were lost may hold the last port a while longer
        if topology.master_port and not options.master_port:
            topology = replace(topology, master_port=topology.master_port + 2 * self._number)
        self._number += 1
        commands = _commands(options, chosen, topology)
        environment = {**self._order, "DSF_JOB_ID": secrets.token_hex(8)}
        agents = Agents(
            commands,
            {"environment": environment},
            grace_seconds=float(environment["DSF_GRACE_SECONDS"]),
        )
        end = agents.run(self._requests)
        self._stuck |= agents.stuck
        return end

    def _wait_for_hosts(self, options: LaunchOptions) -> None:
        def probe(_: int, item: ChosenHost) -> list[str]:
            process = self._stuck.get(item.host.name.rpartition("@")[2])
            if process:
                return ["test", "!", "-e", f"/proc/{process}"]
            return ["true"]

        fit = partial(
            fits, options, options.overrides, _topology(options, self._chosen), _ELSEWHERE
        )
        probes = _over_ssh(options, self._chosen, probe)
        seconds = WAIT_SECONDS if options.wait_seconds is None else options.wait_seconds
        self._expected = answering(
            probes, self._expected, self._requests, fits=fit, longest_seconds=seconds
        )


def _commands(
    options: LaunchOptions, chosen: Sequence[ChosenHost], topology: HostTopology
) -> list[tuple[str, Sequence[str]]]:
    return _over_ssh(
        options, chosen, lambda node, item: agent_command(options, item, node, topology)
    )


def _over_ssh(
    options: LaunchOptions,
    chosen: Sequence[ChosenHost],
    command: Callable[[int, ChosenHost], Sequence[str]],
) -> list[tuple[str, Sequence[str]]]:
    """Return each host's name without its user, and the `ssh` that runs a command there.

    Args:
        command: takes the number of a host and the host, and returns the command to run there.
    """
    commands: list[tuple[str, Sequence[str]]] = []
    for node, item in enumerate(chosen):
        name = item.host.name.rpartition("@")[2]
        ssh = ssh_command(item.host, command(node, item), ssh_args=options.ssh_args)
        commands.append((name, ssh))
    return commands


def _topology(options: LaunchOptions, chosen: Sequence[ChosenHost]) -> HostTopology:
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
    """Build the command that a host runs."""
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
    if options.no_preflight:
        words.append("--no_preflight")
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
    # Of two values ssh takes the first.
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
    """Return the address and the port at which `ssh` reaches a host.

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
    """Split the value of ``--ssh_args``, which wins over our own options.

    Raises:
        UsageError: the quotes are wrong, or `ssh` would prompt for a password.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{command}: --ssh_args: {error}") from None
    for word in words:
        if _PROMPTS.match(word):
            reason = "nobody is asked for a password; use a key, or an agent that holds it"
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


class Agents:
    """The `ssh` processes of all hosts: their output and requests to stop are passed on.

    Attributes:
        stuck: process id of a rank that cannot be killed, by host.
    """

    def __init__(
        self,
        commands: Sequence[tuple[str, Sequence[str]]],
        order: Mapping[str, object],
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Start nothing yet.

        Args:
            commands: each host's name, and the `ssh` that starts its agent.
            order: is sent to every agent first.
            grace_seconds: for ranks to save in after a request to stop.
        """
        self._commands = commands
        self._order = json.dumps(order).encode() + b"\n"
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[IO[bytes], tuple[str, TextIO, bytearray]] = {}
        self._ends: list[HostEnd] = []
        self._last_lines: dict[str, str] = {}  # of each host's agent
        self.stuck: dict[str, str] = {}
        self._reported = ""
        self._give_up_at = math.inf
        self._drained_at = math.inf
        self._grace_seconds = grace_seconds

    def run(self, requests: StopRequests) -> JobEnd:
        """Start the agents, pass on output and requests, and return the end of the job."""
        try:
            self._start()
            while not self._is_over():
                self._pass_on_output()
                self._look_for_ends()
                self._pass_on_request(requests)
        finally:
            self._let_go()
        code = job_code(self._ends)
        print_line(f"{ends_reported(self._ends)}; the job ends with {code}")
        host = next((name for name, end_code in self._ends if end_code == code), "")
        return JobEnd(code, self._last_lines.get(host) or ends_reported(self._ends))

    def _is_over(self) -> bool:
        """Check whether all agents have ended, or had the time to.

        Neither an `ssh` that hangs holds this process, nor an output that stays open, as that of an
        agent does that has a rank which cannot be killed.
        """
        now = time.monotonic()
        if self._running:
            running_hosts = {self._commands[node][0] for node in self._running}
            return now > self._give_up_at or self.stuck.keys() >= running_hosts
        self._drained_at = min(self._drained_at, now + _DRAIN_SECONDS)
        return not self._streams or now > self._drained_at

    def _start(self) -> None:
        for node, (name, command) in enumerate(self._commands):
            try:
                # A session of its own: Ctrl-C reaches this process only, which informs the agents.
                pipe = subprocess.PIPE
                process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
                )
            except FileNotFoundError:
                fix = "install OpenSSH's client, or start `launch node` on every host"
                raise ConfigError.of("not-installed", "there is no ssh on PATH", fix) from None
            self._running[node] = process
            for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert stream is not None
                self._streams[stream] = (name, out, bytearray())
            self._send_to(process, self._order)

    def _pass_on_output(self) -> None:
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
                self._note_lines(name, lines)
                write(out, "".join(f"{name}: {line}\n" for line in lines if line))
            buffer[:] = rest
            if not content:
                del self._streams[stream]
                stream.close()

    def _note_lines(self, host: str, lines: Sequence[str]) -> None:
        for line in lines:
            if line.startswith("launch: "):
                self._last_lines[host] = line.removeprefix("launch: ")
            match = _STUCK.match(line)
            if match:
                self.stuck[host] = match[1]

    def _look_for_ends(self) -> None:
        for node, process in list(self._running.items()):
            code = process.poll()
            name = self._commands[node][0]
            if code is None:
                continue
            del self._running[node]
            # 255 is ssh's own: not reached, refused, or cut off.
            if code == 255 or code < 0:
                print_line(f"{name}: ssh ended with {code}; the host was not reached, or was lost")
                code = EXIT_PEER_LOST
            has_failed_before = any(earlier for _, earlier in self._ends)
            self._ends.append((name, code))
            if code != EXIT_OK and not has_failed_before:
                # Agents that have met know of it; the ones that still wait for this host do not.
                self._send_to_all(b"stop\n" if code == EXIT_STOPPED else b"lost\n")
                if not self._reported:
                    self._give_up_after(saves=code == EXIT_STOPPED)

    def _pass_on_request(self, requests: StopRequests) -> None:
        if requests.insists:
            request = "kill"
        elif requests.asked:
            request = "stop"
        else:
            request = ""
        if request and request != self._reported:
            self._reported = request
            self._give_up_after(saves=request == "stop")
            more = "; once more kills" if request == "stop" else ""
            print_line(f"{requests.asked}: passing it on to {len(self._running)} hosts{more}")
            self._send_to_all(request.encode() + b"\n")

    def _give_up_after(self, *, saves: bool) -> None:
        seconds = self._grace_seconds if saves else 0.0
        self._give_up_at = time.monotonic() + seconds + _WAIT_SECONDS

    def _send_to_all(self, words: bytes) -> None:
        for process in self._running.values():
            self._send_to(process, words)

    def _send_to(self, process: subprocess.Popen[bytes], words: bytes) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(words)
            process.stdin.flush()

    def _let_go(self) -> None:
        """Close the life lines: every agent ends its ranks then, even if its `ssh` hangs here."""
        for process in self._running.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for node, process in self._running.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._ends.append((self._commands[node][0], EXIT_PEER_LOST))
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
