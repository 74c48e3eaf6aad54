"""``launch slurm``: prints the batch script of a run, which has the reasons of what is in it.

One task on each node is our agent. Slurm starts it: accounting, cgroups and `scancel` hold for
every process.
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
from typing import Final

from framework import errors
from framework.deploy.options import JobRequest, count, matching, parse, refuse, resume_setting
from framework.launch.job import hand_out, refuse_one_start
from framework.launch.options import WAIT_SECONDS
from framework.load_run import load_run
from framework.system.arguments import option

# Between the end of what our agents give the ranks and the end of the job.
_MARK: Final = b"framework launch slurm"  # in the head of a script of ours
_LAST_WORD_SECONDS: Final = 30
# GPUs of one node that is taken to be the job's own.
_WHOLE_NODE_GPUS: Final = 8

# The script; ``@name@`` stands for what `script` fills in, and a line after ``@name?`` is in it
# where that holds.
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
        return self.cpus or self.ranks * (4 if self.gpus else 1)

    @property
    def outlives_nodes(self) -> bool:
        """Check whether the job goes on without a node that is lost."""
        return bool(self.spares or self.min_nodes)


def main(words: Sequence[str]) -> int:
    """Print the script that the words behind ``launch slurm`` ask for; after an error nothing has
    been printed.
    """
    request = parse(
        SlurmRequest, words, command="launch slurm", description="Print the batch script of a run."
    )
    too_many = f"--min_nodes {request.min_nodes} is more than --nodes"
    request.refuse_mistakes("launch slurm", [(request.min_nodes > request.nodes, too_many)])
    path, *overrides = request.words
    config = load_run(path, overrides).config
    request.refuse_secrets("launch slurm")
    max_restarts = config.supervision.max_restarts
    nobody = (
        "--spares and --min_nodes are for agents that start ranks again: set "
        "supervision.max_restarts"
    )
    refuse("launch slurm", [(request.outlives_nodes and not max_restarts, nobody)])
    if request.requeue:
        refuse_one_start(config, place="launch slurm --requeue", once="without --requeue")
        overrides += resume_setting(overrides, config)
    name = request.name or config.run.name
    request = replace(request, words=[path, *overrides], name=name, max_restarts=max_restarts)
    load_run(path, overrides).checked_plan(request.cluster)
    text = script(request, made_by=f"python -m framework launch slurm {shlex.join(words)}")
    hand_out(text, to=None if request.dry_run else request.out, mark=_MARK)
    return errors.EXIT_OK


def script(request: SlurmRequest, *, made_by: str) -> str:
    """The batch script; `made_by` is the command that made it, for its head."""
    words = [request.python or _python(), "-m", "framework", "launch", "node", *request.words]
    variables = dict(request.env)
    if not request.gpus:
        threads = str(max(1, request.cores // request.ranks))
        variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads} | variables
    of_losses = {"spares": request.spares, "min_nodes": request.min_nodes}
    filled_in = {
        "made_by": errors.printable(made_by),
        "directives": "\n".join(f"#SBATCH {line}" for line in _directives(request)),
        "exports": "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()
        ),
        "stopped": errors.EXIT_STOPPED,
        "wait": _wait_seconds(request),
        "srun": "--no-kill " * request.outlives_nodes,
        "log": request.log,
        "command": shlex.join(words),
        "ranks": request.ranks,
        "grace": request.signal_seconds - min(_LAST_WORD_SECONDS, request.signal_seconds // 5),
        "spares": "".join(f" --{name} {value}" for name, value in of_losses.items() if value),
        "lost": errors.EXIT_PEER_LOST,
        "failed": "|".join(map(str, _FAILED)),
        "requeue": request.requeue,
        "once": not request.requeue,
        "again": "   and come again: --signal=USR1" if request.requeue else "",
    }
    text = _SCRIPT.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^@(\w+)\?(.*\n)", lambda line: line[2] if filled_in[line[1]] else "", text)
    return re.sub(r"@(\w+)@", lambda name: str(filled_in[name[1]]), text)


def _wait_seconds(request: SlurmRequest) -> int:
    """The time that other agents may go on once one has ended: to save, to wait for it, or without
    it.
    """
    if request.outlives_nodes:
        return 0  # without end
    return max(60, request.signal_seconds) + (int(WAIT_SECONDS) if request.max_restarts else 0)


def _directives(request: SlurmRequest) -> list[str]:
    """The options that sbatch reads; the user's own come last and win."""
    is_whole = (request.gpus or 0) >= _WHOLE_NODE_GPUS or "--exclusive" in request.sbatch
    same = {name: getattr(request, name) for name in ("time", "partition", "account", "qos", "mem")}
    same["mem"] = request.mem or (
        "0" if is_whole and not any(word.startswith("--mem") for word in request.sbatch) else ""
    )
    return [
        f"--job-name={request.name}",
        f"--nodes={request.nodes + request.spares}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        f"--cpus-per-task={request.cores}",
        f"--signal=B:USR1@{request.signal_seconds}",
        "--requeue" if request.requeue else "--no-requeue",
        *(["--no-kill"] if request.outlives_nodes else []),
        # Of this script; nodes may have files of their own.
        f"--output={re.sub('-?%[Nnt]', '', request.log)}",
        "--open-mode=append",
        *(f"--{name}={value}" for name, value in same.items() if value),
        *request.sbatch,
    ]


def _python() -> str:
    """Return the name of this Python on the nodes: a path, unless the calling shell has this
    environment active.
    """
    found = shutil.which("python", path=os.environ.get("DSF_SHELL_PATH") or os.environ.get("PATH"))
    if found and Path(found).parent == Path(sys.executable).parent:
        return "python"
    return sys.executable
