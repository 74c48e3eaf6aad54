"""Command lines of `launch` and `launch node`: options in both spellings, and settings of the run,
which may stand between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from framework.errors import UsageError
from framework.hosts.cores import BINDING_CHOICES
from framework.hosts.hostfile import ChosenHost, bare, choose_hosts, is_host
from framework.system.arguments import add_options, flags_of, like, option, whole
from framework.system.command_parser import CommandParser, add_log_level

# A pod or a scheduler may give less time: its manifest or script then sets --grace_seconds or
# DSF_GRACE_SECONDS.
GRACE_SECONDS: Final = 600.0
KILL_SECONDS: Final = 60.0
"""Wait for a rank after SIGKILL.

Some ranks take this long to give back hundreds of GB of locked memory. A rank that sleeps in the
kernel, for a dead mount or a GPU driver, ends only when that answers.
"""
WAIT_SECONDS: Final = 1800.0
_Options = TypeVar("_Options", bound="SharedOptions")


count = whole(1, 10_000, "{} is not a number of ranks")
port = whole(1, 65_536, "{} is not a port")
seconds = like(r"\d{1,7}(\.\d+)?", float, "{} is not a number of seconds")


def address(text: str) -> str:
    """Read a name or address of a host; the brackets of an IPv6 address are removed."""
    if not is_host(bare(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a name or address of a host")
    return bare(text)


class AsSpelled(argparse.Action):
    """Stores a value, and as ``NAME_flag`` the spelling of its option, for error messages."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_flag", option_string)


def _count_or_all(text: str) -> int | None:
    # torchrun's words for all devices
    if text in ("auto", "gpu"):
        return None
    return count(text)


@dataclass(frozen=True)
class SharedOptions:
    """Options of `launch` and `launch node`; None: to be chosen.

    Attributes:
        num_gpus_flag: spelling of the option that gave `num_gpus`.
    """

    config: str = option("the run config, as train.py takes it", "FILE")
    overrides: tuple[str, ...] = ()
    num_gpus: int | None = option(
        "ranks on each machine, one for each device; left out: every GPU here, or two ranks on CPU",
        "N",
        _count_or_all,
        default=None,
        names=("--num_gpus", "--nproc_per_node"),
        action=AsSpelled,
    )
    master_port: int | None = option(
        "port where ranks meet; agents meet at the next one", "P", port, default=None
    )
    dry_run: bool = option("check, print what would be started and stop")
    deepspeed_config: str | None = option(
        "DeepSpeed JSON that decides a part of the run, as train.py takes it", "FILE", default=None
    )
    grace_seconds: float | None = option(
        f"to save in after a request to stop; also DSF_GRACE_SECONDS; default {GRACE_SECONDS:.0f}",
        "S",
        seconds,
        default=None,
    )
    bind_cores: str = option(
        "give each rank cores of its own, near its device; auto: where a host has several NUMA "
        "nodes or several GPUs",
        default="auto",
        choices=BINDING_CHOICES,
    )
    hostfile: str | None = option(
        "hosts and their devices, in DeepSpeed's format",
        "FILE",
        default=None,
        names=("-H", "--hostfile"),
    )
    master_addr: str | None = option(
        "address of the first host, as the others know it", "A", address, default=None
    )
    min_nodes: int | None = option(
        "start again on N of them or more where others do not come back (supervision.max_restarts)",
        "N",
        count,
        default=None,
    )
    control_port: int | None = option(
        "port where agents meet; default: master_port + 1", "P", port, default=None
    )
    wait_seconds: float | None = option(
        f"how long nodes wait for each other; default {WAIT_SECONDS:.0f}",
        "S",
        seconds,
        default=None,
    )
    no_preflight: bool = option("do not look at each node and at what is between them")
    token_file: str | None = option(
        "holds a secret that all nodes share; also DSF_TOKEN", "FILE", default=None
    )
    num_gpus_flag: str = field(default="--num_gpus", compare=False)


@dataclass(frozen=True)
class LaunchOptions(SharedOptions):
    """Command line of `launch`.

    Attributes:
        exports: names of further variables that go to the hosts.
    """

    fit_batch: bool = option("take the most devices here that divide the batch")
    include: str = option("hosts and devices, as DeepSpeed writes it: host1@host2:0,2", "WHICH")
    exclude: str = option("the same, to leave out", "WHICH")
    num_nodes: int | None = option("the first N hosts", "N", count, default=None)
    ssh_args: str = option("further options of ssh, such as '-p 2222 -i key'", "TEXT")
    remote_python: str | None = option(
        "Python on the hosts; left out: this one's path", "PATH", default=None
    )
    remote_folder: str | None = option(
        "folder on the hosts to start in; left out: this one's path", "PATH", default=None
    )
    exports: Sequence[str] = option(
        "send this variable to the hosts, too",
        "NAME",
        like("[A-Za-z_][A-Za-z0-9_]*", str, "{} is not the name of a variable"),
        many=True,
        names=("--export",),
    )
    verbose: bool = option("print the command of every host, not of the first three")

    def choose_hosts(self) -> tuple[ChosenHost, ...]:
        """Choose hosts and devices of the hostfile, see `framework.hosts.hostfile`."""
        return choose_hosts(
            self.hostfile or "",
            include=self.include,
            exclude=self.exclude,
            num_nodes=self.num_nodes,
            num_gpus=self.num_gpus,
            num_gpus_flag=self.num_gpus_flag,
        )

    @property
    def sources(self) -> dict[str, str]:
        """Sources of the numbers of nodes and slots, if there is a hostfile."""
        if self.include:
            choice = "--include"
        elif self.exclude:
            choice = "--exclude"
        else:
            choice = str(self.hostfile)
        return {
            "nnodes": "--num_nodes" if self.num_nodes else choice,
            "slots": self.num_gpus_flag if self.num_gpus else choice,
        }


