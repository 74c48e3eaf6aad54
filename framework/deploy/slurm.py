"""``launch slurm``: prints the batch script of a run; comments in the script give its reasons.

Our agent runs as one task on each node. Slurm starts it, so that accounting, cgroups and `scancel`
cover every process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from framework import errors
from framework.deploy.options import JobRequest, count, matching, parse, resume_setting
from framework.errors import UsageError
from framework.launch.job import hand_out, refuse_named_checkpoint
from framework.launch.options import WAIT_SECONDS
from framework.load_run import load_run
from framework.system.arguments import option

_MARK: Final = b"framework launch slurm"  # in the head of every script that we print
# From the end of the time that agents give their ranks to the end of the job.
_REPORT_SECONDS: Final = 30
# With this number of GPUs a job is taken to have the whole node.
_WHOLE_NODE_GPUS: Final = 8

# The script. `script` puts a value in the place of ``@name@``, and leaves a line that begins with
# ``@name?`` out if the value is false.
_SCRIPT: Final = Path(__file__).with_suffix(".sh")
_FAILED: Final = (
    errors.EXIT_USAGE,
    errors.EXIT_TRAINING,
    errors.EXIT_STORAGE,
    errors.EXIT_NO_PROGRESS,
    errors.EXIT_CONFIG,
)


_word: Final = matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/%-]*", "one plain word")
_file: Final = matching(r"[A-Za-z0-9_./%-]+", "the path of a file")
_time: Final = matching(
    r"[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}|UNLIMITED", "a time such as 24:00:00 or 2-12"
)
_directive: Final = matching(
    r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:+@/%&|*\[\]()-]+)?",
    "an option of sbatch such as --constraint=h100",
)


@dataclass(frozen=True)
class SlurmRequest(JobRequest):
    """Request of ``launch slurm``: the fields are its options."""

    cpus: int = option("cores of a node (4 a GPU, 1 a rank on CPU)", "C", count, default=0)
    mem: str = option(
        "memory of a node, for example 200G; 0: all of it, as of a whole node "
        "(--sbatch=--exclusive, 8 GPUs)",
        "M",
        _word,
    )
    time: str = option("time limit, as sbatch takes it: 24:00:00, 2-12", "T", _time)
    partition: str = option("as sbatch takes it", "P", _word)
    account: str = option("as sbatch takes it", "A", _word)
    qos: str = option("as sbatch takes it", "Q", _word)
    signal_seconds: int = option(
        "the stop request comes this long before the time limit; a step and a save must fit (300)",
        "S",
        count,
        default=300,
    )
    requeue: bool = option(
        "start again where the time limit or a preemption stopped the run, or a node was lost; "
        "scancel --batch --signal=USR2 stops it for good"
    )
    spares: int = option(
        "further nodes, which wait until one is lost; with supervision.max_restarts",
        "S",
        count,
        default=0,
    )
    min_nodes: int = option("go on with so few where more are lost", "M", count, default=0)
    name: str = option("of the job (run.name)", "X", _word)
    python: str = option(
        "as the nodes find it (python where this environment is active; else its whole path)",
        "PROGRAM",
    )
    log: str = option(
        "output; %%x: name, %%j: number, %%N: a file for each node (%%x-%%j.log)",
        "FILE",
        _file,
        default="%x-%j.log",
    )
    sbatch: Sequence[str] = option(
        "further option of sbatch, for example --sbatch=--constraint=h100",
        "=--OPTION[=VALUE]",
        _directive,
        many=True,
    )

    @property
    def cores(self) -> int:
        """Cores of a node."""
        if self.cpus:
            return self.cpus
        if self.gpus:
            return self.ranks * 4
        return self.ranks

    @property
    def outlives_nodes(self) -> bool:
        """True if the job goes on without a node that is lost."""
        return bool(self.spares or self.min_nodes)


def main(words: Sequence[str]) -> int:
    """Print or write the batch script of a run; returns the exit code. After an error nothing has
    been printed.
    """
    request = parse(
        SlurmRequest, words, command="launch slurm", description="Print the batch script of a run."
    )
    too_many = f"--min_nodes {request.min_nodes} is more than --nodes"
    request.refuse_mistakes("launch slurm", [(request.min_nodes > request.nodes, too_many)])
    path = request.config
    overrides = list(request.overrides)
    config = load_run(path, overrides).config
    request.refuse_secrets("launch slurm")
    max_restarts = config.supervision.max_restarts
    if request.outlives_nodes and not max_restarts:
        raise UsageError(
            "launch slurm: --spares and --min_nodes are for agents that start ranks again: set "
            "supervision.max_restarts"
        )
    if request.requeue:
        refuse_named_checkpoint(config, place="launch slurm --requeue", once="without --requeue")
        overrides += resume_setting(overrides, config)
    name = request.name or config.run.name
    request = replace(request, words=[path, *overrides], name=name, max_restarts=max_restarts)
    load_run(path, overrides).checked_plan(request.cluster)
    text = script(request, made_by=f"dsf launch slurm {shlex.join(words)}")
    hand_out(text, to=None if request.dry_run else request.out, mark=_MARK)
    return errors.EXIT_OK


def script(request: SlurmRequest, *, made_by: str) -> str:
    """Return the batch script; `made_by` is the command that printed it, for its head."""
    values = _values(request, made_by)

    def kept_line(match: re.Match[str]) -> str:
        name, line = match.groups()
        return line if values[name] else ""

    text = _SCRIPT.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^@(\w+)\?(.*\n)", kept_line, text)
    return re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), text)


def _values(request: SlurmRequest, made_by: str) -> dict[str, Any]:
    """Return the values of the script's ``@name@`` and ``@name?``."""
    words = [request.python or _python(), "-m", "framework", "launch", "node"]
    words += request.words
    margin = min(_REPORT_SECONDS, request.signal_seconds // 5)
    return {
        "made_by": errors.printable(made_by),
        "directives": "\n".join(f"#SBATCH {option}" for option in _directives(request)),
        "exports": _exports(request),
        "stopped": errors.EXIT_STOPPED,
        "wait": _wait_seconds(request),
        "srun": "--no-kill " if request.outlives_nodes else "",
        "log": request.log,
        "command": shlex.join(words),
        "ranks": request.ranks,
        "grace": request.signal_seconds - margin,
        "spares": _spares(request),
        "lost": errors.EXIT_PEER_LOST,
        "failed": "|".join(map(str, _FAILED)),
        "requeue": request.requeue,
        "once": not request.requeue,
        "again": "   and come again: --signal=USR1" if request.requeue else "",
    }


def _spares(request: SlurmRequest) -> str:
    """Return the agents' options for spare nodes, and for going on with fewer nodes than the job
    has.
    """
    spares = ""
    if request.spares:
        spares += f" --spares {request.spares}"
    if request.min_nodes:
        spares += f" --min_nodes {request.min_nodes}"
    return spares


def _exports(request: SlurmRequest) -> str:
    """Return the lines that set variables; the request's own variables win."""
    variables = {}
    if not request.gpus:
        threads = max(1, request.cores // request.ranks)
        variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    variables |= dict(request.env)
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    return "".join(lines)


def _wait_seconds(request: SlurmRequest) -> int:
    """Return the seconds other agents may go on after the first has ended; 0 for no limit.

    They save in that time. With restarts they also wait for a new agent in its place.
    """
    if request.outlives_nodes:
        return 0
    seconds = max(60, request.signal_seconds)
    if request.max_restarts:
        seconds += int(WAIT_SECONDS)
    return seconds


def _directives(request: SlurmRequest) -> list[str]:
    """Return the options that sbatch reads; the user's own come last and win."""
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes + request.spares}",
        "--ntasks-per-node=1",
    ]
    if request.gpus:
        options.append(f"--gpus-per-node={request.gpus}")
    options.append(f"--cpus-per-task={request.cores}")
    options.append(f"--signal=B:USR1@{request.signal_seconds}")
    options.append("--requeue" if request.requeue else "--no-requeue")
    if request.outlives_nodes:
        options.append("--no-kill")
    # The log of this script; nodes may have files of their own.
    options.append(f"--output={re.sub('-?%[Nnt]', '', request.log)}")
    options.append("--open-mode=append")
    limits = {
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "mem": _memory(request),
    }
    options += [f"--{name}={value}" for name, value in limits.items() if value]
    options += request.sbatch
    return options


def _memory(request: SlurmRequest) -> str:
    """Return the value of sbatch's ``--mem``: 0 means all of a whole node; empty: no option."""
    if request.mem:
        return request.mem
    if any(word.startswith("--mem") for word in request.sbatch):
        return ""
    if (request.gpus or 0) >= _WHOLE_NODE_GPUS or "--exclusive" in request.sbatch:
        return "0"
    return ""


def _python() -> str:
    """Return this Python's path, or ``python`` if the calling shell finds it by that name."""
    search_path = os.environ.get("DSF_SHELL_PATH") or os.environ.get("PATH")
    program = shutil.which("python", path=search_path)
    if program and Path(program).parent == Path(sys.executable).parent:
        return "python"
    return sys.executable
