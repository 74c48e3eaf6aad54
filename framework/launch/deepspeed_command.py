"""The plain `deepspeed` command that stands for what is started, the environment it needs, and
where train.py is.
"""

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
from framework.launch.hosts.devices import usable_cores
from framework.launch.hosts.hostfile import Chosen, read_hostfile
from framework.launch.hosts.topology import HostTopology
from framework.launch.options import LaunchOptions
from framework.system.ports import free_port

_DEFAULT_HOSTFILE: Final = Path("/job/hostfile")
# Up to here nodes are written out in a command, beyond it counted.
_FEW: Final = 4
_INCLUDE: Final = "--include=${include#@}"


@dataclass(frozen=True)
class PlainCommand:
    """Command for a person to type, with what has to come before it in the shell, and variables for
    it alone.
    """

    words: list[str]
    before: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_line(self, added: Mapping[str, str] | None = None) -> str:
        """Format it as a line for the shell, with the variables that the run needs as well."""
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
    """The `deepspeed` command that trains the same on this machine.

    Args:
        arguments: of train.py, which is `script`.
        port, address: where ranks meet.
        chosen: device numbers of ``CUDA_VISIBLE_DEVICES``; without them the launcher takes the
            first.
    """
    # With --num_gpus the launcher drops CUDA_VISIBLE_DEVICES and takes devices 0 to N-1: somebody
    # else's, perhaps.
    where = ["--num_gpus", str(num_ranks)]
    if chosen is not None:
        where = ["--include", "localhost:" + ",".join(map(str, sorted(chosen[:num_ranks])))]
    # The launcher reads this file by default and would start its hosts, too.
    if _DEFAULT_HOSTFILE.is_file():
        local = ["--hostfile", os.devnull]
    else:
        local = []
    where += ["--master_addr", address] if address else []
    return [
        *deepspeed_program(),
        *local,
        *where,
        "--master_port",
        str(port),
        str(script),
        *arguments,
    ]


def node_command(
    topology: HostTopology,
    arguments: Sequence[str],
    *,
    script: Path,
    devices: Sequence[int] | None = None,
    hostfile: str | None = None,
) -> PlainCommand:
    """The `deepspeed` command that trains the same; its hostfile is only a list of places, with
    names of no meaning.
    """
    if devices:
        numbers = sorted(devices)[: topology.slots]
    else:
        numbers = []
    before = ""
    path = hostfile
    include = []
    if path is None or numbers:
        if numbers:
            slots = max(numbers) + 1
        else:
            slots = topology.slots
        few = " ".join(map(str, range(topology.nnodes)))
        if topology.nnodes <= _FEW:
            places = few
        else:
            places = f"$(seq 0 {topology.nnodes - 1})"
        before = f"hosts=$(mktemp) && printf 'node-%s slots={slots}\\n' {places} > $hosts && "
        path = "$hosts"
        if numbers:
            before += f"include=$(printf '@node-%s:{','.join(map(str, numbers))}' {places}) && "
            include = [_INCLUDE]
    own = [
        f"--{name}={getattr(topology, name)}"
        for name in ("node_rank", "master_addr", "master_port")
    ]
    words = [
        *deepspeed_program(),
        f"--hostfile={path}",
        "--no_ssh",
        *own,
        *include,
        str(script),
        *arguments,
    ]
    return PlainCommand(words, before)


