"""`launch -H HOSTFILE`: one agent on each host, started through the system's `ssh`, held by its standard input.

The command line there holds a folder, a Python and fixed words, quoted. Everything else travels over stdin, which stays
open as a life line: when this process ends, however, the agents see it close and stop their ranks. Nothing is ever
looked for or killed by name on another machine.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import framework
from framework.errors import EXIT_OK, UsageError
from framework.launch.deepspeed_command import as_shell_line, find_train_script, hosts_command
from framework.launch.hosts.devices import LocalDevices
from framework.launch.hosts.hostfile import Chosen, Host, choose_hosts
from framework.launch.hosts.topology import DEFAULT_PORT, Topology
from framework.launch.job import show_settings
from framework.launch.node import check_node, grace_seconds, read_token
from framework.launch.options import LaunchOptions
from framework.launch.ssh_agents import Agents
from framework.load_run import deepspeed_words
from framework.system import limits as open_files

# What a run may depend on. Everything else stays here: a name like AWS_SECRET_ACCESS_KEY goes with --export only.
_PREFIXES: Final = ("DS_", "DSF_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "TORCH_", "PYTORCH_")
# Names, not prefixes: LANG must not let LANGCHAIN_API_KEY through.
_NAMES: Final = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_HOME",
        "DEEPSPEED_TIMEOUT",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "TRITON_CACHE_DIR",
        "TOKENIZERS_PARALLELISM",
        "PYTHONHASHSEED",
        "PYTHONUNBUFFERED",
        "LANG",
        "LC_ALL",
        "TZ",
    }
)
# Meant for this process alone.
_KEPT: Final = ("DSF_AGENT", "DSF_WORLD_SIZE", "DSF_TERMINATION_LOG")
# A silent host is given up one interval after the last of three questions: within 16 s, so that all is over within 20
# s.
_OPTIONS: Final = (
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=30",
    "-o",
    "ServerAliveInterval=4",
    "-o",
    "ServerAliveCountMax=3",
    "-o",
    "ControlMaster=no",
    "-o",
    "ControlPath=none",
    "-T",
)
_ASKS: Final = re.compile(r"(-o)?\s*batchmode[\s=]+(?!yes)", re.IGNORECASE)
# Commands of agents that are printed.
_REPORTED: Final = 3
_NO_PLAIN: Final = "none; DeepSpeed's launcher has no words for these hosts, devices, folder or Python"
# Three pipes to every ssh, and some for this process itself.
_FILES_PER_HOST: Final = 3
_OWN_FILES: Final = 32


def launch_over_ssh(options: LaunchOptions) -> int:
    """Start an agent on every host, pass on what they say, and return the exit code of the job.

    Raises:
        UsageError, ConfigError: nothing has been started.
    """
    chosen, topology = _places(options)
    open_files.require(
        _OWN_FILES + _FILES_PER_HOST * len(chosen), f"{len(chosen)} hosts", fix="leave hosts out with --exclude"
    )
    # The devices are elsewhere: here only what holds on any machine is checked.
    job = check_node(
        options.config,
        options.overrides,
        topology,
        LocalDevices("unknown", 0),
        deepspeed_config=options.deepspeed_config,
    )
    job.print_notes()
    commands = [
        (item.host, ssh_command(item.host, agent_command(options, item, node, topology), ssh_args=options.ssh_args))
        for node, item in enumerate(chosen)
    ]
    plain = hosts_command(options, topology, chosen, job.arguments, script=find_train_script())
    line = as_shell_line(plain.words, plain.variables, before=plain.before) if plain else _NO_PLAIN
    show_settings(topology, line, *_agents_reported(commands, all_of_them=options.verbose))
    if options.dry_run:
        return EXIT_OK
    # Nobody has to think of a secret: the life line carries one to every host.
    own = {
        "DSF_JOB_ID": secrets.token_hex(8),
        "DSF_TOKEN": read_token(options.token_file) or secrets.token_hex(16),
        "DSF_GRACE_SECONDS": str(grace_seconds(options.grace_seconds)),
    }
    order = {"environment": passed_on(os.environ, exports=options.exports) | own}
    named = [(host.name.rpartition("@")[2], command) for host, command in commands]
    return Agents(named, order, grace_seconds=float(own["DSF_GRACE_SECONDS"])).run()


def _places(options: LaunchOptions) -> tuple[tuple[Chosen, ...], Topology]:
    """The hosts with their devices, and what they make."""
    assert options.hostfile is not None
    chosen = choose_hosts(options.hostfile, **options.choice)
    sources = options.sources | {"master_addr": "the first host", "master_port": "default"}
    master, port = options.master_addr, DEFAULT_PORT
    if len(chosen) == 1:
        # Its ranks need no name that others know, which it might not reach itself, and no port that somebody else may
        # have.
        master, port = master or "127.0.0.1", 0
        sources |= {"master_addr": "one host", "master_port": "one that the host finds"}
    sources |= {name: f"--{name}" for name in ("master_addr", "master_port") if getattr(options, name)}
    master = master or address_of(chosen[0].host.name, ssh_args=options.ssh_args)
    return chosen, Topology(len(chosen), len(chosen[0].devices), 0, master, options.master_port or port, sources)


def _agents_reported(commands: Sequence[tuple[Host, Sequence[str]]], *, all_of_them: bool) -> list[str]:
    """List the commands that start agents on the hosts; the rest of an agent's order goes over its standard input."""
    shown = commands if all_of_them or len(commands) <= _REPORTED + 1 else commands[:_REPORTED]
    rows = [f"agent on {host.name}: {shlex.join(command)}" for host, command in shown]
    left = len(commands) - len(shown)
    return rows + ([f"and {left} more agents; --verbose prints them all"] if left else [])