@dataclass(frozen=True)
class NodeOptions(SharedOptions):
    """Command line of `launch node`.

    Attributes:
        from_stdin: whether stdin is from `launch -H`, which sends an order and keeps it open.
    """

    nnodes: str | None = option(
        "members of the job", "N", default=None, names=("--nnodes", "--num_nodes"), action=AsSpelled
    )
    node_rank: str | None = option("which of them this is, from 0", "R", default=None)
    devices: tuple[int, ...] | None = option(
        "the devices to use; left out: the first",
        "0,2",
        like(
            r"\d{1,4}(,\d{1,4})*",
            lambda text: tuple(map(int, text.split(","))),
            "{} is not a list of device numbers",
        ),
        default=None,
    )
    no_token: bool = option(
        "let several nodes meet without a secret: any program that reaches their port can end the "
        "job or take a place in it"
    )
    spares: int = option(
        "so many of the members wait for the place of one that is lost",
        "N",
        whole(0, 1000, "{} is not a number of nodes"),
        default=0,
    )
    from_stdin: bool = option(argparse.SUPPRESS)
    nnodes_flag: str = "--nnodes"


# The options of `launch` that also do something without a hostfile.
_WITHOUT_HOSTS: Final = frozenset(
    (
        "config",
        "num_gpus",
        "master_port",
        "dry_run",
        "deepspeed_config",
        "grace_seconds",
        "bind_cores",
        "hostfile",
        "fit_batch",
    )
)


def parse(argv: Sequence[str], *, command: str = "launch") -> LaunchOptions:
    """Read the command line of `launch`, or of `train`; a UsageError if it is wrong."""
    options = _parsed(
        LaunchOptions,
        argv,
        command,
        "Train on this machine, or with -H on the hosts of a hostfile, through ssh. `launch node` "
        "is one member without ssh; `launch k8s` and `launch slurm` print what a cluster is given.",
        "CONFIG [key=value ...] [--num_gpus N] [--master_port P] [-H HOSTFILE ...] "
        "[--deepspeed_config FILE] [--dry_run]",
        grouped="with -H, on the hosts of a hostfile",
    )
    # An option that would do nothing here is refused: its user expects something else.
    if options.hostfile is None:
        idle = []
        for field_ in fields(options):
            is_given = field_.metadata and getattr(options, field_.name) != field_.default
            if is_given and field_.name not in _WITHOUT_HOSTS:
                idle.append(flags_of(field_)[0])
        refuse_idle(command, idle)
    if options.fit_batch and (options.hostfile is not None or options.num_gpus):
        raise UsageError(
            f"{command}: --fit_batch chooses a number of devices of this machine; leave -H and "
            "--num_gpus out"
        )
    refuse_choice(command, options)
    return options


def refuse_idle(command: str, flags: Sequence[str]) -> None:
    """Raise a UsageError for options of hosts without a hostfile."""
    if flags:
        if len(flags) == 1:
            verb = "goes"
        else:
            verb = "go"
        raise UsageError(f"{command}: {', '.join(flags)} {verb} with a hostfile; give -H HOSTFILE")


def refuse_choice(command: str, options: LaunchOptions | argparse.Namespace) -> None:
    """Raise a UsageError for more than one way to choose hosts."""
    if options.include and options.exclude:
        raise UsageError(f"{command}: --include and --exclude exclude each other")
    if (options.include or options.exclude) and (options.num_nodes or options.num_gpus):
        raise UsageError(
            f"{command}: --include and --exclude do not go with --num_nodes and --num_gpus"
        )


def parse_node(argv: Sequence[str]) -> NodeOptions:
    """Read the command line of `launch node`; a UsageError if it is wrong."""
    return _parsed(
        NodeOptions,
        argv,
        "launch node",
        "One member of a job of several nodes, without ssh: in a pod, under srun, or by hand. "
        "What is left out is taken from the environment.",
        "CONFIG [key=value ...] [--nnodes N --node_rank R --master_addr A --master_port P "
        "--num_gpus G] [--dry_run]",
    )


def _parsed(
    kind: type[_Options],
    argv: Sequence[str],
    command: str,
    about: str,
    usage: str,
    *,
    grouped: str = "",
) -> _Options:
    """Return the options of a command line, with the run config apart from its settings.

    Args:
        kind: dataclass of the options.
        argv: the command line without `command`.
        command, about, usage: for the help and for messages.
        grouped: heading in the help of the options that go with a hostfile; empty: none.

    Raises:
        UsageError: the run config is missing, or stands after a setting.
    """
    parser = CommandParser(
        prog=f"dsf {command}",
        description=about,
        usage=f"%(prog)s {usage}",
        allow_abbrev=False,
    )
    help_text = "the run config, and settings that win over it"
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help=help_text)
    add_options(parser, kind, grouped=grouped, apart=_WITHOUT_HOSTS)
    add_log_level(parser)
    arguments = vars(parser.parse_intermixed_args(list(argv)))
    settings: list[str] = arguments.pop("words")
    config = arguments.pop("config")
    if not config and settings:
        config = settings.pop(0)
    elif not config:
        raise UsageError(f"{command}: name a run config, for example ds_configs/quickstart.yaml")
    if "=" in config and not Path(config).exists():
        raise UsageError(f"{command}: {config} is a setting; name the run config before it")
    return kind(config, tuple(settings), **arguments)
