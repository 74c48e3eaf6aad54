"""The command lines of `launch` and `launch node`: options in both spellings, settings anywhere between them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from framework.errors import UsageError
from framework.launch.hosts.hostfile import bare, is_host
from framework.system.arguments import CommandParser, add_log_level, add_option, like, whole

# A pod or a scheduler may give less; what starts us can say so with --grace_seconds or DSF_GRACE_SECONDS.
GRACE_SECONDS: Final = 600.0
KILL_SECONDS: Final = 60.0
"""Wait for a rank after SIGKILL: some take this long to give back hundreds of GB of locked memory. One that sleeps in
the kernel, for a dead mount or a GPU driver, ends only when that answers.
"""
WAIT_SECONDS: Final = 1800.0


@dataclass(frozen=True)
class LaunchOptions:
    """A parsed command line of `launch`, each option under its own name; None: to be chosen.

    Attributes:
        exports: names of further variables that go to the hosts.
        fit_batch: take as many devices as divide the batch where no number is given.
        num_gpus_flag: the word that gave `num_gpus`.
    """

    config: str
    overrides: tuple[str, ...] = ()
    num_gpus: int | None = None
    master_port: int | None = None
    dry_run: bool = False
    deepspeed_config: str | None = None
    grace_seconds: float | None = None
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    min_nodes: int | None = None
    master_addr: str | None = None
    control_port: int | None = None
    wait_seconds: float | None = None
    ssh_args: str = ""
    remote_python: str | None = None
    remote_folder: str | None = None
    exports: tuple[str, ...] = ()
    token_file: str | None = None
    no_preflight: bool = False
    verbose: bool = False
    fit_batch: bool = False
    num_gpus_flag: str = field(default="--num_gpus", compare=False)

    @property
    def choice(self) -> dict[str, Any]:
        """Of hosts and their devices, for `choose_hosts`."""
        names = ("include", "exclude", "num_nodes", "num_gpus", "num_gpus_flag")
        return {name: getattr(self, name) for name in names}

    @property
    def sources(self) -> dict[str, str]:
        """Name who decided the number of nodes and that of slots, where there is a hostfile."""
        choice = ("--include" if self.include else "--exclude" if self.exclude else "") or str(self.hostfile)
        return {
            "nnodes": "--num_nodes" if self.num_nodes else choice,
            "slots": self.num_gpus_flag if self.num_gpus else choice,
        }


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Read the command line of `launch`.

    Raises:
        UsageError: it is wrong.
    """
    parser, of_hosts = _launch_parser()
    found = parser.parse_intermixed_args(list(argv))
    # An option that would do nothing here is a mistake in the thought, not a detail.
    idle = [each.option_strings[0] for each in of_hosts._group_actions if getattr(found, each.dest) != each.default]
    refuse_idle("launch", idle if found.hostfile is None else ())
    given = vars(found) | {"exports": tuple(found.exports)}
    given["config"], given["overrides"] = _config_and_words(found, "launch")
    del given["words"]
    options = LaunchOptions(**given)
    if options.fit_batch and (options.hostfile is not None or options.num_gpus):
        raise UsageError("launch: --fit_batch chooses a number of devices of this machine; leave -H and --num_gpus out")
    refuse_choice("launch", options)
    return options


def refuse_idle(command: str, flags: Sequence[str]) -> None:
    """Refuse options of hosts, with a UsageError, where no hosts are named."""
    if flags:
        verb = "goes" if len(flags) == 1 else "go"
        raise UsageError(f"{command}: {', '.join(flags)} {verb} with a hostfile; give -H HOSTFILE")


def refuse_choice(command: str, asked: LaunchOptions | argparse.Namespace) -> None:
    """Refuse, with a UsageError, more than one way to choose: by name or by number, and some or all but some."""
    if asked.include and asked.exclude:
        raise UsageError(f"{command}: --include and --exclude exclude each other")
    if (asked.include or asked.exclude) and (asked.num_nodes or asked.num_gpus):
        raise UsageError(f"{command}: --include and --exclude do not go with --num_nodes and --num_gpus")