def agent_command(options: LaunchOptions, chosen: Chosen, node_rank: int, topology: Topology) -> list[str]:
    """Build the command that a host runs."""
    port = ["--control_port", str(options.control_port)] if options.control_port else []
    devices = [] if chosen.is_first else ["--devices", ",".join(map(str, chosen.devices))]
    root = str(Path(framework.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    # The package may be found by PYTHONPATH alone, and the folder need not be the checkout.
    words = ["env", f"PYTHONPATH={path}", options.remote_python or sys.executable, "-m", "framework", "launch", "node"]
    words += ["--config", options.config, *deepspeed_words(options.deepspeed_config)]
    words += ["--nnodes", str(topology.nnodes), "--node_rank", str(node_rank)]
    words += ["--num_gpus", str(topology.slots), "--master_addr", topology.master_addr]
    words += ["--master_port", str(topology.master_port)] if topology.master_port else []
    words += ["--no_preflight"] if options.no_preflight else []
    words += [] if options.wait_seconds is None else ["--wait_seconds", f"{options.wait_seconds:.3f}"]
    words += [*port, *devices, "--from_stdin", "--", *options.overrides]
    return ["cd", options.remote_folder or str(Path.cwd()), "&&", "exec", *words]


def ssh_command(host: Host, command: Sequence[str], *, ssh_args: str) -> list[str]:
    """The whole command here; `&&` is the one word that the shell there is to understand."""
    there = " ".join(word if word == "&&" else shlex.quote(word) for word in command)
    # Of two values ssh takes the first.
    return ["ssh", *split_ssh_args(ssh_args), *_OPTIONS, "--", host.name, there]


def passed_on(environment: Mapping[str, str], *, exports: Sequence[str]) -> dict[str, str]:
    """The variables that go to the hosts.

    Raises:
        UsageError: one that was named is not set.
    """
    absent = [name for name in exports if name not in environment]
    if absent:
        raise UsageError(f"launch: --export {' '.join(absent)}: not set here")
    return {
        name: value
        for name, value in environment.items()
        if name in exports or ((name in _NAMES or name.startswith(_PREFIXES)) and name not in _KEPT)
    }


def address_of(name: str, *, ssh_args: str = "") -> str:
    """Return the address that the other hosts use: its name, or the HostName that ~/.ssh/config gives it; `ssh -G`
    reads that.
    """
    plain = name.rpartition("@")[2]
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["ssh", *split_ssh_args(ssh_args), "-G", "--", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        found = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return found[0] if done.returncode == 0 and found else plain
    return plain


def split_ssh_args(text: str, *, command: str = "launch") -> list[str]:
    """The words of ``--ssh_args``; they win over our own options.

    Raises:
        UsageError: they cannot be read, or would have ssh ask somebody who is not there.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{command}: --ssh_args: {error}") from None
    asks = next((word for word in words if _ASKS.match(word)), None)
    if asks is not None:
        raise UsageError(
            f"{command}: --ssh_args: {asks}: nobody is asked for a password; use a key, or an agent that holds it"
        )
    return words
