"""`launch -H HOSTFILE`: one agent on each host, started through the system's `ssh`, held by its standard input.

The command line there holds a folder, a Python and fixed words, quoted. Everything else travels over stdin, which stays
open as a life line: when this process ends, however, the agents see it close and stop their ranks. Nothing is ever
looked for or killed by name on another machine.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import framework
from framework.errors import EXIT_OK, UsageError
from framework.launch import open_files
from framework.launch.devices import LocalDevices
from framework.launch.hostfile import Host
from framework.launch.inclusion import Chosen, choose_hosts, who_chose
from framework.launch.node import check_node, grace_seconds, read_token
from framework.launch.options import Request
from framework.launch.plain import as_shell_line, find_train_script, hosts_command
from framework.launch.ssh_agents import Agents
from framework.launch.told import tell
from framework.launch.topology import DEFAULT_PORT, Topology

# What a run may depend on. Everything else stays here: a name like AWS_SECRET_ACCESS_KEY goes with --export only.
_PREFIXES: Final = ("DS_", "DSF_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "TORCH_", "PYTORCH_")
# Names, not prefixes: LANG must not let LANGCHAIN_API_KEY through.
_NAMES: Final = frozenset({
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_HOME", "DEEPSPEED_TIMEOUT", "HF_HOME", "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED",
    "PYTHONUNBUFFERED", "LANG", "LC_ALL", "TZ"})  # fmt: skip
# Meant for this process alone.
_KEPT: Final = ("DSF_AGENT", "DSF_WORLD_SIZE", "DSF_TERMINATION_LOG")
# A silent host is given up one interval after the last of three questions: within 16 s, so that all is over within 20 s.
_OPTIONS: Final = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=4", "-o", "ServerAliveCountMax=3",
                   "-o", "ControlMaster=no", "-o", "ControlPath=none", "-T")  # fmt: skip
# Commands of agents that are printed.
_TOLD: Final = 3
_NO_PLAIN: Final = "none; DeepSpeed's launcher has no words for these hosts, devices, folder or Python"
# Three pipes to every ssh, and some for this process itself.
_FILES_PER_HOST: Final = 3
_OWN_FILES: Final = 32


def launch_over_ssh(request: Request) -> int:
    """Start an agent on every host, pass on what they say, and return the exit code of the job.

    Raises:
        UsageError, ConfigError: nothing has been started.
    """
    chosen, topology = _places(request)
    open_files.require(_OWN_FILES + _FILES_PER_HOST * len(chosen), f"{len(chosen)} hosts", fix="leave hosts out with --exclude")
    # The devices are elsewhere: here only what holds on any machine is checked.
    job = check_node(request.config, request.overrides, topology, LocalDevices("unknown", 0),
                     deepspeed_config=request.deepspeed_config)  # fmt: skip
    commands = [(item.host, ssh_command(item.host, agent_command(request, item, node, topology), ssh_args=request.ssh_args))
                for node, item in enumerate(chosen)]  # fmt: skip
    plain = hosts_command(request, topology, chosen, job.arguments, script=find_train_script())
    line = as_shell_line(plain.words, plain.variables, before=plain.before) if plain else _NO_PLAIN
    tell(topology, line, *_agents_told(commands, all_of_them=request.verbose))
    if request.dry_run:
        return EXIT_OK
    # Nobody has to think of a secret: the life line carries one to every host.
    own = {"DSF_JOB_ID": secrets.token_hex(8), "DSF_TOKEN": read_token(request.token_file) or secrets.token_hex(16),
           "DSF_GRACE_SECONDS": str(grace_seconds(request.grace_seconds))}  # fmt: skip
    order = {"environment": passed_on(os.environ, exports=request.exports) | own}
    named = [(host.name.rpartition("@")[2], command) for host, command in commands]
    return Agents(named, order, grace_seconds=float(own["DSF_GRACE_SECONDS"])).run()


def _places(request: Request) -> tuple[tuple[Chosen, ...], Topology]:
    """The hosts with their devices, and what they make."""
    assert request.hostfile is not None
    choice: Any = {"include": request.include, "exclude": request.exclude, "num_nodes": request.num_nodes,
                   "num_gpus": request.num_ranks}  # fmt: skip
    chosen = choose_hosts(request.hostfile, **choice)
    master = request.master_addr or address_of(chosen[0].host.name, ssh_args=request.ssh_args)
    sources = who_chose(request.hostfile, **choice) | {
        "master_addr": "--master_addr" if request.master_addr else "the first host",
        "master_port": "--master_port" if request.port else "default"}  # fmt: skip
    return chosen, Topology(len(chosen), len(chosen[0].devices), 0, master, request.port or DEFAULT_PORT, sources)


def _agents_told(commands: Sequence[tuple[Host, Sequence[str]]], *, all_of_them: bool) -> list[str]:
    """What is started on the hosts. Only this process can start it: the rest goes over its standard input."""
    shown = commands if all_of_them or len(commands) <= _TOLD + 1 else commands[:_TOLD]
    rows = [f"agent on {host.name}: {shlex.join(command)}" for host, command in shown]
    left = len(commands) - len(shown)
    return rows + ([f"and {left} more agents; --verbose prints them all"] if left else [])


def agent_command(request: Request, chosen: Chosen, node_rank: int, topology: Topology) -> list[str]:
    """What a host runs."""
    beside = [] if request.deepspeed_config is None else ["--deepspeed_config", request.deepspeed_config]
    port = ["--control_port", str(request.control_port)] if request.control_port else []
    devices = [] if chosen.is_first else ["--devices", ",".join(map(str, chosen.devices))]
    root = str(Path(framework.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    # The package may be found by PYTHONPATH alone, and the folder need not be the checkout.
    words = ["env", f"PYTHONPATH={path}", request.remote_python or sys.executable, "-m", "framework", "launch", "node"]
    words += ["--config", request.config, *beside, "--nnodes", str(topology.nnodes), "--node_rank", str(node_rank)]
    words += ["--num_gpus", str(topology.slots), "--master_addr", topology.master_addr, "--master_port", str(topology.master_port)]
    words += ["--no_preflight"] if request.no_preflight else []
    words += [*port, *devices, "--wait_seconds", f"{request.wait_seconds:g}", "--from_stdin", "--", *request.overrides]
    return ["cd", request.remote_folder or str(Path.cwd()), "&&", "exec", *words]


def ssh_command(host: Host, command: Sequence[str], *, ssh_args: str) -> list[str]:
    """The whole command here; `&&` is the one word that the shell there is to understand."""
    there = " ".join(word if word == "&&" else shlex.quote(word) for word in command)
    return ["ssh", *_OPTIONS, *_split(ssh_args), "--", host.name, there]


def passed_on(environment: Mapping[str, str], *, exports: Sequence[str]) -> dict[str, str]:
    """The variables that go to the hosts.

    Raises:
        UsageError: one that was named is not set.
    """
    absent = [name for name in exports if name not in environment]
    if absent:
        raise UsageError(f"launch: --export {' '.join(absent)}: not set here")
    return {name: value for name, value in environment.items()
            if name in exports or ((name in _NAMES or name.startswith(_PREFIXES)) and name not in _KEPT)}  # fmt: skip


def address_of(name: str, *, ssh_args: str = "") -> str:
    """What the other hosts call it: its name, or the HostName that ~/.ssh/config gives it; `ssh -G` reads that."""
    plain = name.rpartition("@")[2]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["ssh", *_split(ssh_args), "-G", "--", name], capture_output=True, text=True, timeout=20, check=False)
        found = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return found[0] if done.returncode == 0 and found else plain
    return plain


def _split(ssh_args: str) -> list[str]:
    try:
        return shlex.split(ssh_args)
    except ValueError as error:
        raise UsageError(f"launch: --ssh_args: {error}") from None
