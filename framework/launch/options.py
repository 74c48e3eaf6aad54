"""The command lines of `launch` and `launch node`: options in both spellings, settings anywhere between them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.arguments import CommandParser
from framework.errors import UsageError
from framework.launch.host_names import bare, is_host

# A pod or a scheduler may give less; what starts us can say so with --grace_seconds or DSF_GRACE_SECONDS.
GRACE_SECONDS: Final = 600.0
WAIT_SECONDS: Final = 1800.0


@dataclass(frozen=True)
class Request:
    """A parsed command line of `launch`; None: to be chosen.

    Attributes:
        config: path of the run config.
        overrides: ``key=value`` settings.
        num_ranks: ranks on this machine, or on each of the hosts.
        port: where the ranks meet.
        dry_run: print and stop.
        deepspeed_config: DeepSpeed JSON for train.py.
        grace_seconds: for a checkpoint after a request to stop.
        hostfile: hosts to start on through ssh.
        include, exclude: parts of the hostfile, as DeepSpeed writes them.
        num_nodes: of its hosts, the first so many.
        master_addr: the first host's address for the others.
        control_port: where agents meet.
        wait_seconds: how long they wait for each other.
        ssh_args: further options of `ssh`, one text.
        remote_python, remote_folder: on the hosts; left out: the same as here.
        exports: names of further variables that go to the hosts.
        token_file: holds a secret that all nodes share.
        no_preflight: nodes do not look at themselves before they start.
        verbose: print the command of every host.
        fit_batch: take as many devices as divide the batch where no number is given.
    """

    config: str
    overrides: tuple[str, ...] = ()
    num_ranks: int | None = None
    port: int | None = None
    dry_run: bool = False
    deepspeed_config: str | None = None
    grace_seconds: float | None = None
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    master_addr: str | None = None
    control_port: int | None = None
    wait_seconds: float = WAIT_SECONDS
    ssh_args: str = ""
    remote_python: str | None = None
    remote_folder: str | None = None
    exports: tuple[str, ...] = ()
    token_file: str | None = None
    no_preflight: bool = False
    verbose: bool = False
    fit_batch: bool = False


def parse(argv: Sequence[str]) -> Request:
    """Read the command line of `launch`.

    Raises:
        UsageError: it is wrong.
    """
    found = _intermixed(_launch_parser(), argv)
    request = Request(
        *_config_and_words(found, "launch"), found.num_gpus, found.master_port, found.dry_run, found.deepspeed_config,
        found.grace_seconds, found.hostfile, found.include, found.exclude, found.num_nodes, found.master_addr,
        found.control_port, found.wait_seconds, found.ssh_args, found.remote_python, found.remote_folder,
        tuple(found.exports), found.token_file, found.no_preflight, found.verbose, found.fit_batch,
    )  # fmt: skip
    # Words of ssh that would do nothing here are a mistake in the thought, not a detail.
    names = ("include", "exclude", "num_nodes", "master_addr", "control_port", "ssh_args", "remote_python", "remote_folder",
             "exports", "verbose")  # fmt: skip
    idle = [f"--{name.rstrip('s') if name == 'exports' else name}" for name in names if getattr(found, name)]
    if request.hostfile is None and idle:
        raise UsageError(f"launch: {', '.join(idle)} go with a hostfile; give -H HOSTFILE")
    if request.fit_batch and (request.hostfile is not None or request.num_ranks):
        raise UsageError("launch: --fit_batch chooses a number of devices of this machine; leave -H and --num_gpus out")
    refuse_choice("launch", include=request.include, exclude=request.exclude,
                  by_number=bool(request.num_nodes or request.num_ranks))  # fmt: skip
    return request


def refuse_choice(command: str, *, include: str, exclude: str, by_number: bool) -> None:
    """DeepSpeed takes hosts and devices by name or by number, and some or all but some.

    Raises:
        UsageError: more than one of these was given.
    """
    if include and exclude:
        raise UsageError(f"{command}: --include and --exclude exclude each other")
    if (include or exclude) and by_number:
        raise UsageError(f"{command}: --include and --exclude do not go with --num_nodes and --num_gpus")


def parse_node(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line of `launch node`; `config` and `words` are set.

    Raises:
        UsageError: it is wrong.
    """
    found = _intermixed(_node_parser(), argv)
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


def _intermixed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    return parser.parse_intermixed_args(list(argv))