def hosts_command(
    options: LaunchOptions,
    topology: HostTopology,
    chosen: Sequence[Chosen],
    arguments: Sequence[str],
    *,
    script: Path,
) -> PlainCommand | None:
    """The `deepspeed` command for the same hosts, through pdsh; None where it has no words for
    them.
    """
    names = [item.host.name for item in chosen]
    choice = options.choice
    filters = [
        f"--{name}={choice[name]}"
        for name in ("include", "exclude", "num_nodes", "num_gpus")
        if choice[name]
    ]
    before = ""
    path = options.hostfile
    if options.include or options.exclude:
        every = [host.name for host in read_hostfile(options.hostfile or "")]
    else:
        every = []
    if any(":" in name for name in names) or any(set(name) & set("@:") for name in every):
        # pdsh reads brackets as a range, and --include takes both signs for its own.
        if not all(
            item.is_first and not (":" in item.host.name and "@" in item.host.name)
            for item in chosen
        ):
            return None
        before = (
            f"hosts=$(mktemp) && printf '%s slots={topology.slots}\\n' {shlex.join(names)} > "
            "$hosts && "
        )
        path = "$hosts"
        filters = []
    if options.remote_python or options.remote_folder:
        return None
    # A single host would be taken for this machine; without its check the launcher needs none of
    # our options of ssh there.
    how = [
        *(["--force_multi"] if topology.nnodes == 1 else []),
        *(["--no_ssh_check"] if options.ssh_args else []),
    ]
    if topology.master_port:
        port = [f"--master_port={topology.master_port}"]
    else:
        port = []
    where = [f"--hostfile={path}", *filters, *how, f"--master_addr={topology.master_addr}", *port]
    variables = {"PDSH_SSH_ARGS_APPEND": options.ssh_args} if options.ssh_args else {}
    return PlainCommand([*deepspeed_program(), *where, str(script), *arguments], before, variables)


def added_environment(
    environment: Mapping[str, str], *, device: str, num_ranks: int
) -> dict[str, str]:
    """The variables that the run needs and the user has not set."""
    added: dict[str, str] = {}
    programs = str(Path(sys.executable).parent)
    if programs not in environment.get("PATH", "").split(os.pathsep):
        # An environment that is not activated: torch calls `ninja` by name to compile DeepSpeed's
        # optimizers.
        added["PATH"] = os.pathsep.join(filter(None, [programs, environment.get("PATH", "")]))
    if device == "cpu" and not environment.get("DS_ACCELERATOR"):
        added["DS_ACCELERATOR"] = "cpu"
    if not environment.get("OMP_NUM_THREADS"):
        # Every rank would take every core, and they would wait for each other: beside GPUs in
        # offloaded optimizers.
        added["OMP_NUM_THREADS"] = str(max(1, usable_cores() // num_ranks))
    if device == "cuda" and not environment.get(
        "PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF")
    ):
        # Batches of evaluation have other sizes than those of training: fixed segments would be
        # left in pieces.
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return added


def as_shell_line(command: Sequence[str], added: Mapping[str, str], *, before: str = "") -> str:
    """Format the command as a line for the shell; `before` defines the ``$hosts`` and ``$include``
    in it.
    """
    variables = [f"{name}={shlex.quote(value)}" for name, value in added.items() if name != "PATH"]
    if "PATH" in added:
        variables.insert(0, f"PATH={shlex.quote(added['PATH'].partition(os.pathsep)[0])}:$PATH")
    found = shutil.which("deepspeed")
    on_path = found is not None and Path(found).absolute() == Path(command[0])
    program = "deepspeed" if on_path else command[0]
    words = [
        word if before and word in ("--hostfile=$hosts", _INCLUDE) else shlex.quote(word)
        for word in command[1:]
    ]
    return before + " ".join([*variables, shlex.quote(program), *words])


def find_train_script() -> Path:
    """train.py: next to the package in a checkout, inside it in an installed copy."""
    package = Path(framework.__file__).resolve().parent
    checkout = package.parent
    # Where packages are installed, a train.py next to ours is somebody else's.
    is_checkout = (checkout / "train.py").is_file() and (checkout / "pyproject.toml").is_file()
    if is_checkout:
        script = checkout / "train.py"
    else:
        script = package / "entry" / "train.py"
    if script.is_relative_to(Path.cwd()):
        return Path(os.path.relpath(script))
    return script


def usable_port(asked: int | None) -> int:
    """A free port, or the one that was asked for; a ConfigError where something listens on that
    one.
    """
    if asked is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", asked))
        except OSError as error:
            reason = f"ranks cannot meet there: {error.strerror}"
            fix = "leave it out, and a free one is taken"
            raise ConfigError.of(
                "port-not-usable", reason, fix, "--master_port", asked, "command line"
            ) from None
    return asked


def deepspeed_program() -> list[str]:
    """The command that belongs to this Python, whatever PATH says."""
    script = Path(sys.executable).with_name("deepspeed")
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-m", "deepspeed.launcher.runner"]
