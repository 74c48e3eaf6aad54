"""The plain `deepspeed` command for a run, the environment it needs, and the path of train.py."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import framework
from framework.errors import ConfigError
from framework.hosts.devices import devices_of_ranks
from framework.hosts.hostfile import ChosenHost, read_hostfile
from framework.hosts.topology import HostTopology
from framework.launch.options import LaunchOptions
from framework.system.ports import free_port

_DEFAULT_HOSTFILE: Final = Path("/job/hostfile")
# Up to this number, nodes are written out in a command; for more there is a `seq`.
_FEW: Final = 4
# The shell's `include` has an @ before every node; the first is dropped.
_INCLUDE: Final = "--include=${include#@}"


@dataclass(frozen=True)
class PlainCommand:
    """Command for a user to type.

    Attributes:
        before: shell commands that come before it on the line.
        variables: environment variables of this command alone.
    """

    words: list[str]
    before: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_line(self, added: Mapping[str, str] | None = None) -> str:
        """Format the command as a line for the shell; `added` variables replace its own."""
        return as_shell_line(self.words, added or self.variables, before=self.before)


def local_command(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    port: int,
    script: Path,
    address: str | None = None,
    chosen: Sequence[int] | None = None,
) -> list[str]:
    """Build the `deepspeed` command that trains the same on this machine.

    Args:
        arguments: of train.py, which is `script`.
        port, address: where ranks meet.
        chosen: device numbers of ``CUDA_VISIBLE_DEVICES``; without them the launcher takes the
            first.
    """
    command = deepspeed_program()
    # The launcher reads this file by default and would start its hosts, too.
    if _DEFAULT_HOSTFILE.is_file():
        command += ["--hostfile", os.devnull]
    # With --num_gpus the launcher drops CUDA_VISIBLE_DEVICES and takes devices 0 to N-1, which
    # another user may have.
    if chosen is None:
        command += ["--num_gpus", str(num_ranks)]
    else:
        numbers = devices_of_ranks(chosen, num_ranks)
        command += ["--include", "localhost:" + ",".join(map(str, numbers))]
    if address:
        command += ["--master_addr", address]
    command += ["--master_port", str(port), str(script)]
    return command + list(arguments)


def node_command(
    topology: HostTopology,
    arguments: Sequence[str],
    *,
    script: Path,
    devices: Sequence[int] | None = None,
    hostfile: str | None = None,
) -> PlainCommand:
    """Build the `deepspeed` command that trains the same on this node of several.

    Where it makes a hostfile of its own, the names in it have no meaning.

    Args:
        topology: of the job, as this node sees it.
        arguments: of train.py, which is `script`.
        devices: numbers of the devices to use; None: the first.
        hostfile: path of the user's; None: the command makes one.
    """
    if devices:
        numbers = devices_of_ranks(devices, topology.slots)
    else:
        numbers = []
    before = ""
    path = hostfile
    include: list[str] = []
    if path is None or numbers:
        if numbers:
            slots = max(numbers) + 1  # the launcher takes no device number beyond the slots
        else:
            slots = topology.slots
        if topology.nnodes <= _FEW:
            nodes = " ".join(map(str, range(topology.nnodes)))
        else:
            nodes = f"$(seq 0 {topology.nnodes - 1})"
        before = f"hosts=$(mktemp) && printf 'node-%s slots={slots}\\n' {nodes} > $hosts && "
        path = "$hosts"
        if numbers:
            listed = ",".join(map(str, numbers))
            before += f"include=$(printf '@node-%s:{listed}' {nodes}) && "
            include = [_INCLUDE]
    words = [*deepspeed_program(), f"--hostfile={path}", "--no_ssh"]
    for name in ("node_rank", "master_addr", "master_port"):
        words.append(f"--{name}={getattr(topology, name)}")
    words += include
    words.append(str(script))
    words += arguments
    return PlainCommand(words, before)


def hosts_command(
    options: LaunchOptions,
    topology: HostTopology,
    chosen: Sequence[ChosenHost],
    arguments: Sequence[str],
    *,
    script: Path,
) -> PlainCommand | None:
    """Build the `deepspeed` command for the same hosts, through pdsh.

    Returns:
        None if the launcher has no options for these hosts, devices, folder or Python.
    """
    words = deepspeed_program()
    before = ""
    if _needs_plain_hostfile(options, chosen):
        for item in chosen:
            if not item.is_first or (":" in item.host.name and "@" in item.host.name):
                return None
        names = shlex.join(item.host.name for item in chosen)
        before = f"hosts=$(mktemp) && printf '%s slots={topology.slots}\\n' {names} > $hosts && "
        words.append("--hostfile=$hosts")
    else:
        words.append(f"--hostfile={options.hostfile}")
        words += _host_options(options)
    if options.remote_python or options.remote_folder:
        return None
    # A single host would be taken for this machine.
    if topology.nnodes == 1:
        words.append("--force_multi")
    # Without its check the launcher needs none of our options of ssh there.
    if options.ssh_args:
        words.append("--no_ssh_check")
    words.append(f"--master_addr={topology.master_addr}")
    if topology.master_port:
        words.append(f"--master_port={topology.master_port}")
    words.append(str(script))
    words += arguments
    variables = {"PDSH_SSH_ARGS_APPEND": options.ssh_args} if options.ssh_args else {}
    return PlainCommand(words, before, variables)


def _host_options(options: LaunchOptions) -> list[str]:
    filters = []
    for name in ("include", "exclude", "num_nodes", "num_gpus"):
        value = getattr(options, name)
        if value:
            filters.append(f"--{name}={value}")
    return filters


def _needs_plain_hostfile(options: LaunchOptions, chosen: Sequence[ChosenHost]) -> bool:
    """Check whether the launcher would read the user's hostfile or options in another way.

    pdsh reads brackets as a range, and --include has a meaning of its own for `@` and `:`.
    """
    if any(":" in item.host.name for item in chosen):
        return True
    if not options.include and not options.exclude:
        return False
    hosts = read_hostfile(options.hostfile or "")
    return any("@" in host.name or ":" in host.name for host in hosts)


def as_shell_line(command: Sequence[str], added: Mapping[str, str], *, before: str = "") -> str:
    """Format the command as a line for the shell.

    Args:
        command: the program and its arguments.
        added: variables of the run.
        before: shell commands that define the ``$hosts`` and ``$include`` in the command.
    """
    words = []
    if "PATH" in added:
        programs = added["PATH"].partition(os.pathsep)[0]
        words.append(f"PATH={shlex.quote(programs)}:$PATH")
    for name, value in added.items():
        if name != "PATH":
            words.append(f"{name}={shlex.quote(value)}")
    program = shutil.which("deepspeed")
    if program is not None and Path(program).absolute() == Path(command[0]):
        words.append("deepspeed")
    else:
        words.append(shlex.quote(command[0]))
    for word in command[1:]:
        if before and word in ("--hostfile=$hosts", _INCLUDE):
            words.append(word)
        else:
            words.append(shlex.quote(word))
    return before + " ".join(words)


def find_train_script() -> Path:
    """Return the path of train.py: beside the package in a checkout, in it in an installed copy."""
    package = Path(framework.__file__).resolve().parent
    checkout = package.parent
    # Among installed packages, a train.py beside this one belongs to another package.
    is_checkout = (checkout / "train.py").is_file() and (checkout / "pyproject.toml").is_file()
    if is_checkout:
        script = checkout / "train.py"
    else:
        script = package / "entry" / "train.py"
    if script.is_relative_to(Path.cwd()):
        return Path(os.path.relpath(script))
    return script


def usable_port(requested: int | None) -> int:
    """Return the requested port, or a free one for None.

    Raises:
        ConfigError: another program listens on the requested port.
    """
    if requested is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", requested))
        except OSError as error:
            reason = f"ranks cannot meet there: {error.strerror}"
            fix = "leave it out, and a free one is taken"
            raise ConfigError.of(
                "port-not-usable", reason, fix, "--master_port", requested, "command line"
            ) from None
    return requested


def deepspeed_program() -> list[str]:
    """Return the `deepspeed` command that belongs to this Python, not the first one on PATH."""
    script = Path(sys.executable).with_name("deepspeed")
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-m", "deepspeed.launcher.runner"]
