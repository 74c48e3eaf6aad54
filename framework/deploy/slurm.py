"""``launch slurm``: prints the batch script of a run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from framework.config.load import load_with_source
from framework.deploy.k8s.values import count, variable, whole
from framework.deploy.slurm_script import SlurmRequest, script
from framework.errors import EXIT_OK, UsageError
from framework.launch.submit import checked_plan, hand_out, refuse_one_start
from framework.system.arguments import CommandParser

_WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/%-]*")
_TIME: Final = re.compile(r"[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}|UNLIMITED")
_DIRECTIVE: Final = re.compile(r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:+@/%&|*\[\]()-]+)?")


def main(words: Sequence[str]) -> int:
    """Print the script that the words behind ``launch slurm`` ask for; returns the exit code.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: the run cannot work on those nodes; nothing has been printed.
        StorageError: `--out` cannot be written.
    """
    found = _parser().parse_intermixed_args(list(words))
    if not found.words:
        raise UsageError("launch slurm: name a run config, for example ds_configs/quickstart.yaml")
    request = request_of(found)
    checked_plan(request.config, request.overrides, request.cluster)
    text = script(request, made_by=f"python -m framework launch slurm {shlex.join(words)}")
    hand_out(text, to=None if found.dry_run else found.out)
    return EXIT_OK


def request_of(found: argparse.Namespace) -> SlurmRequest:
    """The request that these arguments make.

    Raises:
        UsageError: two arguments contradict each other, or one is missing.
        ConfigError: the run config cannot be read.
    """
    ranks, on_cpu = _ranks(found)
    config, *overrides = found.words
    settings, _ = load_with_source(config, overrides)
    if found.requeue:
        refuse_one_start(settings, place="launch slurm --requeue", once="without --requeue")
        is_set = any(word.startswith("checkpoint.resume=") for word in overrides)
        overrides += ["checkpoint.resume=auto"] if settings.checkpoint.resume == "never" and not is_set else []
    return SlurmRequest(
        config,
        found.nodes,
        ranks,
        found.name or settings.run.name,
        tuple(overrides),
        "cpu" if on_cpu else "cuda",
        cpus=found.cpus or ranks * (1 if on_cpu else 4),
        signal_seconds=found.signal_seconds,
        requeue=found.requeue,
        python=found.python,
        log=found.log,
        env=tuple(found.env),
        directives=(*_named_directives(found), *found.sbatch),
    )


def _ranks(found: argparse.Namespace) -> tuple[int, bool]:
    """Of a node, and whether it has no GPUs.

    Raises:
        UsageError: nobody can tell, or it is said twice.
    """
    on_cpu = found.gpus == 0
    if found.gpus is None:
        raise UsageError("launch slurm: give the GPUs of a node with --gpus G; --gpus 0 --ranks_per_node N for none")
    if found.ranks_per_node and not on_cpu:
        raise UsageError("launch slurm: with GPUs there is one rank to each; leave --ranks_per_node out")
    return ((found.ranks_per_node or 1) if on_cpu else found.gpus), on_cpu


def _named_directives(found: argparse.Namespace) -> list[str]:
    """The options that are called here as sbatch calls them."""
    values = {name: getattr(found, name) for name in ("time", "partition", "account", "qos", "mem")}
    return [f"--{name}={value}" for name, value in values.items() if value]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m framework launch slurm", description="Print the batch script of a run.", allow_abbrev=False
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG key=value", help="the run config, and settings that win over it"
    )
    add = parser.option
    add("--nodes", type=count, default=1, metavar="N", help="machines (1)")
    add("--gpus", type=whole, metavar="G", help="GPUs of each, one rank to a GPU; 0: none, then --ranks_per_node")
    add("--ranks_per_node", type=count, metavar="N", help="ranks on a node without GPUs (1)")
    add("--cpus", type=count, metavar="C", help="cores of a node (4 a GPU, 1 a rank on CPU)")
    add("--mem", type=_word, metavar="M", help="memory of a node, for example 200G; 0: all of it")
    add("--time", type=_time, metavar="T", help="time limit, as sbatch takes it: 24:00:00, 2-12")
    add("--partition", type=_word, metavar="P")
    add("--account", type=_word, metavar="A")
    add("--qos", type=_word, metavar="Q")
    add(
        "--signal_seconds",
        type=count,
        default=300,
        metavar="S",
        help="the stop request comes this long before the time limit; a step and a save must fit (300)",
    )
    add(
        "--requeue",
        action="store_true",
        help="start again where the time limit stopped the run; scancel --batch --signal=USR2 stops it for good",
    )
    add("--name", type=_word, metavar="X", help="of the job (run.name)")
    add(
        "--python",
        default=_python(),
        metavar="PROGRAM",
        help="as the nodes find it (python where this environment is active; else its whole path)",
    )
    add(
        "--log",
        type=_word_or_pattern,
        default="%x-%j.log",
        metavar="FILE",
        help="output; %%x: name, %%j: number (%%x-%%j.log)",
    )
    add("--env", type=variable, action="append", default=[], metavar="NAME=VALUE", help="variable of the run")
    add(
        "--sbatch",
        type=_directive,
        action="append",
        default=[],
        metavar="=--OPTION[=VALUE]",
        help="further option of sbatch, for example --sbatch=--constraint=h100",
    )
    add("--out", metavar="FILE", help="write there instead of printing")
    add("--dry_run", action="store_true", help="print and write nothing; without --out it is what happens anyway")
    return parser


def _python() -> str:
    """Return how the shell that calls sbatch names this Python: an environment that is not active there is none of the
    nodes'.
    """
    found = shutil.which("python", path=os.environ.get("DSF_SHELL_PATH") or os.environ.get("PATH"))
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return text


def _word(text: str) -> str:
    return _matching(_WORD, text, "one plain word")


def _word_or_pattern(text: str) -> str:
    return _matching(re.compile(r"[A-Za-z0-9_./%-]+"), text, "the path of a file")


def _time(text: str) -> str:
    return _matching(_TIME, text, "a time such as 24:00:00 or 2-12")


def _directive(text: str) -> str:
    return _matching(_DIRECTIVE, text, "an option of sbatch such as --constraint=h100")