def _launch_parser() -> CommandParser:
    parser = CommandParser(prog="python -m framework launch", allow_abbrev=False,
                     description="Train on this machine, or with -H on the hosts of a hostfile, through ssh. `launch node` is one "
                                 "member without ssh; `launch k8s` and `launch slurm` print what a cluster is given.",
                     usage="%(prog)s CONFIG [key=value ...] [--num_gpus N] [--master_port P] [-H HOSTFILE ...] "
                           "[--deepspeed_config FILE] [--dry_run]")  # fmt: skip
    _add_common(parser)
    parser.option("--fit_batch", action="store_true", help="take the most devices here that divide the batch")
    ssh = parser.add_argument_group("through ssh")
    parser.option("--verbose", action="store_true", help="with -H: print the command of every host, not of the first three")
    parser.option("--num_nodes", type=count, metavar="N", help="with -H: the first N hosts")
    parser.option("--ssh_args", default="", metavar="TEXT", help="further options of ssh, such as '-p 2222 -i key'")
    parser.option("--remote_python", metavar="PATH", help="Python on the hosts; left out: this one's path")
    parser.option("--remote_folder", metavar="PATH", help="folder on the hosts to start in; left out: this one's path")
    parser.option("--export", dest="exports", type=_name, action="append", default=[], metavar="NAME",
                  help="send this variable to the hosts, too")  # fmt: skip
    add_choice(ssh)
    return parser


def add_choice(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options that choose among the hosts of a hostfile by name."""
    parser.add_argument("--include", default="", metavar="WHICH", help="hosts and devices, as DeepSpeed writes it: host1@host2:0,2")
    parser.add_argument("--exclude", default="", metavar="WHICH", help="the same, to leave out")


def _node_parser() -> CommandParser:
    parser = CommandParser(prog="python -m framework launch node", allow_abbrev=False,
                     description="One member of a job of several nodes, without ssh: in a pod, under srun, or by hand. "
                                 "What is left out is taken from the environment.",
                     usage="%(prog)s CONFIG [key=value ...] [--nnodes N --node_rank R --master_addr A --master_port P "
                           "--num_gpus G] [--dry_run]")  # fmt: skip
    _add_common(parser)
    parser.option("--nnodes", "--num_nodes", type=str, metavar="N", help="members of the job")
    parser.option("--node_rank", type=str, metavar="R", help="which of them this is, from 0")
    parser.option("--devices", type=_numbers, metavar="0,2", help="the devices to use; left out: the first")
    parser.option("--from_stdin", action="store_true", help=argparse.SUPPRESS)  # what an ssh launcher sends, and its life line
    return parser


def _add_common(parser: CommandParser) -> None:
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="the run config, and settings that win over it")
    parser.option("--config", metavar="FILE", help="the run config, as train.py takes it")
    parser.option("--num_gpus", "--nproc_per_node", type=count_or_auto, metavar="N",
                  help="ranks on each machine, one for each device; left out: every GPU here, or two ranks on CPU")  # fmt: skip
    parser.option("--master_port", type=port, metavar="P", help="port where ranks meet; agents meet at the next one")
    parser.option("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON that decides a part of the run, as train.py takes it")
    parser.option("--dry_run", action="store_true", help="check, print what would be started and stop")
    parser.option("--grace_seconds", type=seconds, metavar="S",
                  help=f"to save in after a request to stop; also DSF_GRACE_SECONDS; default {GRACE_SECONDS:.0f}")  # fmt: skip
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="hosts and their devices, in DeepSpeed's format")
    parser.option("--master_addr", type=address, metavar="A", help="address of the first host, as the others know it")
    parser.option("--control_port", type=port, metavar="P", help="port where agents meet; default: master_port + 1")
    parser.option("--wait_seconds", type=seconds, default=WAIT_SECONDS, metavar="S", help="how long nodes wait for each other")
    parser.option("--no_preflight", action="store_true", help="of several nodes: do not look at each and at what is between them")
    parser.option("--token_file", metavar="FILE", help="holds a secret that all nodes share; also DSF_TOKEN")


def count(text: str) -> int:
    """A number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks")
    return int(text)


def count_or_auto(text: str) -> int | None:
    """The same, or None for torchrun's words for all devices."""
    return None if text in ("auto", "gpu") else count(text)


def port(text: str) -> int:
    """A port.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65_536):
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)


def seconds(text: str) -> float:
    """A time in seconds.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not re.fullmatch(r"\d{1,7}(\.\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return float(text)


def address(text: str) -> str:
    """A name or address of a host; IPv6 also in brackets, which it loses.

    Raises:
        argparse.ArgumentTypeError: no host can have it.
    """
    if not is_host(bare(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a name or address of a host")
    return bare(text)


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text} is not a list of device numbers")
    return tuple(map(int, text.split(",")))


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text} is not the name of a variable")
    return text