def parse_node(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line of `launch node`; `config` and `words` are set.

    Raises:
        UsageError: it is wrong.
    """
    found = _node_parser().parse_intermixed_args(list(argv))
    found.config, found.words = _config_and_words(found, "launch node")
    return found


def _config_and_words(found: argparse.Namespace, command: str) -> tuple[str, tuple[str, ...]]:
    words: list[str] = found.words
    config = found.config or (words.pop(0) if words else None)
    if config is None:
        raise UsageError(f"{command}: name a run config, for example ds_configs/quickstart.yaml")
    if "=" in config and not Path(config).exists():
        raise UsageError(f"{command}: {config} is a setting; name the run config before it")
    return config, tuple(words)


def _launch_parser() -> tuple[CommandParser, argparse._ArgumentGroup]:
    """The parser, and the group of options that do nothing without a hostfile."""
    parser = CommandParser(
        prog="python -m framework launch",
        allow_abbrev=False,
        description="Train on this machine, or with -H on the hosts of a hostfile, through ssh. `launch node` is one "
        "member without ssh; `launch k8s` and `launch slurm` print what a cluster is given.",
        usage="%(prog)s CONFIG [key=value ...] [--num_gpus N] [--master_port P] [-H HOSTFILE ...] "
        "[--deepspeed_config FILE] [--dry_run]",
    )
    _add_common(parser)
    parser.option("--fit_batch", action="store_true", help="take the most devices here that divide the batch")
    group = parser.add_argument_group("with -H, on the hosts of a hostfile")
    add_choice(group)
    option = partial(add_option, group)
    option("--num_nodes", type=count, metavar="N", help="the first N hosts")
    about = "start again on N hosts or more where others do not come back (supervision.max_restarts)"
    option("--min_nodes", type=count, metavar="N", help=about)
    option("--ssh_args", default="", metavar="TEXT", help="further options of ssh, such as '-p 2222 -i key'")
    option("--remote_python", metavar="PATH", help="Python on the hosts; left out: this one's path")
    option("--remote_folder", metavar="PATH", help="folder on the hosts to start in; left out: this one's path")
    variable = like("[A-Za-z_][A-Za-z0-9_]*", str, "{} is not the name of a variable")
    terms: dict[str, Any] = {"dest": "exports", "action": "append", "default": []}
    option("--export", **terms, type=variable, metavar="NAME", help="send this variable to the hosts, too")
    option("--verbose", action="store_true", help="print the command of every host, not of the first three")
    _add_of_several(group)
    return parser, group


def _node_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m framework launch node",
        allow_abbrev=False,
        description="One member of a job of several nodes, without ssh: in a pod, under srun, or by hand. "
        "What is left out is taken from the environment.",
        usage="%(prog)s CONFIG [key=value ...] [--nnodes N --node_rank R --master_addr A --master_port P "
        "--num_gpus G] [--dry_run]",
    )
    _add_common(parser)
    parser.option("--nnodes", "--num_nodes", type=str, action=_AsSpelled, metavar="N", help="members of the job")
    parser.option("--node_rank", type=str, metavar="R", help="which of them this is, from 0")
    numbers = like(
        r"\d{1,4}(,\d{1,4})*", lambda text: tuple(map(int, text.split(","))), "{} is not a list of device numbers"
    )
    parser.option("--devices", type=numbers, metavar="0,2", help="the devices to use; left out: the first")
    terms: dict[str, Any] = {"type": whole(0, 1000, "{} is not a number of nodes"), "default": 0, "metavar": "N"}
    parser.option("--spares", **terms, help="so many of the members wait for the place of one that is lost")
    about = "start again on N nodes or more where others do not come back (supervision.max_restarts)"
    parser.option("--min_nodes", type=count, metavar="N", help=about)
    # What an ssh launcher sends, and its life line.
    parser.option("--from_stdin", action="store_true", help=argparse.SUPPRESS)
    _add_of_several(parser)
    parser.set_defaults(wait_seconds=WAIT_SECONDS, nnodes_flag="--nnodes")
    return parser


def _add_common(parser: CommandParser) -> None:
    words = "the run config, and settings that win over it"
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help=words)
    parser.option("--config", metavar="FILE", help="the run config, as train.py takes it")
    add_num_gpus(parser, "ranks on each machine, one for each device; left out: every GPU here, or two ranks on CPU")
    parser.option("--master_port", type=port, metavar="P", help="port where ranks meet; agents meet at the next one")
    decides = "DeepSpeed JSON that decides a part of the run, as train.py takes it"
    parser.option("--deepspeed_config", metavar="FILE", help=decides)
    parser.option("--dry_run", action="store_true", help="check, print what would be started and stop")
    grace = f"to save in after a request to stop; also DSF_GRACE_SECONDS; default {GRACE_SECONDS:.0f}"
    parser.option("--grace_seconds", type=seconds, metavar="S", help=grace)
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="hosts and their devices, in DeepSpeed's format")
    add_log_level(parser)


class _AsSpelled(argparse.Action):
    """Stores a value, and as ``NAME_flag`` the name under which it was given: errors blame no other word."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_flag", option_string)


def add_num_gpus(parser: CommandParser, text: str) -> None:
    """The number of ranks on a host, by our name or torchrun's; `text` is its help."""
    names, terms = ("--num_gpus", "--nproc_per_node"), {"type": count_or_auto, "action": _AsSpelled}
    parser.option(*names, **terms, metavar="N", help=text)
    parser.set_defaults(num_gpus_flag="--num_gpus")


def add_choice(target: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options that choose among the hosts of a hostfile by name."""
    which = "hosts and devices, as DeepSpeed writes it: host1@host2:0,2"
    add_option(target, "--include", default="", metavar="WHICH", help=which)
    add_option(target, "--exclude", default="", metavar="WHICH", help="the same, to leave out")


def _add_of_several(target: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options of every launcher that has others to meet."""
    option = partial(add_option, target)
    option("--master_addr", type=address, metavar="A", help="address of the first host, as the others know it")
    option("--control_port", type=port, metavar="P", help="port where agents meet; default: master_port + 1")
    waited = f"how long nodes wait for each other; default {WAIT_SECONDS:.0f}"
    option("--wait_seconds", type=seconds, metavar="S", help=waited)
    option("--no_preflight", action="store_true", help="do not look at each node and at what is between them")
    option("--token_file", metavar="FILE", help="holds a secret that all nodes share; also DSF_TOKEN")


count = whole(1, 10_000, "{} is not a number of ranks")
port = whole(1, 65_536, "{} is not a port")
seconds = like(r"\d{1,7}(\.\d+)?", float, "{} is not a number of seconds")


def count_or_auto(text: str) -> int | None:
    """As `count`, or None for torchrun's words for all devices."""
    return None if text in ("auto", "gpu") else count(text)


def address(text: str) -> str:
    """A name or address of a host; IPv6 also in brackets, which it loses.

    Raises:
        argparse.ArgumentTypeError: no host can have it.
    """
    if not is_host(bare(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a name or address of a host")
    return bare(text)
